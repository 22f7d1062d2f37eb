"""The row files of a published preparation, and the source of each row.

The manifest has the number of rows per file, so that a random choice opens no file, and the number of source rows before each
slice. A pack stores the row of each document in its slice; for bin/idx, the shard's document map has it. So no line number
needs a second read of the source.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.shards.preparation import preparation
from tokenmill.tasks.shards.publication import rows_before
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.tokenize.document_map import DocumentMap, read_map

KEY_SHOWN = 8
"""Characters of a shard's key in a document id, enough to distinguish some ten thousand shards."""

DOCUMENT = re.compile(r"(?P<key>[0-9a-f]{8,32})(?:-(?P<part>all|train|valid|test))?-(?P<number>[0-9]{1,18})")

LIKE_THIS = "ids look like 1a2b3c4d-17 (packed) or 1a2b3c4d-train-17 (bin/idx), and view shows one above each document"


@dataclass(frozen=True)
class Part:
    """One part (`all`, or `train`, `valid`, `test`) of a shard, with its location and slice.

    `packed` distinguishes packed Parquet from bin/idx; `rows` is its number of packs or documents; `file`, `start` and `stop`
    are the source slice; `rows_before` counts the source file's rows before the slice, None after a missing slice.
    """

    packed: bool
    key: str
    name: str
    dataset: str
    store: Store
    rows: int
    file: str
    start: int
    stop: int
    rows_before: int | None

    @property
    def place(self) -> str:
        """The stored file without its extension."""
        return self.store.path(self.key, self.name)

    @property
    def stored(self) -> str:
        """The file of tokens."""
        return f"{self.place}.parquet" if self.packed else f"{self.place}.bin"

    def document(self, number: int) -> str:
        """The id of a document, whose number is a row of the slice for packed rows, otherwise an index into the `.bin`."""
        key = self.key[:KEY_SHOWN]
        return f"{key}-{number}" if self.packed else f"{key}-{self.name}-{number}"

    def line(self, number: int) -> int | None:
        """A document's line in the source file, from 1; None after a missing slice, and in shards without a document map.

        Raises RunError for a damaged map.
        """
        if self.rows_before is None:
            return None
        if self.packed:
            return self.rows_before + number + 1
        rows = self._document_map
        return rows and self.rows_before + rows.row(self.name, number) + 1

    @cached_property
    def _document_map(self) -> DocumentMap | None:
        receipt = self.store.receipt(self.key)
        return receipt and read_map(self.store, receipt)


@dataclass(frozen=True, slots=True)
class DocumentId:
    """A parsed document id: the start of its shard's key, its part (bin/idx only), its number."""

    text: str
    key: str
    part: str | None
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a document id. Raises InputError if it is malformed."""
        match = DOCUMENT.fullmatch(text)
        if match is None:
            raise InputError(f"--doc: {text!r} is not a document id; {LIKE_THIS}")
        return cls(text, match["key"], match["part"], int(match["number"]))


def parts_of(manifest: Mapping[str, Any], dataset: str | None) -> list[Part]:
    """Every part with rows, in plan order, of one data set or all. A shard listed twice counts once.

    Raises InputError for an unknown data set, or if no part has rows.
    """
    entries = manifest["shards"]
    known = {entry["dataset"] for entry in entries}
    if dataset is not None and dataset not in known:
        raise InputError(f"--dataset: no data set {dataset!r} in this preparation; {nearest(dataset, known)}")
    parts: dict[tuple[str, str], Part] = {}
    slices = (((e["split"], e["dataset"], e["file"]), e["start"], e["stop"], e["rows"]) for e in entries)
    for entry, before in zip(entries, rows_before(slices), strict=True):
        if dataset in {None, entry["dataset"]}:
            for part in _parts(manifest, entry, before):
                parts.setdefault((part.key, part.name), part)
    if not parts:
        raise InputError("there is nothing to view, because no shard holds rows; see the drops in the manifest")
    return list(parts.values())


def _parts(manifest: Mapping[str, Any], entry: Mapping[str, Any], rows_before: int | None) -> list[Part]:
    packed = preparation(manifest["type"]).tokens == "packs"
    store = Store(manifest["volatile"]["store"], manifest["type"])
    return [
        Part(
            packed=packed,
            key=entry["key"],
            name=name,
            dataset=entry["dataset"],
            store=store,
            rows=rows,
            file=entry["file"],
            start=entry["start"],
            stop=entry["stop"],
            rows_before=rows_before,
        )
        for name, documents in entry["documents"].items()
        if documents and (rows := entry["facts"][name]["packs"] if packed else documents)
    ]


def parts_of_document(parts: Sequence[Part], wanted: DocumentId) -> list[Part]:
    """The parts that may hold a document. Raises InputError unless the id matches exactly one shard."""
    found = [part for part in parts if part.key.startswith(wanted.key)]
    found = [part for part in found if wanted.part == (None if part.packed else part.name)]
    keys = sorted({part.key for part in found})
    if not keys:
        raise InputError(f"--doc: no shard here matches {wanted.text!r}; {LIKE_THIS}")
    if len(keys) > 1:
        raise InputError(f"--doc: {len(keys)} shards match {wanted.text!r}; write more of the key: {', '.join(keys)}")
    return found
