"""Batches: every shard exactly once, in few batches that end at about the same time."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill.tasks.shards import batches as batches_module
from tokenmill.tasks.shards.build import batches
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.sources.files import Slice, SourceFile

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
def test_loads_are_within_one_shard_of_each_other_and_the_heaviest_comes_first(sizes, workers):
    """Each shard went to the lightest batch, so no batch is ahead of another by more than its own last shard."""
    loads = [load(batch) for batch in batches(shards_of(sizes), workers)]
    assert loads == sorted(loads, reverse=True)
    assert not sizes or loads[0] - loads[-1] <= max(sizes)


@settings(max_examples=25)
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


def test_there_are_at_least_four_batches_a_worker_when_there_are_shards_enough():
    assert len(batches(shards_of([1] * 100), 3)) == 12
    assert len(batches(shards_of([1] * 5), 3)) == 5
    assert batches([], 3) == []


def test_a_batch_is_about_a_minute_of_work():
    gigabyte = 10**9
    made = batches(shards_of([gigabyte] * 600), 2)
    assert {load(batch) for batch in made} == {batches_module.TARGET_BYTES}


def test_there_are_never_more_than_a_thousand():
    made = batches(shards_of([10**10] * 3000), 500)
    assert len(made) == 1000
    assert {len(batch) for batch in made} == {3}


@given(sizes, st.integers(1, 8))
def test_the_same_shards_always_make_the_same_batches(sizes, workers):
    assert batches(shards_of(sizes), workers) == batches(shards_of(sizes), workers)
