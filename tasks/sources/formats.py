"""The registry of source formats, and reading by format: rows become Arrow text or dicts, and every row is accounted for.

The name of a file decides its format: a `.jsonl` or `.ndjson` file is always read as lines and a `.parquet` file as Parquet,
and a wrong name shows up as bad rows. Only `.json` is ambiguous; its first byte decides (`json_array`).

Rows that the filter of a slice drops are counted by every reader, and never passed on.

A slice is read once, forwards, a block at a time: memory is bounded by a block and the longest row, not by the file. One
core reads, in bytes of JSON Lines a second: plain 670 MB/s, zstd 460, gzip 280, a JSON array 250, Parquet 880. Records
cost two or three microseconds a row more than parsing, most of it in Python's garbage collector.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar, cast

from .arrow_ipc import ArrowIpc
from .files import BytesBatch, Compression, RecordBatch, RowBatch, Slice, SourceFile, SourceFormat, TextBatch
from .json_array import JsonArray
from .json_lines import JsonLines, TextLines, WholeText
from .json_rows import RowFormat
from .parquet import Parquet
from .row_filter import filter_of
from .separated import Separated

COMPRESSIONS: dict[str, Compression] = {
    ".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4",
}  # fmt: skip

METADATA = re.compile(
    r"(?:config|dataset_dict|dataset_info|dataset_infos|state)\.json"
    r"|(?:authors|changelog|citation|contributing|copying|licen[cs]e|notice|readme|requirements)[^/]*\.txt",
    re.IGNORECASE,
)
"""Names of files that describe a dataset and don't contain rows: metadata of the `datasets` library, and notes for people."""

HIDDEN = ("_", ".")
"""First characters of hidden names."""

Batch = TypeVar("Batch", bound=RowBatch)

FORMATS: dict[str, SourceFormat] = {}
"""Every format, by name."""

ENDINGS: dict[str, tuple[str, Compression | None]] = {}
"""Every file name extension, with the name of its format and its compression."""


def register(source_format: SourceFormat) -> None:
    """Add a format."""
    FORMATS[source_format.name] = source_format
    for ending in source_format.endings:
        ENDINGS[ending] = source_format.name, None
        if source_format.compressible:
            ENDINGS.update({ending + suffix: (source_format.name, each) for suffix, each in COMPRESSIONS.items()})


for each in (JsonLines(), JsonArray(), Parquet(), Separated("csv", ","), Separated("tsv", "\t"), ArrowIpc()):
    register(each)
for each in (WholeText(), TextLines()):
    register(each)


def format_of(file: SourceFile) -> SourceFormat:
    """Return the format of a file."""
    return FORMATS[file.format]


def describe(name: str) -> tuple[str, Compression | None] | None:
    """Return the format's name and the compression, by the ending of `name`, case ignored; None if unknown."""
    lowered = name.lower()
    return next((kind for ending, kind in ENDINGS.items() if lowered.endswith(ending)), None)


def supported() -> str:
    """Return the endings that can be read, for messages."""
    packed = [ending for each in FORMATS.values() if each.compressible for ending in each.endings]
    plain = [ending for each in FORMATS.values() if not each.compressible for ending in each.endings]
    return f"{', '.join(plain)}, and {', '.join(packed)}, also followed by {', '.join(COMPRESSIONS)}"


def is_hidden(name: str, named: str = "") -> bool:
    """Return whether a component of a path is hidden, as for Spark, Hive, pyarrow and Dask: `_temporary`, `_SUCCESS`, `.crc` files.

    A component that the user wrote into `named`, a path or glob, isn't: `raw/_v2/*.jsonl` reads `_v2`, and `_*.jsonl` reads
    `_a.jsonl`, as in a shell.
    """
    return any(
        part.startswith(HIDDEN)
        and not any(each[:1] == part[0] and fnmatchcase(part, each) for each in named.split("/"))
        for part in name.split("/")
    )


def without_ending(name: str) -> str:
    """`name` without the ending that `describe` recognizes."""
    ending = next((ending for ending in ENDINGS if name.lower().endswith(ending)), "")
    return name[: len(name) - len(ending)]


def read_texts(part: Slice, text_field: str) -> Iterator[TextBatch]:
    """Return the rows of a slice, in order, as batches of about a mebibyte (Parquet: four) of text.

    `text_field` names the string to take from each row; dots separate nested keys (`content.text`).

    Raises SourceCorrupt if the file is truncated or damaged, RunError if it has changed, and InputError if a Parquet
    file doesn't have such a column. A row that cannot be read is part of the batch, with its reason.
    """
    return _read(part, lambda one: format_of(one.file).texts(one, text_field))


def read_records(part: Slice, fields: Sequence[str]) -> Iterator[RecordBatch]:
    """Return the rows of a slice, in order, as batches of about a mebibyte (Parquet: four) of records.

    `fields` are the fields that are needed; dots separate nested keys. A record may hold others too, and lacks those that
    its row lacks. From Parquet only these are read (all if `fields` is empty), and nulls are dropped.

    Raises as `read_texts` does, and InputError if a Parquet file has none of `fields`.
    """
    return _read(part, lambda one: format_of(one.file).records(one, fields))


def read_objects(part: Slice) -> Iterator[BytesBatch] | None:
    """Return the rows of a slice, in order, as the bytes of records; None if a file of it has none, as Parquet does, or if a filter
    must look into them.

    Reading records takes twice the time. Raises as `read_texts` does.
    """
    if not filter_of(part) and all(isinstance(format_of(one.file), RowFormat) for one in part.members or [part]):
        return _read(part, lambda one: cast("RowFormat", format_of(one.file)).objects(one))
    return None


def _read(part: Slice, read: Callable[[Slice], Iterator[Batch]]) -> Iterator[Batch]:
    """Yield the batches of a slice; for a bundle, file by file, with row numbers in the bundle."""
    if not part.members:
        yield from read(part)
    first = 0
    for number, member in enumerate(part.members):
        before = first
        for batch in read(member):
            bad = [replace(row, row=row.row + before) for row in batch.bad]
            yield replace(batch, rows=batch.rows + before, blank=batch.blank + before, bad=bad, member=number)
            first += batch.consumed


def count_rows(part: Slice, limit: int) -> int:
    """Return the number of rows in a slice, including blank and bad ones; stops reading at `limit`."""
    return format_of(part.file).count_rows(part, limit)


def first_row(part: Slice) -> int:
    """Return the number of rows (lines for JSON Lines) before a slice in its file; row n of the slice is line first + n + 1.

    May read the file up to the slice, so use it only for error messages.
    """
    return format_of(part.file).first_row(part) if part.start else 0


def place_of(part: Slice, row: int) -> str:
    """`file:line` of a row of a slice or bundle, for error messages: it may read the files up to that row."""
    for member in part.members:
        rows = count_rows(member, row + 1)
        if row < rows:
            return place_of(member, row)
        row -= rows
    return f"{part.file.uri}:{first_row(part) + row + 1}"
