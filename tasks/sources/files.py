"""The types of this package: a file, a slice of it, a batch of its rows, a bad row, and the interface of a file format."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.models import Value

Compression = Literal["gzip", "zstd", "bz2", "xz", "lz4"]

Record = dict[str, Any]

Ranges = Sequence[tuple[int, int]]
"""Parts of a file, each as the byte offsets of its start and its end."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that discovery found.

    `uri` is an absolute local path or a URL that fsspec opens; `format` is the name of a SourceFormat. `version` is the store's
    own checksum or version of the content (an etag, an LFS sha256), which changes with every byte. Local files have
    `modified_ns` instead, and `changed_ns`, the kernel's change time, which no program can set back.
    """

    uri: str
    size: int
    format: str
    compression: Compression | None = None
    version: str | None = None
    modified_ns: int | None = None
    changed_ns: int | None = None


@dataclass(frozen=True, slots=True)
class InputWarning:
    """Inputs that a run doesn't read, or reads more than once; plan, summary, report, JSON records and manifest show them.

    `kind` is for programs: `unread_files`, `read_twice`, …; `what` is for people. `files` and `bytes` are the amount. `reads`
    are the datasets (by `split/name`) that it is about, and how often each reads it in one pass: 0 for what isn't read.
    Discovery leaves `reads` empty.
    """

    kind: str
    what: str
    files: int
    bytes: int
    reads: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a dataset, sorted by URI, how many other files were skipped, by kind, and what to warn about."""

    files: list[SourceFile]
    skipped: Mapping[str, int]
    warnings: Sequence[InputWarning] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a file, `[start, stop)`: byte offsets for row formats, row groups for Parquet.

    A row belongs to the slice that holds its first byte. A file that cannot be cut is one slice, `[0, size)`. If `rows` is set,
    the slice is limited to its first rows (a sample). `content` identifies the bytes of the slice's rows; in a columnar format,
    the columns `fields` (all columns, if empty). `size` is the number of source bytes, for load balancing and
    progress. `filters` and `where` drop rows: every reader counts them as `filtered`. `keys` are the fields of these that the
    path of the file gives to rows without them. With a `where` or keys, `content` omits the row groups that are not read.

    A bundle of small files is a slice with `members`, the slices of its files in order: its rows are their rows. Its `file`,
    `start` and `stop` belong to the first member. Read it with `formats.read_texts` or `formats.read_records`.
    """

    file: SourceFile
    start: int
    stop: int
    content: str = ""
    rows: int | None = None
    size: int = 0
    fields: tuple[str, ...] = ()
    members: tuple["Slice", ...] = ()
    filters: dict[str, list[Value]] = field(default_factory=dict[str, list[Value]], hash=False)
    where: str = ""
    keys: dict[str, str | None] = field(default_factory=dict[str, str | None], hash=False)


PLACES: dict[str, str] = {}
"""Where the Hub stores a large file, signed for some time, by the file's URI. Sent along with shards, so that workers don't have to ask."""

MAX_PLACES = 4_096
"""About 4 MB of addresses."""


def files_of(parts: Iterable[Slice]) -> Iterator[SourceFile]:
    """Return the files in slices, and in the members of bundles."""
    return (each.file for part in parts for each in part.members or [part])


def places_of(parts: Iterable[Slice]) -> dict[str, str]:
    """Return the known places of the files in a slice."""
    return {file.uri: PLACES[file.uri] for file in files_of(parts) if file.uri in PLACES}


def field_path(name: str) -> list[str]:
    """Return the keys that lead from a row to a field: `content.text` is the field `text` of the object `content`."""
    return name.split(".")


def slice_of(record: Mapping[str, Any]) -> Slice:
    """Return the slice from the output of `dataclasses.asdict`, also after a round trip through JSON."""
    file, members = SourceFile(**record["file"]), tuple(map(slice_of, record["members"]))
    part: dict[str, Any] = {**record, "file": file, "fields": tuple(record["fields"]), "members": members}
    return Slice(**part)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read: its number in the slice (from 0, blank lines included), and why.

    `reason` is one of a small fixed set (`malformed_json`, `null_text`, …) for counting; `detail` is the parser's message;
    `excerpt` is the start of the row, with unprintable characters escaped.
    """

    row: int
    reason: str
    detail: str
    excerpt: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a record cannot be used: a reason for counting, and a detail with the fault, its place and the remedy."""

    reason: str
    detail: str


NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Consecutive rows of a slice; a subclass holds the content of those that can be read.

    `rows` are their numbers in the slice (int64, ascending). `bad` are the unreadable rows, `blank` the numbers of blank lines, and
    `filtered` counts the rows that the slice's filter drops. `member` is the number of the rows' file in a bundle.
    """

    rows: np.ndarray
    bad: list[BadRow] = field(default_factory=list[BadRow])
    blank: np.ndarray = field(default_factory=lambda: NO_ROWS)
    member: int = 0
    filtered: int = 0

    @property
    def consumed(self) -> int:
        return len(self.rows) + len(self.bad) + len(self.blank) + self.filtered


