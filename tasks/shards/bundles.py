"""Bundle small files: consecutive files of a dataset share a shard, so that thousands of small files become few shards.

A file smaller than half of `shard_size` is small. Consecutive small files share a bundle if format, compression
and recipe are equal; any other file is cut into its own shards, as without bundles.

Boundaries depend on content, as in content-defined chunking: a hash of a file's content decides whether the file ends its
bundle, with a probability in proportion to its size, so that bundles average a quarter of `shard_size`. No bundle exceeds
`shard_size` or 4,096 files. So adding or removing a file rebuilds only the bundle that holds it, and its neighbor if the file
ends a bundle. About 2 % of the boundaries are due to the limits; these move with every change before them, up to the next
boundary by content.

Files that the store has built as separate shards aren't built again: if a bundle isn't verified, such files remain separate shards
their own, and only the runs of other files between them are bundled.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import orjson
from xxhash import xxh3_64_intdigest

from .identity import source_of
from .plan import PlannedShard
from .store import Store

SMALL = 1 / 2
"""Files below this part of `shard_size` are bundled."""

AVERAGE = 1 / 4
"""The average bundle, as a part of `shard_size`. A larger one would leave more boundaries to the limits."""

MOST_FILES = 4_096
"""Each file counts as its size plus this part of `shard_size`, so that tiny files have bundles of bounded length too."""


def bundled(shards: Sequence[PlannedShard], store: Store, shard_size: int, *, rebuild: bool) -> list[PlannedShard]:
    """The shards of a dataset with its small files bundled, in order. With `rebuild`, the store is ignored."""
    groups = list(groups_by_content(shards, shard_size))
    bundles = [bundle(group) for group in groups]
    if rebuild:
        return bundles
    keys = {shard.key for shard in bundles if shard.part.members}
    missing = keys - store.proven(store.begun(keys)).keys()
    broken = [shard.key in missing for shard in bundles]
    files = [shard.key for group, apart in zip(groups, broken, strict=True) if apart for shard in group]
    built = store.proven(store.begun(files)).keys()
    return [
        shard
        for group, whole, apart in zip(groups, bundles, broken, strict=True)
        for shard in (_around(group, built) if apart else [whole])
    ]


def _around(group: Sequence[PlannedShard], built: Collection[str]) -> Iterator[PlannedShard]:
    """Return the shards with keys in `built` separately, and the runs of other shards bundled."""
    for alone, run in groupby(group, lambda shard: shard.key in built):
        some = list(run)
        yield from some if alone else [bundle(some)]


def groups_by_content(shards: Sequence[PlannedShard], shard_size: int) -> Iterator[list[PlannedShard]]:
    """Group the shards that belong in one bundle; the shard of a large file or of a sample is separate."""
    group: list[PlannedShard] = []
    size = 0.0
    for shard in shards:
        own = shard.part.size + shard_size / MOST_FILES
        if group and (size + own > shard_size or not _fits(group[-1], shard, shard_size)):
            yield group
            group, size = [], 0.0
        group.append(shard)
        size += own
        if xxh3_64_intdigest(shard.part.content.encode()) < own / (AVERAGE * shard_size) * 2**64:
            yield group
            group, size = [], 0.0
    if group:
        yield group


def _fits(before: PlannedShard, shard: PlannedShard, shard_size: int) -> bool:
    """Whether two consecutive shards may share a bundle."""
    one, other = before.part, shard.part
    kinds = [(part.file.format, part.file.compression, part.fields) for part in (one, other)]
    small = all(part.start == 0 and part.rows is None and part.file.size < SMALL * shard_size for part in (one, other))
    return small and kinds[0] == kinds[1] and before.identity["recipe"] == shard.identity["recipe"]


def bundle(shards: Sequence[PlannedShard]) -> PlannedShard:
    """Return one shard with the rows of all shards, in order; a single shard remains unchanged."""
    first = shards[0]
    if len(shards) == 1:
        return first
    members = tuple(shard.part for shard in shards)
    contents = orjson.dumps([part.content for part in members])
    part = replace(
        first.part,
        content=f"bundle:{hashlib.sha256(contents).hexdigest()[:32]}",
        size=sum(part.size for part in members),
        members=members,
    )
    return replace(first, part=part, identity={**first.identity, "source": source_of(part, first.identity["recipe"])})
