"""What follows the steps: the learning rate is that of torch's own schedulers, and a server is told of progress now and then."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.train.progress import OF_ELAPSED, REFRESH_SECONDS, UpdateSchedule
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


A_DAY = 86_400.0


def shown(seconds, step):
    """When something is shown in a training of so many seconds, whose steps take `step` seconds each."""
    schedule = UpdateSchedule(began=1000.0)
    return [now for number in range(int(seconds / step)) if schedule.due(now := 1000.0 + number * step)]


def test_the_first_step_is_shown_at_once_and_two_updates_are_never_closer_than_five_seconds():
    times = shown(600, 0.1)
    assert times[0] == 1000.0
    assert min(later - earlier for earlier, later in pairwise(times)) >= REFRESH_SECONDS
    assert len(times) >= 600 / REFRESH_SECONDS / 1.1


def test_ten_times_the_days_are_not_ten_times_the_updates():
    days, ten = len(shown(A_DAY, 0.5)), len(shown(10 * A_DAY, 0.5))
    assert ten - days <= OF_ELAPSED * math.log(10) + 1
    assert ten < 7_000


def test_steps_that_take_minutes_are_all_shown():
    assert len(shown(A_DAY, 300)) == A_DAY / 300