@dataclass(frozen=True, slots=True)
class TextBatch(RowBatch):
    """Rows as Arrow text."""

    texts: pa.LargeStringArray


@dataclass(frozen=True, slots=True)
class RecordBatch(RowBatch):
    """Rows as Python objects, with the JSON bytes of each; columnar formats have none."""

    records: list[Record]
    raw: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class BytesBatch(RowBatch):
    """Rows as the bytes of JSON objects that a record could be read from; `lines` means that none has a line break or a byte order mark."""

    raw: Sequence[bytes]
    lines: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """An unreadable row: a reason, the details, and its first bytes."""

    reason: str
    detail: str
    head: bytes


Row = bytes | Refused
"""The JSON bytes of one row, or why there are none."""


class Require(Protocol):
    """A check of the columns of a Parquet file. Its name is part of the key under which cuts are cached."""

    @property
    def __name__(self) -> str: ...

    def __call__(self, metadata: pq.FileMetaData, fields: Sequence[str], uri: str, /) -> None:
        """Raises InputError, naming `uri`, unless the file has the `fields` that are needed."""


class SourceFormat(Protocol):
    """A file format: how its files are named, cut, identified and read. `formats.FORMATS` lists the formats.

    `name` is part of every shard's identity and must not change. `endings` are file name extensions; if `compressible`,
    each may be followed by one of `formats.COMPRESSIONS`. In a folder, only files with the lowest `rank` are read: a CSV file
    beside JSON Lines is most likely about them, and text a note. A `columnar` format is read column by column: the identity of a slice covers
    only the columns that are needed, and cutting a file reads its footer. `json_rows.RowFormat` implements all methods but
    one for formats that are not columnar.
    """

    name: str
    endings: tuple[str, ...]
    compressible: bool = True
    columnar: bool = False
    rank: int = 0

    def sniff(self, file: SourceFile) -> SourceFile:
        """Return the file with its actual format, if the name is ambiguous."""
        return file

    @abstractmethod
    def cut(self, file: SourceFile, shard_size: int, fields: Sequence[str], require: Require) -> list[Slice]:
        """Return the slices of a file that is not empty, in order, of about `shard_size` bytes each."""

    def shortened(self, part: Slice, size: int) -> Slice:  # noqa: ARG002 - for formats that can be cut anywhere
        """Return the slice limited to its first `size` bytes, or the whole slice if the format cannot be cut there."""
        return part

    @abstractmethod
    def owned(self, part: Slice, stream: BinaryIO, fields: Sequence[str]) -> tuple[bytes, Ranges]:
        """Return the bytes that identify a slice: a prefix that sets their interpretation, and their ranges in the file."""

    @abstractmethod
    def rows(self, part: Slice) -> Iterator[list[Row]] | Iterator[pa.RecordBatch | range]:
        """All rows of a slice as they are stored, in order: JSON, or Arrow with all columns if `columnar`.

        A `range` represents rows that are not read, because `where` drops them.
        """

    @abstractmethod
    def texts(self, part: Slice, text_field: str) -> Iterator[TextBatch]:
        """Return the rows of a slice, in order, as the text in one field."""

    @abstractmethod
    def records(self, part: Slice, fields: Sequence[str]) -> Iterator[RecordBatch]:
        """Return the rows of a slice, in order, as dicts with at least `fields`; all fields if `fields` is empty."""

    @abstractmethod
    def count_rows(self, part: Slice, limit: int) -> int:
        """Return the number of rows in a slice; stops reading at `limit`."""

    @abstractmethod
    def first_row(self, part: Slice) -> int:
        """Return the number of rows before a slice that does not begin its file."""


class Rows(Protocol):
    """Consecutive rows: a list, or an Arrow record batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Self: ...


Piece = TypeVar("Piece", bound=Rows)


def leading(pieces: Iterator[Piece], rows: int | None) -> Iterator[Piece]:
    """Return the first `rows` rows in consecutive pieces (all for None), and stop reading there."""
    if rows is None:
        yield from pieces
        return
    while rows > 0 and (piece := next(pieces, None)) is not None:
        yield piece[:rows]
        rows -= len(piece)
