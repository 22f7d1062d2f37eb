"""Benchmark records of steps made by hand, and what a model asks of a device beside PyTorch's own count."""

import io
import itertools
import json

import pytest
import torch
from rich.console import Console
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.train.benchmark import (
    baseline_of,
    compare,
    print_comparison,
    print_record,
    read_record,
    record,
    summarise,
)
from tokenmill.tasks.train.events import Started, TrainStep
from tokenmill.tasks.train.job import Job, TrainData, TrainSource
from tokenmill.tasks.train.settings import ModelSettings, TrainSettings
from tokenmill.tasks.train.training import flops_per_token, peak_flops
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

STARTED = Started(step=0, steps=12, parameters=1000, device="NVIDIA H200", processes=2, engine="megatron-core")


def job(data=None, **settings):
    sources = [
        TrainSource(dataset="a", split="train", files=["x", "y"], weights=[1.0, 0.5], tokens=900),
        TrainSource(dataset="a", split="valid", files=["v"], weights=[1.0], tokens=10),
    ]
    known = {
        "path": "/data", "kind": "pretrain", "made_from": "1", "tokenizer": {}, "fingerprint": "sha256:1",
        "vocabulary_size": 500, "eos": 1, "sources": sources,
    }  # fmt: skip
    return Job(settings=TrainSettings(**settings), data=TrainData(**{**known, **(data or {})}), output_dir="/out")


def step(number, seconds=1.0, **changes):
    known = {
        "loss": 3.0, "learning_rate": 0.1, "gradient_norm": 1.0, "tokens": 1000, "loss_tokens": 800, "padding": 100,
        "waited": 0.1, "mfu": 0.4, "memory": 10_000,
    }  # fmt: skip
    return TrainStep(step=number, seconds=seconds, **{**known, **changes})


def steps(count=12, **changes):
    return [step(number, **changes) for number in range(1, count + 1)]


@pytest.fixture
def base():
    return summarise(job(), STARTED, steps())


def test_figures_of_the_steady_state():
    slow = [step(1, 50.0, loss=9.0, memory=5, tokens=7, loss_tokens=7), step(2, 30.0, mfu=0.01)]
    seconds = [2.0, 1.0, 1.0, 4.0]
    losses, trained = [4.0, 3.0, 2.0, 1.0], [100, 300, 100, 500]
    measured = [
        step(
            3 + place,
            each,
            loss=losses[place],
            loss_tokens=trained[place],
            mfu=0.1 * (place + 1),
            memory=100 + place % 3,
        )
        for place, each in enumerate(seconds)
    ]
    found = summarise(job(), STARTED, slow + measured)
    assert (found.steps, found.warmup, found.seconds) == (4, 2, 8.0)
    assert (found.tokens, found.loss_tokens) == (4000, 1000)
    assert (found.tokens_per_second, found.loss_tokens_per_second) == (500, 125)
    assert found.step_seconds_median == 1.5
    assert found.step_seconds_p90 == pytest.approx(3.4)  # 7 tenths of the way from 2 to 4
    assert found.waited == pytest.approx(0.05)
    assert found.padding == pytest.approx(0.1)
    assert found.mfu == pytest.approx(0.25)
    assert found.memory == 102
    assert found.loss == pytest.approx(2.0)  # (400 + 900 + 200 + 500) / 1000
    assert found.perplexity == pytest.approx(7.389056)
    assert found.final_loss == 1.0
    assert (found.device, found.processes, found.engine, found.parameters) == ("NVIDIA H200", 2, "megatron-core", 1000)
    assert found.environment.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert summarise(job(), STARTED, slow + measured, warmup=4).seconds == 5.0


def test_steps_before_a_restart_are_not_measured():
    died = [step(number, 100.0) for number in range(1, 9)]
    again = Started(**{**STARTED.model_dump(), "step": 6})
    found = summarise(job(), again, died + [step(number, 20.0 if number < 9 else 1.0) for number in range(7, 13)])
    assert (found.steps, found.seconds) == (4, 4.0)
    with pytest.raises(InputError, match=r"2 were run since the start.*train at least 3"):
        summarise(job(), STARTED, steps(2))


def test_a_baseline_is_found_by_configuration_and_device(base, tmp_path):
    path = record(base, str(tmp_path))
    assert read_record(path) == base
    assert path.endswith(f"nvidia-h200-x2-{base.key[-16:]}.json")
    assert baseline_of(summarise(job(), STARTED, steps(seconds=2.0)), str(tmp_path)) == base
    for other in (
        summarise(job(micro_batch=4), STARTED, steps()),
        summarise(job(), Started(**{**STARTED.model_dump(), "device": "NVIDIA H100 PCIe"}), steps()),
        summarise(job(), Started(**{**STARTED.model_dump(), "processes": 4}), steps()),
    ):
        with pytest.raises(InputError, match=r"no baseline.*record one first"):
            baseline_of(other, str(tmp_path))


def test_irrelevant_settings_keep_the_configuration(base):
    sources = [each.model_copy(update={"tokens": 11} if each.split == "valid" else {}) for each in job().data.sources]
    elsewhere = {"path": "/elsewhere", "made_from": "2", "sources": sources}
    apart = job(elsewhere, retries=5, checkpoint_every=1, validate_every=3, max_epochs=None)
    assert summarise(apart, STARTED, steps()).key == base.key


