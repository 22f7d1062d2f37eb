"""A shard is built whole with a balanced receipt or not at all; batches hold every shard once and end together."""

import gc
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards import build
from tokenmill.tasks.shards.build import BadRowError, batches, building
from tokenmill.tasks.shards.fates import read_fates
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import InvalidReceiptError
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import BadRow, Rejected, Slice, SourceFile

from tests.examples import max_examples

sizes = st.lists(st.integers(1, 10**9), max_size=60)


def shards_of(sizes):
    file = SourceFile("/a.jsonl", sum(sizes), "jsonl")
    return [
        PlannedShard("a", "datasets", Slice(file, place, place + 1, size=size), {}) for place, size in enumerate(sizes)
    ]


def load(batch):
    return sum(shard.part.size for shard in batch)


@given(sizes, st.integers(1, 8))
def test_every_shard_is_in_exactly_one_batch_in_plan_order(sizes, workers):
    shards = shards_of(sizes)
    made = batches(shards, workers)
    assert sorted(shard.part.start for batch in made for shard in batch) == list(range(len(shards)))
    assert all(batch for batch in made)
    for batch in made:
        assert [shard.part.start for shard in batch] == sorted(shard.part.start for shard in batch)


@given(sizes, st.integers(1, 8))
def test_loads_are_balanced_and_heaviest_first(sizes, workers):
    """Each shard went to the lightest batch, so no batch is ahead of another by more than its own last shard."""
    loads = [load(batch) for batch in batches(shards_of(sizes), workers)]
    assert loads == sorted(loads, reverse=True)
    assert not sizes or loads[0] - loads[-1] <= max(sizes)


@pytest.mark.parametrize(
    ("sizes", "workers", "batches_made", "most"),
    [
        ([], 3, 0, 0),
        ([1] * 5, 3, 5, 1),
        ([1] * 100, 3, 12, 9),
        ([10**9] * 600, 2, 600 * 10**9 // build.TARGET_BYTES, build.TARGET_BYTES),
        ([10**10] * 3000, 500, 1000, 3 * 10**10),
    ],
    ids=["none", "one each", "four a worker", "a minute of work", "a thousand"],
)
def test_number_and_size_of_batches(sizes, workers, batches_made, most):
    made = batches(shards_of(sizes), workers)
    assert len(made) == batches_made
    assert max(map(load, made), default=0) == most


@max_examples(25)
@given(st.lists(st.integers(1, 30), min_size=4, max_size=7))
def test_the_longest_batch_is_within_the_lpt_bound_of_the_best_possible(sizes):
    """R. L. Graham, Bounds on multiprocessing timing anomalies (1969): 4/3 - 1/(3m) for m batches."""
    made = batches(shards_of(sizes), workers=1)
    count = len(made)
    best = min(
        max(sum(size for size, place in zip(sizes, places, strict=True) if place == batch) for batch in range(count))
        for places in product(range(count), repeat=len(sizes) - 1)
        for places in [(0, *places)]
    )
    assert max(map(load, made)) * 3 * count <= best * (4 * count - 1)


LINES = ['{"n": 1}', "", '{"n": 2, "lang": "de"}', "not json", '{"n": 3}']


@pytest.fixture
def shard(tmp_path):
    """A shard of a file with two good rows, one filtered out, one blank line and one bad row."""
    place = tmp_path / "rows.jsonl"
    place.write_text("\n".join([*LINES, '{"n": -1}', '{"lang": "de"}']) + "\n")
    file = SourceFile(str(place), place.stat().st_size, "jsonl")
    identity = {"kind": "test", "format_version": 1, "recipe": {}, "source": {"content": ""}}
    return PlannedShard("a", "datasets", Slice(file, 0, file.size, size=file.size), identity)


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "store"), "test")


def positive(batch, index):
    number = batch.records[index].get("n", 0)
    return number if number > 0 else Rejected("not_positive", f"n is {number}")


def build_numbers(shard, store, on_bad_row="quarantine", chosen=None):
    shard = replace(shard, part=replace(shard.part, filters=chosen or {}))
    with building(shard, store, on_bad_row) as builder:
        for batch, found in builder.records(["n"], positive):
            builder.open("numbers").write(bytes(found.values()))
            builder.keep("all", batch.rows[[*found]], sum(found.values()))
        builder.write_fates()
    return builder.receipt


