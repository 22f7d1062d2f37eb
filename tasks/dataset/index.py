"""The shards of a published output: the source of each row, and the place of each document.

A source row leads to the shards that read it, a document of a shard to the files that were published with it, and both back.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.shard import FILE as ROWS_FILE
from tokenmill.tasks.select.shard import PART as CANDIDATES
from tokenmill.tasks.shards.build import QUARANTINE
from tokenmill.tasks.shards.fates import RowFates, read_fates
from tokenmill.tasks.shards.kind import Kind
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.manifest import (
    Origin,
    derived_entries,
    entry_files,
    join_published,
    origin_of,
    origins_in,
    split_of,
)
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.records import Manifest, ShardEntry
from tokenmill.tasks.shards.store import Store, read_bytes
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.sources.formats import first_row

from .duplicates import normalized_rows
from .parts import PublishedNames, ShardPart, parts_and_entries

RECEIPTS_KEPT, PARTS_KEPT = 1024, 64


class ShardIndex:
    """The shards of the output in the absolute folder `path`, by their numbers in the manifest; `known` receipts aren't read again."""

    def __init__(self, path: str, manifest: Manifest, known: Mapping[str, Receipt] = MappingProxyType({})) -> None:
        self.path, self.manifest, self.known = path, manifest, known
        self.store = Store(manifest["volatile"]["store"], manifest["type"])
        self.entries: Sequence[ShardEntry] = manifest["shards"]
        # The receipt of a shard, and the row of each document (int64) by shard and part. Both raise RunError for what is
        # missing or damaged. Documents of one shard are mostly asked for one after the other
        self.receipt = lru_cache(maxsize=RECEIPTS_KEPT)(self._receipt)
        self.rows_of_part = lru_cache(maxsize=PARTS_KEPT)(lambda shard, part: self.row_fates(shard).rows(part))

    @property
    def type(self) -> str:
        """Its kind."""
        return self.manifest["type"]

    @property
    def kind(self) -> Kind[Any, Any]:
        """Its methods."""
        return preparation(self.type)

    @cached_property
    def names(self) -> PublishedNames:
        """The published names."""
        return PublishedNames(self.manifest, self.path)

    @cached_property
    def source_files(self) -> Mapping[str, Sequence[int]]:
        """The numbers of the shards in each source file, in the order of the manifest."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for shard, entry in enumerate(self.entries):
            for file in entry_files(entry):
                found[file["file"]].append(shard)
        return found

    @cached_property
    def origins(self) -> Sequence[Sequence[Origin]]:
        """The slices of each shard's rows."""
        return origins_in(self.entries)

    def source(self, shard: int, row: int) -> tuple[Origin, int]:
        """Return the slice of a row in a shard, and its line in the file, from 1."""
        origin, number = origin_of(self.origins[shard], row)
        return origin, self._before(shard, origin) + number + 1

    def rows_at(self, file: str, line: int) -> Iterator[tuple[int, int]]:
        """Yield the shards with a line of a file, and the row in each."""
        for shard in self.source_files.get(file, ()):
            first = 0  # a bundle has the rows of several files, one file after the other
            for origin in self.origins[shard]:
                number = line - 1 - self._before(shard, origin) if origin.file == file else -1
                if 0 <= number < origin.rows:
                    yield shard, first + number
                first += origin.rows

    def rows_of(self, file: str) -> int:
        """Return the number of rows in a file that were read."""
        read = ((shard, origin) for shard in self.source_files.get(file, ()) for origin in self.origins[shard])
        return max((self._before(*each) + each[1].rows for each in read if each[1].file == file), default=0)

    def shard_of(self, part: ShardPart) -> int:
        """Return the number of the shard with a part."""
        # Slices of equal content have one key, so the place in the file distinguishes them
        wanted = (part.key, part.dataset, part.origins[0].start)
        shards = ((shard, self.entries[shard]) for shard in self.source_files[part.origins[0].file])
        return next(
            n
            for n, e in shards
            if (e["key"], e["dataset"], e["start"]) == wanted and part.split == split_of(e, part.name)
        )

    @cached_property
    def packed_at(self) -> Mapping[tuple[int, str], tuple[ShardPart, int]]:
        """The packs with the rows of each part of a shard, and the number of its first row there."""
        return {
            (member.shard, part.name): (part, member.first)
            for part, _ in parts_and_entries(self.manifest)
            for member in part.members
        }

    @cached_property
    def pools(self) -> Mapping[str, str]:
        """The place, as in the manifest, of the shard that holds each published pool's rows, by the pool's file."""
        derived = derived_entries(self.manifest)
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
        """Return the row in the slice for document `number` of a part.

        Raises IndexError for an unknown document, RunError for missing or damaged files.
        """
        entry = self.entries[shard]
        if self.type == "harmony":
            return normalized_rows(self.store.path(entry["key"], ROWS_FILE))["source_row"][number].as_py()
        return int(self.rows_of_part(shard, part)[number])

    def row_fates(self, shard: int) -> RowFates:
        """Return the fate of each row in a shard. Raises RunError for a shard without them."""
        fates = read_fates(self.store, self.receipt(shard))
        if fates is None:
            raise RunError(
                f"{self.path}: shard {self.entries[shard]['key']} was built before the fates of rows were recorded; prepare the "
                "data again with force=true"
            )
        return fates

    def reasons(self, shard: int) -> np.ndarray:
        """Why each row of a shard was dropped (objects [rows]); None for a kept row, and where that isn't recorded."""
        receipt = self.receipt(shard)
        fates = read_fates(self.store, receipt)
        return np.full(receipt.rows_in, None) if fates is None else fates.why()

    def quarantined(self, shard: int) -> dict[int, Mapping[str, Any]]:
        """Return the bad rows of a shard, by row in the slice. Raises RunError if the file is missing."""
        receipt = self.receipt(shard)  # lists the file only if there were bad rows
        if not any(output.path == QUARANTINE for output in receipt.outputs):
            return {}
        place = self.store.path(receipt.key, QUARANTINE)
        content = read_bytes(place)
        if content is None:
            raise RunError(f"{place}: missing; run tokenmill verify on the folder, then prepare it again")
        return {row["row"]: row for row in map(orjson.loads, content.splitlines())}

    def _receipt(self, shard: int) -> Receipt:
        key = self.entries[shard]["key"]
        receipt = self.known.get(key) or self.store.receipt(key)
        if receipt is None:
            raise RunError(f"{self.store.folder(key)}: missing or damaged; prepare the data again")
        return receipt

    def blend_source(self, shard: int) -> Mapping[str, Any]:
        """Return the dataset of a shard in the blend."""
        entry = self.entries[shard]
        return next(each for each in self.manifest["blend"][entry["split"]] if each["name"] == entry["dataset"])
