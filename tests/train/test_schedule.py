"""The learning rate of each step is that of torch's own schedulers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.train.settings import OptimizerSettings
from tokenmill.tasks.train.training import learning_rate
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

HIGHEST, LOWEST = 0.004, 0.0005


def by_torch(decay, warmup, steps):
    """The rates of all steps. torch counts from 0, so that step 1 comes after the first of its steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=HIGHEST)
    rest = max(1, steps - warmup)
    falling = {
        "cosine": lambda: CosineAnnealingLR(optimizer, rest, LOWEST),
        "linear": lambda: LinearLR(optimizer, 1, LOWEST / HIGHEST, rest),
        "constant": lambda: ConstantLR(optimizer, 1),
    }[decay]
    if warmup:
        growing = LinearLR(optimizer, 1e-12, 1, warmup)
        scheduler = SequentialLR(optimizer, [growing, falling()], [warmup])
    else:
        scheduler = falling()
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@given(steps=st.integers(1, 40), warmup=st.integers(0, 12))
def test_the_rate_grows_and_falls_as_torchs_does(decay, steps, warmup):
    settings = OptimizerSettings(learning_rate=HIGHEST, minimum_learning_rate=LOWEST, warmup_steps=warmup, decay=decay)
    rates = [learning_rate(step, steps, settings) for step in range(1, steps + 1)]
    assert rates == pytest.approx(by_torch(decay, warmup, steps), abs=1e-9)
