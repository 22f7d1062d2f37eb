"""What is done at once for many shards is what would be done for each."""

from dataclasses import dataclass

import fsspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.shards import store as store_module
from tokenmill.tasks.shards.manifest import identities, shard_entries
from tokenmill.tasks.shards.plan import Finished, Plan, PlannedShard
from tokenmill.tasks.shards.receipt import Receipt, shard_identities, shard_identity, shard_key
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice, SourceFile


@dataclass(frozen=True)
class Recipe:
    ends: int | float | None
    nested: dict


FILE = SourceFile("/data/a.jsonl", 900, "jsonl", modified_ns=5)
ends = st.sampled_from([None, 0, False, 0.0, 1, True, 1.0, 7])
recipes = st.builds(Recipe, ends, st.fixed_dictionaries({"depth": ends}))


def part_of(number, rows=None):
    return Slice(FILE, number, number + 1, content=f"xxh3_128:{number:02x}", size=1, rows=rows)


@given(st.lists(recipes, min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=12))
def test_identities_made_together_are_those_made_one_by_one(few, choice):
    chosen = [few[number % len(few)] for number in choice]
    parts = [part_of(number, rows=number or None) for number in range(len(choice))]
    expected = [shard_identity("some", 1, recipe, part) for recipe, part in zip(chosen, parts, strict=True)]
    made = shard_identities("some", 1, chosen, parts)
    assert [orjson.dumps(identity) for identity in made] == [orjson.dumps(identity) for identity in expected]


def test_a_recipe_that_many_shards_share_is_held_once():
    made = shard_identities("some", 1, [Recipe(7, {})] * 1000, [part_of(number) for number in range(1000)])
    assert len({id(identity["recipe"]) for identity in made}) == 1


@given(st.lists(recipes, max_size=12))
def test_the_manifest_gives_every_shard_its_own_recipe_back(chosen):
    """Also where recipes differ in what Python takes for equal: 0, 0.0 and false are other bytes, and another key."""
    shards = [
        planned(shard_identity("some", 1, recipe, part_of(number)), number) for number, recipe in enumerate(chosen)
    ]
    entries = shard_entries([finished(shard) for shard in shards], {})
    found = identities(entries)
    assert [shard_key(found[shard.place]) for shard in shards] == [shard.key for shard in shards]
    assert len(entries["recipes"]) == len({orjson.dumps(shard.identity["recipe"]) for shard in shards})


def planned(identity, number):
    return PlannedShard("a", "train", part_of(number), identity)


def finished(shard):
    receipt = Receipt(
        key=shard.key, identity=shard.identity, outputs=[], rows_in=0, parts={}, drops={}, quarantined=0, truncated=0
    )
    return Finished(shard, shard.key, receipt)


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    place = str(tmp_path / "store") if request.param == "local" else f"memory://{tmp_path.name}/store"
    yield Store(place, "some")
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def identity_of(number):
    return shard_identity("some", 1, Recipe(7, {}), part_of(number))


@pytest.mark.parametrize("listed", [1, 1_000_000])
@pytest.mark.parametrize("built", [[], [3], [0, 5, 9], range(10)])
def test_plan_finds_built_shards_with_or_without_listing(store, monkeypatch, listed, built):
    monkeypatch.setattr(store_module, "LISTED", listed)
    shards = [planned(identity_of(number), number) for number in range(10)]
    Plan.of(store, shards, rebuild=False)  # looking before there is anything leaves nothing to remember
    for number in built:
        store.issue(shards[number].identity, outputs=[], rows_in=0, parts={}, drops={})
    plan = Plan.of(store, [*shards, *shards], rebuild=False)
    assert set(plan.proven) == {shards[number].key for number in built}
    assert len(plan.pending) == 10 - len(built)


def test_only_begun_shards_have_receipts_read(store, monkeypatch):
    monkeypatch.setattr(store_module, "LISTED", 1)
    keys = [shard_key(identity_of(number)) for number in range(10)]
    assert store.begun(keys) == []
    for number in (2, 4, 11):
        store.issue(identity_of(number), outputs=[], rows_in=0, parts={}, drops={})
    assert store.begun([*keys, *keys]) == [keys[2], keys[4]]


def test_a_listing_of_an_object_store_is_never_an_old_one(bucket, monkeypatch):
    """What another machine has built since the last look is found."""
    monkeypatch.setattr(store_module, "LISTED", 1)
    store = Store("s3://shards/store", "some")
    keys = [shard_key(identity_of(number)) for number in range(3)]
    assert store.begun(keys) == []
    for number in (2, 0):
        bucket.put_object(Bucket="shards", Key=f"store/some/{keys[number]}/receipt.json", Body=b"{}")
        assert keys[number] in store.begun(keys)
    assert store.begun(keys) == [keys[0], keys[2]]
