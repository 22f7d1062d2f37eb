"""What became of one row of a preparation: the documents made of it and where they are published, or why there is none.

Shards of pretraining, RL and deduplicated text have a document map; sequences and packs store the row of each document; normalized rows have
a column with it. The decisions about duplicates are in the store, by slice.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.dedup.decisions import REASONS
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.harmony.shard import FILE as ROWS_FILE
from tokenmill.tasks.pack.packs import LEFT_OUT
from tokenmill.tasks.pack.sequences import stored_rows
from tokenmill.tasks.select.shard import PART as CANDIDATES
from tokenmill.tasks.shards.build import FILTERED
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.manifest import MANIFEST, WHOLE, entry_files, read_manifest, split_of
from tokenmill.tasks.shards.origins import Origin, origin_of, origins_in
from tokenmill.tasks.shards.published import join_published
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.sources.formats import first_row
from tokenmill.tasks.sources.row_filter import row_filter
from tokenmill.tasks.storage import absolute
from tokenmill.tasks.tokenize.document_map import read_map

from .view_parts import Part, PublishedNames, parts_and_entries, parts_of_entry
from .view_rows import PADDING, Row, read_row, rows_with
from .why_duplicates import kept_row, normalized_row, normalized_rows, verdict_of
from .why_reason import Entry, quarantined, reason_of

FOLLOWED = ("pretrain", "sft", "rl", "dedup", "filter", "harmony")
"""The kinds whose rows can be followed. Scores are joined to rows by their ids and publish no documents."""


@dataclass(frozen=True, slots=True)
class Read:
    """A training step, from 1, and a sample in it, from 0."""

    step: int
    sample: int


@dataclass(frozen=True, slots=True)
class Place:
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
    """What a preparation of `type` in the folder `path` made of a source row.

    `line` counts from 1 in `file`, `row` from 0 among the rows of shard `key`, which was made of the slice from `start` to `stop`
    of the file, and of other files if it is a bundle. A kept row has a `document` id, a `split`, a `part` of the shard, and `places`. `reason` says why a row was dropped, or as what it
    was tagged; it is None for a dropped row if it cannot be found out, and `detail` says why.
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
    places: Sequence[Place] = ()
    reason: str | None = None
    detail: str | None = None
    duplicate_of: str | None = None
    jaccard: float | None = None

    @property
    def kept(self) -> bool:
        """Whether the row became a document."""
        return self.document is not None


class _Kept(NamedTuple):
    """What a part of a shard stores of a row: the number of its document, and the tokens in each document, pack or row.

    `detail` says how it is stored, if not as it was.
    """

    part: Part
    number: int
    unit: str
    tokens: Mapping[int, int | None]
    detail: str | None = None


class Prepared:
    """A published preparation whose rows can be followed."""

    def __init__(self, path: str, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.store = Store(manifest["volatile"]["store"], manifest["type"])
        self.entries: Sequence[Entry] = manifest["shards"]
        self._known_rows: dict[tuple[int, str], np.ndarray] = {}

    @classmethod
    def at(cls, output_dir: str) -> "Prepared":
        """The preparation in a folder. Raises InputError for any other folder or kind."""
        path = absolute(output_dir)
        manifest = read_manifest(path)
        if manifest is None:
            raise InputError(f"{path}: no {MANIFEST} here; point at the --output-dir of a preparation")
        if manifest["type"] not in FOLLOWED:
            raise InputError(
                f"{path}: holds {manifest['type']!r}, which publishes no documents; give the folder of the rows behind it, an "
                f"output of {', '.join(FOLLOWED)}"
            )
        return cls(path, manifest)

    @cached_property
    def names(self) -> PublishedNames:
        """The published names."""
        return PublishedNames(self.manifest, self.path)

    @cached_property
    def files(self) -> Mapping[str, Sequence[int]]:
        """The numbers of the shards of each source file, in the order of the manifest."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for shard, entry in enumerate(self.entries):
            for file in entry_files(entry):
                found[file["file"]].append(shard)
        return found

    @cached_property
    def _origins(self) -> Sequence[Sequence[Origin]]:
        return origins_in(self.entries)

    def source(self, shard: int, row: int) -> tuple[Origin, int]:
        """The slice that a row of a shard came from, and its line in the file, from 1."""
        origin, number = origin_of(self._origins[shard], row)
        return origin, self._before(shard, origin) + number + 1

    def rows_at(self, file: str, line: int) -> Iterator[tuple[int, int]]:
        """The shards with a line of a file, and the row in each."""
        for shard in self.files.get(file, ()):
            first = 0
            for origin in self._origins[shard]:
                number = line - 1 - self._before(shard, origin) if origin.file == file else -1
                if 0 <= number < origin.rows:
                    yield shard, first + number
                first += origin.rows

    def rows_of(self, file: str) -> int:
        """The number of rows of a file that were read."""
        read = ((shard, origin) for shard in self.files.get(file, ()) for origin in self._origins[shard])
        return max((self._before(*each) + each[1].rows for each in read if each[1].file == file), default=0)

    def shard_of(self, part: Part) -> int:
        """The number of the shard with a part."""
        wanted = (part.key, part.dataset, part.origins[0].start)
        shards = ((shard, self.entries[shard]) for shard in self.files[part.origins[0].file])
        return next(
            n
            for n, e in shards
            if (e["key"], e["dataset"], e["start"]) == wanted and part.split == split_of(e, part.name)
        )

    @cached_property
    def _packed(self) -> bool:
        return preparation(self.manifest["type"]).tokens == "packs"

    @cached_property
    def _packs(self) -> Mapping[tuple[int, str], tuple[Part, int]]:
        """The packs with the rows of each part of a shard, and the number of its first row there."""
        return {
            (member.shard, part.name): (part, member.first)
            for part, _ in parts_and_entries(self.manifest)
            for member in part.members
        }

    @cached_property
    def pools(self) -> Mapping[str, str]:
        """The place, as in the manifest, of the shard that the rows of each published pool come from, by the pool's file."""
        derived = self.manifest.get("derived", {}).get("shards", [])
        return {
            join_published(self.path, name): entry["place"]
            for entry in derived
            for part, names in entry["published"].items()
            for name in names
            if part != CANDIDATES
        }

    def _before(self, shard: int, origin: Origin) -> int:
        """The rows of the file before a slice; after a missing slice, the file is read to count them."""
        if origin.before is not None:
            return origin.before
        source = self.entries[shard]["source"]
        file = SourceFile(origin.file, 0, source["format"], source.get("compression"))
        return first_row(Slice(file, origin.start, origin.stop))

    def source_row(self, shard: int, part: str, number: int) -> int:
        """The row in the slice that document `number` of a part came from.

        Raises IndexError if there is no such document, RunError for missing or damaged files.
        """
        entry = self.entries[shard]
        if self.manifest["type"] == "harmony":
            return normalized_rows(self.store.path(entry["key"], ROWS_FILE))["source_row"][number].as_py()
        return int(self._rows_of(shard, part)[number])

    def _rows_of(self, shard: int, part: str) -> np.ndarray:
        """The row of each document of a part."""
        if (shard, part) not in self._known_rows:
            rows = read_map(self.store, self._receipt(self.entries[shard]))
            if rows is None:
                raise self._mapless(self.entries[shard])
            self._known_rows[shard, part] = rows.rows(part)
        return self._known_rows[shard, part]

    def fate(self, shard: int, row: int) -> Fate:
        """The fate of a row of the slice of shard number `shard`. Raises RunError for missing or damaged files."""
        entry = self.entries[shard]
        receipt = self._receipt(entry)
        fate = self._read(shard, row)
        bad = quarantined(self.store, receipt).get(row)
        if bad is not None:
            return replace(fate, reason=bad["reason"], detail=bad["detail"])
        found = self._kept(shard, receipt, row)
        if found is not None:
            fate = self._placed(fate, found)
        try:
            verdict = verdict_of(self.store, self.manifest, entry, row)
            if verdict is not None:
                kept = verdict.kept and self._document_called(verdict.kept)
                return replace(fate, reason=verdict.outcome, duplicate_of=kept, jaccard=verdict.jaccard)
            return fate if fate.kept else self._explained(fate, shard, receipt, row)
        except (InputError, RunError) as error:
            return replace(fate, detail=f"the reason cannot be found out: {error}")

    def _explained(self, fate: Fate, shard: int, receipt: Receipt, row: int) -> Fate:
        """The fate with the reason of a drop that is neither a bad row nor a decision about duplicates."""
        reason = self._reason(shard, receipt, row)
        if reason != FILTERED:
            return replace(fate, reason=reason)
        chosen = row_filter(DataSource.model_validate(self._source(self.entries[shard])))
        return replace(fate, reason=reason, detail=f"not true: {chosen.describe()}")

    def _source(self, entry: Entry) -> Mapping[str, Any]:
        """The dataset of a shard in the blend."""
        return next(each for each in self.manifest["blend"][entry["split"]] if each["name"] == entry["dataset"])

    def _reason(self, shard: int, receipt: Receipt, row: int) -> str:
        """The reason of a drop that is neither a bad row nor a decision about duplicates."""
        if self._packed and any(row in stored_rows(self.store, receipt, part) for part in receipt.parts):
            return LEFT_OUT[self.manifest["settings"]["on_oversize"]]
        bad = {each["reason"] for each in quarantined(self.store, receipt).values()}
        reasons = receipt.drops.keys() - bad - {*REASONS}
        if len(reasons) == 1:
            return next(iter(reasons))
        origin, number = origin_of(self._origins[shard], row)
        entry = self.entries[shard]
        file = entry_files(entry)[self._origins[shard].index(origin)]
        alone = {**entry, **file, "source": {**entry["source"], "content": file["content"]}}
        return reason_of(self.path, self.manifest, alone, number)

    def _document_called(self, name: str) -> str:
        """The file and line of a document that a decision names, or the name if there is no such document here."""
        found = kept_row(self.store, self.manifest, name)
        if found is None:
            return name
        origin, line = self.source(*found)
        return f"{origin.file}:{line}"

    def _mapless(self, entry: Entry) -> RunError:
        return RunError(
            f"{self.path}: shard {entry['key']} was built before shards had a document map; prepare the data again with "
            "force=true"
        )

    def receipt(self, shard: int) -> Receipt:
        """The receipt of a shard. Raises RunError if it is missing or damaged."""
        return self._receipt(self.entries[shard])

    def _receipt(self, entry: Entry) -> Receipt:
        receipt = self.store.receipt(entry["key"])
        if receipt is None:
            raise RunError(f"{self.store.folder(entry['key'])}: missing or damaged; prepare the data again")
        return receipt

    def _read(self, shard: int, row: int) -> Fate:
        """Where a row was read."""
        entry = self.entries[shard]
        origin, line = self.source(shard, row)
        source = self._source(entry)
        return Fate(
            path=self.path,
            type=self.manifest["type"],
            dataset=entry["dataset"],
            weight=source["weight"],
            file=origin.file,
            line=line,
            row=row,
            start=origin.start,
            stop=origin.stop,
            key=entry["key"],
        )

    def _kept(self, shard: int, receipt: Receipt, row: int) -> _Kept | None:
        """What is stored of a row, None if nothing is."""
        entry = self.entries[shard]
        if self._packed:
            return self._kept_in_packs(shard, receipt, row)
        parts = {part.name: part for part in parts_of_entry(self.manifest, entry, self._origins[shard])}
        if self.manifest["type"] == "harmony":
            return self._normalized(entry, parts, row)
        rows = read_map(self.store, receipt)
        if rows is None:
            raise self._mapless(entry)
        place = rows.place(row, receipt.parts)
        if place is None:
            return None
        part, number = parts[place[0]], place[1]
        if self.manifest["type"] == "pretrain":
            stored = read_row(part, number)
            return _Kept(part, number, "document", {number: len(stored.ids)}, _rearranged(stored))
        return _Kept(part, number, "row", {number: None})

    def _kept_in_packs(self, shard: int, receipt: Receipt, row: int) -> _Kept | None:
        for part, first in (self._packs[shard, name] for name in receipt.parts if (shard, name) in self._packs):
            if packs := rows_with(part, [first + row]):
                return _Kept(part, first + row, "pack", {pack: _tokens(part, pack, first + row) for pack in packs})
        return None

    def _normalized(self, entry: Entry, parts: Mapping[str, Part], row: int) -> _Kept | None:
        found = normalized_row(self.store, entry["key"], row)
        if found is None:
            return None
        number, rows = found
        return _Kept(parts[WHOLE], number, "row", {number: rows["stats_token_len"][number].as_py()})

    def _placed(self, fate: Fate, kept: _Kept) -> Fate:
        part = kept.part
        places = [
            Place(kept.unit, number, tokens, name, published)
            for number, tokens in kept.tokens.items()
            for name, published in self.names.places(part, number) or [(None, None)]
        ]
        return replace(
            fate,
            document=part.document(kept.number),
            split=part.split,
            part=part.name,
            places=places,
            detail=kept.detail,
        )


def _rearranged(stored: Row) -> str | None:
    """The order of the parts of a document that was rearranged to fill in the middle."""
    parts = stored.roles[np.flatnonzero(np.diff(stored.roles, prepend=-1))]
    names = dict.fromkeys(stored.role_names[int(part)] for part in parts)
    return f"rearranged as {', '.join(names)}" if len(names) > 1 else None


def _tokens(part: Part, pack: int, document: int) -> int:
    """The tokens of a document in a pack, without padding."""
    row = read_row(part, pack)
    owners = np.repeat(row.documents, np.diff(row.starts, append=len(row.ids)))
    return int(np.count_nonzero((owners == document) & (row.roles != row.role_names.index(PADDING))))
