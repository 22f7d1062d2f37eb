"""The files of a published preparation in which rows lie, and where in the sources those rows come from.

Everything here is read off the manifest: how many rows a file holds, so that a random choice over all of them opens
no file, and how many source rows stand before each slice, so that a row has a line without reading its source again.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.shards.preparation import preparation
from tokenmill.tasks.shards.store import Store

KEY_SHOWN = 8
"""Documents are named by this many characters of their shard's key, which tell some ten thousand shards apart."""

DOCUMENT = re.compile(r"(?P<key>[0-9a-f]{8,32})(?:-(?P<part>all|train|valid|test))?-(?P<number>[0-9]{1,18})")

LIKE_THIS = "ids look like 1a2b3c4d-17 (packed) or 1a2b3c4d-train-17 (bin/idx), and view shows one above each document"


@dataclass(frozen=True, slots=True)
class Part:
    """One part (`all`, or `train`, `valid`, `test`) of a shard: where it lies, and the slice it was made of.

    `packed` tells packed Parquet from bin/idx; `place` is the stored file without its ending; `rows` how many packs or
    documents it holds; `file`, `start` and `stop` the slice of the source; `rows_before` how many rows of the source
    file stand before the slice, None where the manifest does not tell.
    """

    packed: bool
    key: str
    name: str
    dataset: str
    place: str
    rows: int
    file: str
    start: int
    stop: int
    rows_before: int | None

    @property
    def stored(self) -> str:
        """The file that holds the tokens."""
        return f"{self.place}.parquet" if self.packed else f"{self.place}.bin"

    def document(self, number: int) -> str:
        """The id of a document: its number is a row of the slice where rows are packed, else a place in the `.bin`."""
        key = self.key[:KEY_SHOWN]
        return f"{key}-{number}" if self.packed else f"{key}-{self.name}-{number}"

    def line(self, number: int) -> int | None:
        """The line of the source file, from 1, of a document; None where it is not known."""
        return self.rows_before + number + 1 if self.packed and self.rows_before is not None else None


@dataclass(frozen=True, slots=True)
class DocumentId:
    """A document's name, taken apart: the beginning of its shard's key, its part (bin/idx alone), its number."""

    text: str
    key: str
    part: str | None
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The id that `text` spells. Raises InputError when it is none."""
        match = DOCUMENT.fullmatch(text)
        if match is None:
            raise InputError(f"--doc: {text!r} is no document id; {LIKE_THIS}")
        return cls(text, match["key"], match["part"], int(match["number"]))


def parts_of(manifest: Mapping[str, Any], dataset: str | None) -> list[Part]:
    """Every part that holds rows, in plan order, of one data set or of all; a shard that stands twice counts once.

    Raises InputError for a data set that is not there, or when nothing holds rows.
    """
    entries = manifest["shards"]
    known = {entry["dataset"] for entry in entries}
    if dataset is not None and dataset not in known:
        raise InputError(f"--dataset: no data set {dataset!r} in this preparation; {nearest(dataset, known)}")
    parts: dict[tuple[str, str], Part] = {}
    for entry, rows_before in zip(entries, _rows_before(entries), strict=True):
        if dataset in {None, entry["dataset"]}:
            for part in _parts(manifest, entry, rows_before):
                parts.setdefault((part.key, part.name), part)
    if not parts:
        raise InputError("there is nothing to view: no shard holds rows; the manifest's drops say why")
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
            place=store.path(entry["key"], name),
            rows=rows,
            file=entry["file"],
            start=entry["start"],
            stop=entry["stop"],
            rows_before=rows_before,
        )
        for name, documents in entry["documents"].items()
        if documents and (rows := entry["facts"][name]["packs"] if packed else documents)
    ]


def _rows_before(entries: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """How many rows of its file stand before each shard: what the slices before it hold, None after a gap."""
    ends: dict[tuple[str, str, str], tuple[int, int | None]] = {}
    counts: list[int | None] = []
    for entry in entries:
        source = entry["split"], entry["dataset"], entry["file"]
        stop, count = ends.get(source, (0, 0))
        if stop != entry["start"]:
            count = None
        counts.append(count)
        ends[source] = entry["stop"], None if count is None else count + entry["rows"]
    return counts


def parts_of_document(parts: Sequence[Part], wanted: DocumentId) -> list[Part]:
    """The parts of the one shard in which that document may lie. Raises InputError unless exactly one shard fits."""
    found = [part for part in parts if part.key.startswith(wanted.key)]
    found = [part for part in found if wanted.part == (None if part.packed else part.name)]
    keys = sorted({part.key for part in found})
    if not keys:
        raise InputError(f"--doc: no shard here fits {wanted.text!r}; {LIKE_THIS}")
    if len(keys) > 1:
        raise InputError(f"--doc: {len(keys)} shards fit {wanted.text!r}; write more of a key: {', '.join(keys)}")
    return found