def test_garbage_is_collected_as_before_when_a_shard_fails(shard, store):
    before = gc.get_threshold()
    with pytest.raises(BadRowError):
        build_numbers(shard, store, "fail")
    assert gc.get_threshold() == before


def test_every_row_is_kept_or_dropped_with_a_reason(shard, store):
    receipt = build_numbers(shard, store)
    assert (receipt.rows_in, receipt.documents, receipt.tokens, receipt.quarantined) == (7, 3, 6, 3)
    assert receipt.drops == {"blank_line": 1, "malformed_json": 1, "not_positive": 2}
    folder = Path(store.folder(shard.key))
    assert (folder / "numbers").read_bytes() == bytes([1, 2, 3])
    quarantined = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in quarantined] == [
        (3, "malformed_json"), (5, "not_positive"), (6, "not_positive"),
    ]  # fmt: skip
    assert quarantined[1]["excerpt"] == "{'n': -1}"
    assert store.receipt(shard.key) == receipt
    assert read_fates(store, receipt).why().tolist() == [
        *(None, "blank_line", None, "malformed_json", None, "not_positive", "not_positive")
    ]


def test_rows_that_a_filter_skips_are_drops_and_are_not_judged(shard, store):
    receipt = build_numbers(shard, store, chosen={"lang": ["de"]})
    assert receipt.drops == {"blank_line": 1, "malformed_json": 1, "filtered": 3, "not_positive": 1}
    assert receipt.documents == 1
    assert read_fates(store, receipt).why().tolist() == [
        *("filtered", "blank_line", None, "malformed_json", "filtered", "filtered", "not_positive")
    ]


@pytest.mark.parametrize("mistake", ["keep", "drop"])
def test_a_row_without_a_fate(shard, store, mistake):
    def build_wrongly():
        with building(shard, store, "quarantine") as builder:
            for batch, found in builder.records(["n"], positive):
                builder.keep("all", len(found)) if mistake == "keep" else builder.keep("all", batch.rows[[*found]])
            builder.drops["lost"] += mistake == "drop"
            builder.write_fates()

    with pytest.raises(RunError, match=r"rows\.map: "):
        build_wrongly()
    assert store.receipt(shard.key) is None


def test_a_bad_row_ends_the_shard_where_the_policy_is_to_fail(shard, store):
    with pytest.raises(BadRowError, match=r"rows\.jsonl:4: malformed_json"):
        build_numbers(shard, store, "fail")
    assert not Path(store.place).exists() or not list(Path(store.folder(shard.key)).iterdir())


def test_unaccounted_row_prevents_a_receipt(shard, store):
    def build_wrongly():
        with building(shard, store, "quarantine") as builder:
            for _ in builder.records(["n"], positive):
                builder.keep("all", 1)

    with pytest.raises(InvalidReceiptError, match="7 rows went in"):
        build_wrongly()
    assert store.receipt(shard.key) is None


def test_nothing_is_published_before_the_end_nor_after_an_error(shard, store):
    folder = Path(store.folder(shard.key))

    def build_in_vain():
        with building(shard, store) as builder:
            builder.open("one").write(b"1")
            assert not (folder / "one").exists()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        build_in_vain()
    assert not list(folder.iterdir())


def test_the_receipt_is_the_last_file(shard, store, monkeypatch):
    seen, issue = [], Store.issue

    def noting(store, identity, **fields):
        seen.extend(sorted(path.name for path in Path(store.folder(shard.key)).iterdir()))
        return issue(store, identity, **fields)

    monkeypatch.setattr(Store, "issue", noting)
    with building(shard, store) as builder:
        builder.open("two").write(b"2")
        builder.open("one").write(b"1")
    assert seen == ["one", "two"]
    assert [output.path for output in builder.receipt.outputs] == ["one", "two"]


def test_the_error_of_a_bad_row_names_its_line_in_the_file(tmp_path):
    place = tmp_path / "rows.jsonl"
    place.write_text("\n".join(LINES) + "\n")
    part = Slice(SourceFile(str(place), place.stat().st_size, "jsonl"), len(LINES[0]) + 2, place.stat().st_size)
    error = build.bad_row_error(BadRow(1, "malformed_json", "no", "not json"), part)
    assert f"{place}:4: malformed_json" in str(error)
