"""A shard's key: the hash of everything that can change a byte of it, and of nothing else.

An identity is a small JSON object of `recipe` (every choice that changes bytes) and `source` (the content of the slice). If
other shards decide about its rows, a third part, `decided`, names the decision. Weights, worker counts, paths, times and output
locations are never part of it. When a key changes, the identities are compared field by field, so that the plan can explain why
work is repeated.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, fields
from typing import Any, ClassVar, Protocol

import orjson
from tokenmill.tasks.sources.files import Slice

KEY_CHARACTERS = 32
"""128 bits of SHA-256, in hexadecimal: keys are file names, and sources may be hostile."""

Identity = Mapping[str, Any]


ADDED = {"added": True}
"""Metadata of a recipe's field that shards in use do not have. At its default it is left out, so their keys remain."""


class Recipe(Protocol):
    """A frozen dataclass of plain values: every choice that can change a byte of a shard."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def shard_identity(kind: str, format_version: int, recipe: Recipe, part: Slice) -> dict[str, Any]:
    """The identity of the shard that `recipe` makes from a slice."""
    plain = _plain(recipe)
    return {
        "kind": kind,
        "format_version": format_version,
        "recipe": plain,
        "source": source_of(part, plain),
    }


def shard_identities(
    kind: str, format_version: int, recipes: Sequence[Recipe], parts: Sequence[Slice]
) -> list[dict[str, Any]]:
    """The identity of the shard that each recipe makes from its slice.

    Slices with the same recipe share one dict of it: a million copies would take a minute and 1 GB.
    """
    plain = {id(recipe): _plain(recipe) for recipe in {id(recipe): recipe for recipe in recipes}.values()}
    pairs = [(plain[id(recipe)], part) for recipe, part in zip(recipes, parts, strict=True)]
    return [
        {"kind": kind, "format_version": format_version, "recipe": recipe, "source": source_of(part, recipe)}
        for recipe, part in pairs
    ]


def _plain(recipe: Recipe) -> dict[str, Any]:
    added = {each.name: each.default for each in fields(recipe) if ADDED.items() <= each.metadata.items()}
    return {name: value for name, value in asdict(recipe).items() if name not in added or value != added[name]}


def source_of(part: Slice, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an identity that names the rows of a slice. Some recipes name `filters` themselves."""
    source: dict[str, Any] = {"content": part.content, "format": part.file.format, "compression": part.file.compression}
    if part.rows is not None:
        source["rows"] = part.rows
    if part.members:
        source["files"] = len(part.members)
    if part.filters and "filters" not in recipe:
        source["filters"] = part.filters
    if part.where:
        source["where"] = part.where
    if any(each.keys for each in part.members or [part]):
        source["keys"] = [each.keys for each in part.members] or part.keys
    return source


def shard_key(identity: Identity) -> str:
    """The key of an identity: a hash of its canonical JSON."""
    canonical = orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(canonical).hexdigest()[:KEY_CHARACTERS]


def difference(before: Identity, after: Identity) -> dict[str, tuple[Any, Any]]:
    """The fields whose values differ, by dotted name: `{"recipe.bos": (None, 1)}`."""
    old, new = dict(flat(before)), dict(flat(after))
    return {name: (old.get(name), new.get(name)) for name in sorted(old | new) if old.get(name) != new.get(name)}


def flat(value: Identity, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested objects by dotted name."""
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner
