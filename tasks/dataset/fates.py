"""What became of one row of a preparation: the documents made of it and where they are published, or why there is none.

Shards record the fate of every row, and details of bad rows; sequences and packs store the row of each document, and normalized rows
have a column with it. The decisions about duplicates are in the store, by slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.dedup.decisions import REASONS
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.pack.packs import UNPACKED_REASONS
from tokenmill.tasks.pack.sequences import stored_rows
from tokenmill.tasks.shards.build import FILTERED
from tokenmill.tasks.shards.fates import NOT_RECORDED
from tokenmill.tasks.shards.plan import WHOLE
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.sources.row_filter import row_filter

from .duplicates import kept_row, normalized_row, verdict_of
from .index import ShardIndex
from .parts import ShardPart, parts_of_entry
from .stored import PADDING

# The kinds whose rows can be followed. Scores are joined to rows by their ids and publish no documents.
FOLLOWED = ("pretrain", "sft", "rl", "dedup", "filter", "harmony")


@dataclass(frozen=True, slots=True)
class Read:
    """A training step, from 1, and a sample in it, from 0."""

    step: int
    sample: int


@dataclass(frozen=True, slots=True)
class Location:
    """A document, pack or row of a shard, and where it is published.

    `number` counts within the part of the shard, `published_number` within the file `name` (both None if it is not published).
    `tokens` are those made of the source row, None if none are stored. `steps` train on it, None if no order is known.
    """

    unit: str
    number: int
    tokens: int | None
    name: str | None
    published_number: int | None
    steps: Sequence[Read] | None = None


@dataclass(frozen=True, slots=True)
class Fate:
    """The result of a preparation of `type` in the folder `path` for a source row.

    `line` counts from 1 in `file`, `row` from 0 in shard `key`, which was made from the slice from `start` to `stop`
    of the file, and from other files if it is a bundle. A kept row has a `document` id, a `split`, a `part` of the shard, and `places`. `reason` is why a row was dropped, or its
    tag; it is None for a dropped row if it isn't recorded; `detail` then has the remedy.
    """

    path: str
    type: str
    dataset: str
    weight: float
    file: str
    line: int
    row: int
    start: int
    stop: int
    key: str
    document: str | None = None
    split: str | None = None
    part: str | None = None
    places: Sequence[Location] = ()
    reason: str | None = None
    detail: str | None = None
    duplicate_of: str | None = None
    jaccard: float | None = None

    @property
    def kept(self) -> bool:
        """Whether the row became a document."""
        return self.document is not None


class _Kept(NamedTuple):
    """A row as part of a shard stores it: the number of its document, and the tokens in each document, pack or row.

    `detail` describes how it is stored, if not unchanged.
    """

    part: ShardPart
    number: int
    unit: str
    tokens: Mapping[int, int | None]
    detail: str | None = None


def fate_of(index: ShardIndex, shard: int, row: int) -> Fate:
    """Return the fate of a row in shard number `shard`. Raises RunError for missing or damaged files."""
    entry, receipt = index.entries[shard], index.receipt(shard)
    (origin, line), source = index.source(shard, row), index.blend_source(shard)
    fate = Fate(
        path=index.path, type=index.type, dataset=entry["dataset"], weight=source["weight"], file=origin.file, line=line,
        row=row, start=origin.start, stop=origin.stop, key=entry["key"],
    )  # fmt: skip
    bad = index.quarantined(shard).get(row)
    if bad is not None:
        return replace(fate, reason=bad["reason"], detail=bad["detail"])
    if kept := _kept(index, shard, receipt, row):
        part = kept.part
        places = [
            Location(kept.unit, number, tokens, name, published)
            for number, tokens in kept.tokens.items()
            for name, published in index.names.places(part, number) or [(None, None)]
        ]
        document = part.document(kept.number)
        fate = replace(fate, document=document, split=part.split, part=part.name, places=places, detail=kept.detail)
    else:
        fate = _explained(index, fate, shard, receipt, row)
    if not fate.kept and fate.reason not in {None, *REASONS}:
        return fate
    # Kept rows, too: a duplicate may be tagged instead of dropped
    try:
        verdict = verdict_of(index.store, index.manifest, entry, row)
        if verdict is None:
            return fate
        name = verdict.kept
        found = kept_row(index.store, index.manifest, name) if name else None
        if found is not None:  # the document may be in an output that isn't here; then only its name is known
            origin, line = index.source(*found)
            name = f"{origin.file}:{line}"
    except (InputError, RunError) as error:
        return replace(fate, detail=f"the duplicate cannot be found: {error}")
    return replace(fate, reason=verdict.outcome, detail=None, duplicate_of=name, jaccard=verdict.jaccard)


def _explained(index: ShardIndex, fate: Fate, shard: int, receipt: Receipt, row: int) -> Fate:
    """The fate with the reason of a drop that is not a bad row."""
    if index.kind.tokens == "packs" and any(row in stored_rows(index.store, receipt, part) for part in receipt.parts):
        return replace(fate, reason=UNPACKED_REASONS[index.manifest["settings"]["on_oversize"]])
    reason = index.reasons(shard)[row]
    if reason is None:
        return replace(fate, detail=NOT_RECORDED)
    if reason != FILTERED:
        return replace(fate, reason=reason)
    chosen = row_filter(DataSource.model_validate(index.blend_source(shard)))
    return replace(fate, reason=reason, detail=f"not true: {chosen.describe()}")


def _kept(index: ShardIndex, shard: int, receipt: Receipt, row: int) -> _Kept | None:
    """The stored part of a row, None if it isn't stored."""
    entry = index.entries[shard]
    if index.kind.tokens == "packs":
        # Packs hold the rows of several shards, numbered one shard after the other
        for part, first in (index.packed_at[shard, name] for name in receipt.parts if (shard, name) in index.packed_at):
            if packs := part.rows_with([first + row]):
                return _Kept(part, first + row, "pack", {pack: _tokens(part, pack, first + row) for pack in packs})
        return None
    parts = {part.name: part for part in parts_of_entry(index.manifest, entry, index.origins[shard])}
    if index.type == "harmony":
        found = normalized_row(index.store, entry["key"], row)
        return found and _Kept(parts[WHOLE], found[0], "row", {found[0]: found[1]["stats_token_len"][found[0]].as_py()})
    place = index.row_fates(shard).place(row, receipt.parts)
    if place is None:
        return None
    part, number = parts[place[0]], place[1]
    if index.type != "pretrain":
        return _Kept(part, number, "row", {number: None})
    stored = part.row(number)
    # Several roles mean that the document was rearranged to fill in the middle: its prefix, suffix and middle, in some order
    order = stored.roles[np.flatnonzero(np.diff(stored.roles, prepend=-1))]
    names = dict.fromkeys(stored.role_names[int(role)] for role in order)
    detail = f"rearranged as {', '.join(names)}" if len(names) > 1 else None
    return _Kept(part, number, "document", {number: len(stored.ids)}, detail)


def _tokens(part: ShardPart, pack: int, document: int) -> int:
    """The tokens of a document in a pack, without padding."""
    row = part.row(pack)
    owners = np.repeat(row.documents, np.diff(row.starts, append=len(row.ids)))
    return int(np.count_nonzero((owners == document) & (row.roles != row.role_names.index(PADDING))))