@pytest.mark.parametrize(
    ("changes", "started", "warmup", "names"),
    [
        ({"model": {"layers": 3}}, {}, 2, r"model.layers \("),
        ({"sequence_length": 64}, {}, 2, r"sequence_length \("),
        ({"optimizer": {"distributed": True}}, {}, 2, r"optimizer.distributed \("),
        ({"data": {"fingerprint": "sha256:2"}}, {}, 2, r"data.tokenizer \("),
        ({"data": {"sources": [TrainSource(dataset="a", split="train", files=["x"], weights=[1.5], tokens=5)]}}, {}, 2, r"source.a.tokens \("),
        ({}, {}, 3, r"warmup \(3 here, 2 there\)"),
        ({}, {"device": "cpu", "processes": 1}, 2, r"device \('cpu' here, 'NVIDIA H200' there\), processes \(1 here, 2 there\)"),
    ],
)  # fmt: skip
def test_other_configurations_are_not_compared(base, changes, started, warmup, names):
    other = summarise(job(**changes), Started(**STARTED.model_dump() | started), steps(), warmup=warmup)
    assert other.key != base.key or not changes
    with pytest.raises(InputError, match=f"a different {names}"):
        compare(other, base)


WORSE = {
    "tokens_per_second": -1, "loss_tokens_per_second": -1, "step_seconds_median": 1, "step_seconds_p90": 1, "memory": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", WORSE)
@pytest.mark.parametrize(("percent", "is_found"), [(10, True), (9, False), (50, True), (-50, False), (0, False)])
def test_a_regression_is_found_from_the_threshold_on(base, name, percent, is_found):
    before = base.model_copy(update={name: 1000})
    now = base.model_copy(update={name: 1000 + 10 * percent * WORSE[name]})
    found = compare(now, before, threshold=0.1)
    assert found.regressed == ([name] if is_found else [])
    (change,) = [each for each in found.changes if each.name == name]
    assert change.change == pytest.approx(percent * WORSE[name] / 100)


@pytest.mark.parametrize(("difference", "differs"), [(0.5, True), (-0.5, True), (0.01, False), (-0.01, False)])
def test_changed_loss_is_reported_both_ways(base, difference, differs):
    other = base.model_copy(update={"loss": base.loss + difference})
    found = compare(other, base.model_copy(update={"memory": 0}), loss_bound=0.02)
    assert found.loss_differs is differs
    assert found.loss_difference == pytest.approx(difference)
    assert found.regressed == []
    assert [each.change for each in found.changes if each.name == "memory"] == [None], "nothing has no share"


def test_record_shows_numbers():
    out = io.StringIO()
    print_record(summarise(job(), STARTED, steps(seconds=0.5)), Console(file=out, width=200))
    for said in (
        "2 x NVIDIA H200", "10 steps measured after 2", "2,000 tokens/s, 1,600 of them trained on, 40.0% of the peak",
        "20.0% of the time waiting for data", "10.0% padding", "loss 3.0000",
    ):  # fmt: skip
        assert said in out.getvalue()
    unknown = summarise(job(), STARTED, steps(mfu=None))
    print_record(unknown, Console(file=out, width=200))
    assert out.getvalue().count("of the peak") == 1


def test_table_lists_regressions(base):
    out = io.StringIO()
    slower = base.model_copy(update={"tokens_per_second": base.tokens_per_second * 0.5, "loss": base.loss + 1})
    print_comparison(compare(slower, base), Console(file=out, width=120))
    lines = {line.split()[0]: line for line in out.getvalue().splitlines() if line.strip()}
    assert "-50.0%" in lines["tokens_per_second"]
    assert "regressed" in lines["tokens_per_second"]
    assert "ok" in lines["memory"]
    assert "+1.0000 nats" in lines["loss"]
    assert "differs" in lines["loss"]


def test_a_damaged_baseline_is_an_error(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text(json.dumps({"key": "x"}))
    for name in ("a.json", "b.json", "c.json"):
        with pytest.raises(InputError, match=name):
            read_record(str(tmp_path / name))


SHAPES = [
    ModelSettings(),
    ModelSettings(layers=3, hidden=48, heads=6, key_value_heads=1, feed_forward=100),
    ModelSettings(layers=1, hidden=64, heads=4, key_value_heads=4, feed_forward=64, tied_embeddings=True),
]


@pytest.mark.parametrize(("shape", "length"), [*itertools.product(SHAPES, (16, 33))])
def test_operations_match_pytorch_except_causal_savings(shape, length):
    rows = shape.vocabulary(500)
    config = LlamaConfig(
        vocab_size=rows, hidden_size=shape.hidden, intermediate_size=shape.feed_forward, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
        tie_word_embeddings=shape.tied_embeddings, attn_implementation="eager",
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config), torch.zeros((2, length), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss = model(ids).logits.sum()
        forward = products(counter)
        loss.backward()
    attended = products(counter, forward_only=forward)
    matrices, attention = forward
    seen = (length + 1) / (2 * length)
    assert flops_per_token(shape, rows, length) * ids.numel() == pytest.approx(3 * (matrices + attention * seen))
    assert attended == pytest.approx(3 * (matrices + attention), rel=0.01)


def products(counter, forward_only=None):
    """Operations in products with weights, and in attention (batches of matrices, without the rotary positions'); of
    all, once the backward pass is in, the sum."""
    counts = counter.get_flop_counts()
    rotary = sum(sum(found.values()) for name, found in counts.items() if name.endswith("rotary_emb"))
    if forward_only is not None:
        return sum(counts["Global"].values()) - rotary
    by_name = {str(name): count for name, count in counts["Global"].items()}
    batched = by_name.pop("aten.bmm") - rotary
    return sum(by_name.values()), batched


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA B200", 2250),
        ("NVIDIA A10G", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_peaks_match_data_sheets_or_none(name, teraflops):
    assert peak_flops(name) == (teraflops and teraflops * 1e12)
