"""The nouns of this room: a file that was found, a slice of it, a batch of its rows, a row that could not be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

Format = Literal["jsonl", "json", "parquet"]
"""`jsonl`: one JSON object a line. `json`: one array of objects. `parquet`: Apache Parquet."""

Compression = Literal["gzip", "zstd"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that discovery found.

    `uri` is an absolute local path or a URL that fsspec opens. `version` is what the store itself says of the content
    (an etag, an LFS sha256): it changes whenever a byte does. Local files have none; they have `modified_ns`, and
    `changed_ns`, when the kernel last noted a change of any kind, which no program can set back.
    """

    uri: str
    size: int
    format: Format
    compression: Compression | None = None
    version: str | None = None
    modified_ns: int | None = None
    changed_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a data set is made of: its files, sorted by URI, and how many files beside them are not read, by kind."""

    files: list[SourceFile]
    skipped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a file: the rows whose first byte lies in `[start, stop)`, or row groups `[start, stop)` of a Parquet file.

    A JSON array and a compressed file are always one slice, `[0, size)`. `rows`, when set, ends the slice after that
    many rows (a sample). `content` names exactly the bytes of the rows that the slice owns; of Parquet, those of the
    columns `fields` (all, if it is empty). `size` is how many source bytes it takes to read, for balancing and progress.
    """

    file: SourceFile
    start: int
    stop: int
    content: str = ""
    rows: int | None = None
    size: int = 0
    fields: tuple[str, ...] = ()


def slice_of(record: Mapping[str, Any]) -> Slice:
    """The slice that `dataclasses.asdict` made `record` from, which may have been JSON meanwhile."""
    part: dict[str, Any] = {**record, "file": SourceFile(**record["file"]), "fields": tuple(record["fields"])}
    return Slice(**part)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read: its number in the slice (from 0, blank lines counted), and why.

    `reason` is one of a small fixed set (`malformed_json`, `null_text`, …) that counts are kept by; `detail` is the
    parser's own word; `excerpt` is the start of the row, made printable.
    """

    row: int
    reason: str
    detail: str
    excerpt: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a record cannot be used: a reason to count by, and what was found, where, and the remedy."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Some consecutive rows of a slice, as Arrow text.

    `texts` holds the rows that could be read, `rows` the number in the slice of each (int64, ascending), `bad` the
    rows that could not, and `blank` counts blank lines: `len(texts) + len(bad) + blank` rows were consumed.
    """

    texts: pa.LargeStringArray
    rows: np.ndarray
    bad: list[BadRow] = field(default_factory=list)
    blank: int = 0

    @property
    def consumed(self) -> int:
        """How many rows of the slice this batch accounts for."""
        return len(self.texts) + len(self.bad) + self.blank
