"""A shard's name: everything that can change a byte of it, and nothing else."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.shards.receipt import ADDED, difference, shard_identities, shard_identity, shard_key
from tokenmill.tasks.sources.files import Slice, SourceFile

scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text("abc.:é", max_size=6))
identities = st.recursive(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=4), scalars, max_size=4),
    lambda inner: st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.one_of(scalars, inner), max_size=4),
    max_leaves=12,
)


@dataclass(frozen=True)
class Recipe:
    field: str = "text"
    ends: int | None = 7
    share: float = 0.25


FILE = SourceFile("/data/a.jsonl", 900, "jsonl", modified_ns=5)
PART = Slice(FILE, 300, 600, content="xxh3_128:00", size=300)


def key_of(recipe=Recipe(), part=PART, kind="pretrain", version=1):
    return shard_key(shard_identity(kind, version, recipe, part))


def test_key_is_128_bits_of_the_canonical_json_hash():
    canonical = {
        "format_version": 1,
        "kind": "pretrain",
        "recipe": asdict(Recipe()),
        "source": {"compression": None, "content": "xxh3_128:00", "format": "jsonl"},
    }
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
    assert key_of() == hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class LaterRecipe(Recipe):
    more: str | None = field(default=None, metadata=ADDED)


def test_a_field_added_later_is_part_of_the_key_only_where_it_is_used():
    assert key_of(LaterRecipe()) == key_of()
    assert key_of(LaterRecipe(more="yes")) != key_of()
    identities = shard_identities("pretrain", 1, [LaterRecipe(), LaterRecipe(more="yes")], [PART, PART])
    assert [identity["recipe"].get("more", "left out") for identity in identities] == ["left out", "yes"]


@pytest.mark.parametrize(
    "other",
    [
        key_of(kind="sft"),
        key_of(version=2),
        key_of(Recipe(field="body")),
        key_of(Recipe(ends=None)),
        key_of(Recipe(share=0.5)),
        key_of(part=replace(PART, content="xxh3_128:01")),
        key_of(part=replace(PART, rows=10)),
        key_of(part=replace(PART, file=replace(FILE, format="json"))),
        key_of(part=replace(PART, file=replace(FILE, compression="gzip"))),
    ],
)
def test_every_byte_changing_option_changes_the_key(other):
    assert other != key_of()


@pytest.mark.parametrize(
    "part",
    [
        replace(PART, start=0, stop=300),
        replace(PART, size=1),
        replace(PART, file=replace(FILE, uri="s3://bucket/b.jsonl")),
        replace(PART, file=replace(FILE, modified_ns=6)),
        replace(PART, file=replace(FILE, size=10_000)),
        replace(PART, file=replace(FILE, version="etag")),
    ],
)
def test_where_the_bytes_are_does_not_change_the_key(part):
    assert key_of(part=part) == key_of()


@given(identities)
def test_the_order_of_fields_does_not_matter(identity):
    turned = json.loads(json.dumps(identity), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert shard_key(turned) == shard_key(identity)


@given(identities, identities)
def test_keys_differ_exactly_when_a_field_differs(one, other):
    """Over flat JSON text, which knows 0 from false and 1 from true, as a hash of it does."""
    assert (shard_key(one) == shard_key(other)) == (
        json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    )


def test_a_difference_names_each_field_with_both_values():
    before = shard_identity("pretrain", 1, Recipe(), PART)
    after = shard_identity("pretrain", 1, Recipe(ends=None, share=0.5), replace(PART, rows=3))
    assert difference(before, after) == {
        "recipe.ends": (7, None),
        "recipe.share": (0.25, 0.5),
        "source.rows": (None, 3),
    }
    assert difference(before, before) == {}
