"""Training rows in batches: exact quotas, weights and budgets, and pass rates that fall as the curriculum says."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.rl.batches import deal, in_order
from tokenmill.tasks.shards.verify import verify

from tests.building import publish_here
from tests.preparing_rl import build, lines_of, plan, prepare, write_rows

QUOTAS = {"math": 32, "code": 16, "chat": 12, "tools": 4}
BATCH, BATCHES = 64, 1000


def blend_of(folder, counts, **keys):
    return {
        "datasets": [{"name": name, "path": str(folder / f"{name}.jsonl"), **keys.get(name, {})} for name in counts]
    }


def write_sets(folder, counts, rate=lambda generator, name, count: generator.random(count).tolist()):
    generator = np.random.default_rng(7)
    for name, count in counts.items():
        rates = rate(generator, name, count)
        write_rows(folder / f"{name}.jsonl", [{"of": name, "row": n, "pass": {"rate": r}} for n, r in enumerate(rates)])


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thousand")
    write_sets(folder, {name: quota * BATCHES for name, quota in QUOTAS.items()})
    return folder


def batches_of(manifest, size):
    rows = [json.loads(line) for line in lines_of(manifest["train"])]
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


@pytest.mark.slow
def test_every_batch_has_its_quotas_and_the_pass_rates_of_the_schedule_and_no_row_is_lost(thousand):
    blend = blend_of(thousand, QUOTAS)
    _, plain = prepare(blend, thousand / "plain", store=str(thousand / "store"))
    curriculum = {"field": "pass.rate", "pass_rate_range": 0.5}
    chosen = {"batch_size": BATCH, "curriculum": curriculum, "store": str(thousand / "store")}
    _, manifest = prepare(blend, thousand / "ordered", **chosen)
    assert manifest["volatile"]["shards"]["built"] == 0
    assert Counter(lines_of(manifest["train"])) == Counter(lines_of(plain["train"]))
    batches = batches_of(manifest, BATCH)
    assert len(batches) == BATCHES
    assert all(Counter(row["of"] for row in batch) == QUOTAS for batch in batches)
    means = np.array([np.mean([row["pass"]["rate"] for row in batch]) for batch in batches])
    schedule = means.mean() + 0.5 * (0.5 - np.arange(BATCHES) / (BATCHES - 1))
    assert np.abs(means - schedule).max() < 0.02
    for name in QUOTAS:
        of = np.array([np.mean([row["pass"]["rate"] for row in batch if row["of"] == name]) for batch in batches])
        halves = of[: BATCHES // 2].mean() - of[BATCHES // 2 :].mean()
        assert halves == pytest.approx(0.25, abs=0.02), name
    assert verify(str(thousand / "ordered"), inspector_of("rl")).problems == []


@pytest.mark.slow
def test_the_order_does_not_depend_on_how_shards_are_built(thousand):
    chosen = {"batch_size": BATCH, "shard_size": 300_000, "holdout": {"valid": 0.01, "test": 0}}
    blend = blend_of(thousand, QUOTAS)
    _, manifest = prepare(blend, thousand / "one", **chosen)
    planned = plan(blend, thousand / "other", **chosen)
    build(planned, planned.plan.shards[::-1])
    other = publish_here("rl", planned)
    assert lines_of(other["train"]) == lines_of(manifest["train"])
    assert Path(other["train"]).name == Path(manifest["train"]).name
    shuffled = prepare(blend, thousand / "seed", seed=1, store=str(thousand / "one/shards/rl"), **chosen)[1]
    assert lines_of(shuffled["train"]) != lines_of(manifest["train"])
    assert Counter(lines_of(shuffled["train"])) == Counter(lines_of(manifest["train"]))
    assert shuffled["train"].rpartition("_")[2] != manifest["train"].rpartition("_")[2]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 70))
def test_batches_follow_the_shares_and_give_out_every_row(wanted, size):
    wanted = np.array(wanted)
    counts = deal(wanted, size)
    assert counts.sum(0).tolist() == wanted.tolist()
    total = int(wanted.sum())
    assert counts.sum(1).tolist() == [size] * (total // size) + [total % size] * (total % size > 0)
    assert counts.min(initial=0) >= 0
    ends = np.cumsum(counts.sum(1))[:, None]
    assert np.abs(np.cumsum(counts, 0) - wanted * ends / max(total, 1)).max(initial=0) < 2
    if total and not (wanted * size % total).any():
        assert (counts[: total // size] == wanted * size // total).all()


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 100)), min_size=1, max_size=3),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.1]),
)
def test_rows_repeat_only_after_all_were_used(sets, size, span):
    held, wanted = np.array([each for each, _ in sets]), np.array([each for _, each in sets])
    rates = [np.linspace(0, 1, count) for count in held]
    counts = deal(wanted, size)
    order = in_order(counts, rates, span, 0.15, 42)
    assert np.bincount(order.dataset, minlength=len(sets)).tolist() == wanted.tolist()
    for number, (rows, reads) in enumerate(sets):
        often = np.bincount(order.row[order.dataset == number], minlength=rows)
        assert set(often.tolist()) <= {reads // rows, -(-reads // rows)}


@pytest.fixture
def small(tmp_path):
    write_sets(tmp_path, {"a": 100, "b": 300}, lambda _, name, count: [n / count for n in range(count)])
    return tmp_path


@pytest.mark.parametrize(
    ("keys", "budget", "chosen", "read"),
    [
        ({}, {}, {}, {"a": 100, "b": 300}),
        ({}, {}, {"sampling": "down"}, {"a": 100, "b": 100}),
        ({"a": {"weight": 3.0}}, {}, {"sampling": "up"}, {"a": 900, "b": 300}),
        ({"b": {"weight": 0}}, {}, {}, {"a": 100}),
        ({"a": {"max_epochs": 2}}, {"tokens": 480}, {"sampling": "up"}, {"a": 200, "b": 280}),
        ({"a": {"share": 0.125}}, {"tokens": 160}, {"sampling": "down"}, {"a": 20, "b": 140}),
    ],
)
def test_weights_and_budgets_decide_how_often_rows_are_read(small, keys, budget, chosen, read):
    _, manifest = prepare({**blend_of(small, "ab", **keys), **budget}, small / "out", batch_size=10, **chosen)
    batches = batches_of(manifest, 10)
    found = Counter(row["of"] for batch in batches for row in batch)
    assert found == read
    share = read["a"] / sum(read.values())
    assert {abs(sum(row["of"] == "a" for row in batch) - 10 * share) < 1 for batch in batches} == {True}
    assert {name: each["read"] for name, each in manifest["batches"]["datasets"].items() if each["read"]} == read


def test_phases_follow_each_other(small):
    phases = [{"name": "first", "tokens": 103, "mix": {"a": 0.2}}, {"name": "then", "tokens": 50, "mix": {"a": 1}}]
    _, manifest = prepare({**blend_of(small, "ab"), "phases": phases}, small / "out", batch_size=10, sampling="up")
    batches = batches_of(manifest, 10)
    assert [sum(row["of"] == "a" for row in batch) for batch in batches] == [2] * 10 + [10] * 5 + [3]
    rows = [row["row"] for batch in batches for row in batch if row["of"] == "a"]
    assert len(rows) == len(set(rows)) == 73


def test_unsolved_and_always_solved_rows_are_excluded(tmp_path):
    rates = [0, 1, 0.5, 0.25, 0.75, None, "0.5", 0.5]
    write_sets(tmp_path, {"a": 8}, lambda *_: rates)
    chosen = {"batch_size": 2, "curriculum": {"field": "pass.rate", "pass_rate_range": 0.1}}
    _, manifest = prepare(blend_of(tmp_path, "a"), tmp_path / "out", **chosen)
    assert sorted(row["row"] for batch in batches_of(manifest, 2) for row in batch) == [2, 3, 4, 5, 6, 7]
    assert manifest["batches"]["datasets"]["a"]["left_out"] == {"never_solved": 1, "always_solved": 1}
    assert manifest["batches"]["datasets"]["a"]["unread"] == 0


def test_single_batch_without_schedule(tmp_path):
    rows = [b'{"p": 0.5}', b'{"p": 0.25, "far": 123456789012345678901234567890}', b'{"p": 0.75}']
    blend = {"datasets": [{"name": "a", "path": str(write_rows(tmp_path / "a.jsonl", rows))}]}
    _, manifest = prepare(blend, tmp_path / "out", batch_size=3, curriculum={"field": "p"})
    assert sorted(lines_of(manifest["train"])) == sorted(rows)


@pytest.mark.parametrize(
    ("budget", "chosen", "words"),
    [
        ({}, {"curriculum": {"field": "pass.rate"}}, "set batch_size as well"),
        ({}, {"sampling": "up"}, "set batch_size as well"),
        ({}, {"batch_size": 8, "compression": "zstd"}, "set compression=none"),
        ({"tokens": 10}, {"batch_size": 8}, "sampling=down or sampling=up"),
        ({"tokens": 10}, {}, "set batch_size"),
        ({}, {"batch_size": 8, "curriculum": {"field": "rate"}}, "no training row has a number there"),
        ({}, {"batch_size": 8, "curriculum": {"field": "pass.rate", "pass_rate_range": 3}}, "sorted rows of the dataset 'a' reach 0.9"),
        ({}, {"batch_size": 8, "curriculum": {"field": "row", "drop_solved_at": 0}}, "every training row is excluded"),
        ({"tokens": 900}, {"batch_size": 8, "sampling": "up"}, "'a': max_epochs=2 of 100 tokens"),
    ],
)  # fmt: skip
def test_impossible_orders_are_rejected(small, budget, chosen, words):
    blend = blend_of(small, "ab", **{name: {"max_epochs": 2} for name in ("ab" if budget.get("tokens") == 900 else "")})
    with pytest.raises(InputError, match=words):
        prepare({**blend, **budget}, small / "out", **chosen)
