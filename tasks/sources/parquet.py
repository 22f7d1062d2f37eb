"""Apache Parquet: only the columns that are asked for, of some row groups, in batches of about 4 MB.

Only the bytes of those columns are fetched, through a buffer, so that memory is bounded by a batch and not by a row
group (which may be a gigabyte). Page checksums are verified where the writer left them.

Arrow trusts the UTF-8 of a string column without looking, so every batch of texts is cast by way of binary, which
looks (a few GB/s); a batch that fails is gone through row by row. Whatever holds text (string, large_string,
string_view, the same in a dictionary, and binary that is UTF-8) comes out as large_string.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import InputError, nearest
from tasks.sources.files import BadRow, Slice, SourceFile, TextBatch
from tasks.sources.json_rows import excerpt
from tasks.sources.leading import leading
from tasks.sources.opening import SourceCorrupt, is_decoder_error, open_source
from tasks.sources.text_field import field_path

BATCH_BYTES = 4 << 20
MAX_BATCH_ROWS = 8192
"""A dictionary can spell a gigabyte in a few bytes, so a small column does not mean small rows."""

BUFFER_BYTES = 8 << 20


class Require(Protocol):
    """What is asked of a footer; its name tells it from others where the answer is remembered."""

    __name__: str

    def __call__(self, metadata: pq.FileMetaData, fields: Sequence[str], uri: str, /) -> None:
        """Raises InputError unless the footer has what is wanted of some fields; `uri` is the file's, for the error."""
        ...


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group as the planner sees it.

    `size` is the compressed bytes of all its columns; `ranges` are the (offset, length) in the file of the bytes of
    the fields that are asked for, the only ones that are read.
    """

    rows: int
    size: int
    ranges: list[tuple[int, int]]


def row_groups(metadata: pq.FileMetaData, fields: Sequence[str]) -> list[RowGroup]:
    """The row groups of a file, in order, with the places of `fields`."""
    leaves = _leaves(metadata, fields)
    return [_row_group(metadata.row_group(number), leaves) for number in range(metadata.num_row_groups)]


def layout(metadata: pq.FileMetaData, fields: Sequence[str]) -> bytes:
    """What the bytes of `fields` mean, which the footer alone says: name, type and nesting of each leaf.

    Empty for one field that is a leaf itself, as a column of text is: its name says it all.
    """
    leaves = [metadata.schema.column(number) for number in _leaves(metadata, fields)]
    if len(fields) == 1 and {leaf.path for leaf in leaves} == {*fields}:
        return b""
    return orjson.dumps([_meaning(leaf) for leaf in leaves])


def _meaning(leaf: pq.ColumnSchema) -> list[str | int]:
    nesting = [leaf.max_definition_level, leaf.max_repetition_level]
    return [leaf.path, leaf.physical_type, leaf.logical_type.type, *nesting]


def _leaves(metadata: pq.FileMetaData, fields: Sequence[str]) -> list[int]:
    """The numbers of the leaf columns that are one of `fields` or, where none has its very name, lie under it; without
    fields, of all.
    """
    if not fields:
        return list(range(metadata.num_columns))
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    found: set[int] = set()
    for field in fields:
        exact = [number for number, path in enumerate(paths) if path == field]
        found.update(exact or (number for number, path in enumerate(paths) if path.startswith(f"{field}.")))
    return sorted(found)


def _row_group(group: pq.RowGroupMetaData, leaves: Sequence[int]) -> RowGroup:
    columns = [group.column(number) for number in range(group.num_columns)]
    size = sum(column.total_compressed_size for column in columns)
    return RowGroup(group.num_rows, size, [_column_range(columns[leaf]) for leaf in leaves])


def _column_range(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Offset and length of a column chunk: it begins with its dictionary page when it has one.

    https://github.com/apache/parquet-format#file-format
    """
    start = column.data_page_offset
    if column.dictionary_page_offset is not None:
        start = min(start, column.dictionary_page_offset)
    return start, column.total_compressed_size


def require_any(metadata: pq.FileMetaData, fields: Sequence[str], uri: str) -> None:
    """Raises InputError unless at least one of `fields` is a column, or a field inside structs, and each in one column only."""
    columns = metadata.schema.to_arrow_schema().names
    counts, asked = Counter(columns), [field_path(field)[0] for field in fields] or columns
    twice = next((name for name in asked if counts[name] > 1), None)
    if twice is not None:
        raise InputError(
            f"{uri}: {counts[twice]} columns are called {twice!r}; which of them is meant cannot be said: write the file "
            "again with a name for each"
        )
    if not _leaves(metadata, fields):
        raise InputError(
            f"{uri}: has none of the fields {', '.join(map(repr, fields))}; "
            f"name one that it has (columns: {', '.join(columns) or 'none'})"
        )


def require_text(metadata: pq.FileMetaData, fields: Sequence[str], uri: str) -> None:
    """Raises InputError unless each of `fields` is a column of text, or a field of text inside structs."""
    schema = metadata.schema.to_arrow_schema()
    for field in fields:
        _require_text(schema, field, uri)


def _require_text(schema: pa.Schema, text_field: str, uri: str) -> None:
    fields: list[pa.Field] = [*schema]
    place = "the file"
    found: pa.DataType = pa.null()
    for key in field_path(text_field):
        types = [each.type for each in fields if each.name == key]
        if len(types) != 1:
            names = [each.name for each in fields]
            problem = f"{len(types)} columns {key!r}" if types else f"no column {key!r}"
            remedy = _remedy(schema, text_field, key, names)
            columns = ", ".join(names) or "none"
            raise InputError(f"{uri}: text_field {text_field!r}: {place} has {problem}; {remedy} (columns: {columns})")
        found = types[0]
        place = f"column {key!r}"
        fields = [*found] if pa.types.is_struct(found) else []
    if not _is_text(found):
        columns = ", ".join(f"{each.name}: {each.type}" for each in schema)
        raise InputError(
            f"{uri}: text_field {text_field!r} is of type {found}, which is no text; name a column of text ({columns})"
        )


def _remedy(schema: pa.Schema, text_field: str, key: str, names: Sequence[str]) -> str:
    """What to do where not exactly one of `names` is `key`, a part of `text_field`."""
    if key in names:
        return "which of them is meant cannot be said: write the file again with a name for each"
    dotted = [name for name in (*names, *schema.names) if "." in name and f".{name}." in f".{text_field}."]
    if dotted:
        return f"a dot leads into a struct: rename column {dotted[0]!r} to a name without one, and write the file again"
    return nearest(key, names)


def _is_text(found: pa.DataType) -> bool:
    kind = found.value_type if pa.types.is_dictionary(found) else found
    return kind in {pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()}


def parquet_texts(part: Slice, text_field: str) -> Iterator[TextBatch]:
    """The texts of the row groups `[start, stop)`, rows numbered from 0 at the first of them.

    Raises InputError when there is no such column of text, SourceCorrupt when the file is damaged.
    """
    first = 0
    for batch in column_batches(part, [text_field], require_text):
        yield _texts(_column(batch, text_field), first)
        first += len(batch)


def column_batches(part: Slice, fields: Sequence[str], require: Require) -> Iterator[pa.RecordBatch]:
    """The rows of the row groups `[start, stop)`, in order, with only those of `fields` that the file has; without
    fields, with all columns.

    Raises the InputError of `require`, and SourceCorrupt when the file is damaged.
    """
    with open_source(part.file, cache="none") as stream:
        opened = open_parquet(part.file, stream)
        require(opened.metadata, fields, part.file.uri)
        yield from leading(_batches(part, opened, fields), part.rows)


def parquet_rows(part: Slice) -> int:
    """How many rows a slice holds, from the footer alone."""
    with open_source(part.file, cache="none") as stream:
        metadata = open_parquet(part.file, stream).metadata
        rows = sum(metadata.row_group(number).num_rows for number in range(part.start, part.stop))
    return rows if part.rows is None else min(rows, part.rows)


def open_parquet(file: SourceFile, stream: BinaryIO) -> pq.ParquetFile:
    """The footer, read. Raises SourceCorrupt when there is none."""
    try:
        return pq.ParquetFile(stream, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise _named(file, "its footer", error) from error


def _batches(part: Slice, opened: pq.ParquetFile, fields: Sequence[str]) -> Iterator[pa.RecordBatch]:
    leaves = _leaves(opened.metadata, fields)
    for group in range(part.start, part.stop):
        metadata = opened.metadata.row_group(group)
        size = sum(metadata.column(leaf).total_uncompressed_size for leaf in leaves)
        rows = min(MAX_BATCH_ROWS, max(1, BATCH_BYTES * metadata.num_rows // max(1, size)))
        try:
            yield from opened.iter_batches(rows, row_groups=[group], columns=[*fields] or None, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            where = f"row group {group}, column {', '.join(map(repr, fields)) or 'unknown'}"
            raise _named(part.file, where, error) from error


def _named(file: SourceFile, where: str, error: Exception) -> Exception:
    """The error to raise for `error`: the store's own, or SourceCorrupt when the content is wrong."""
    if not is_decoder_error(error):
        return error
    return SourceCorrupt(
        f"{file.uri}: {where} cannot be read: {error}; the file is cut short or damaged: "
        "fetch it or write it again, or take it out of the blend"
    )


def _column(batch: pa.RecordBatch, text_field: str) -> pa.Array:
    name, *deeper = field_path(text_field)
    column = batch.column(name)
    for key in deeper:
        column = column.flatten()[column.type.get_field_index(key)]  # null where the struct is
    return column


def _texts(column: pa.Array, first: int) -> TextBatch:
    """The texts of a column of any kind of text; nulls and what is not UTF-8 become bad rows."""
    content = column.cast(pa.large_binary())
    try:
        texts = content.cast(pa.large_string())
    except pa.ArrowInvalid:
        return _one_by_one(content, first)
    bad = [_null(first + int(row)) for row in np.flatnonzero(column.is_null())]
    rows = np.arange(first, first + len(texts), dtype=np.int64)
    return TextBatch(texts.drop_null(), rows[np.asarray(column.is_valid())] if bad else rows, bad)


def _one_by_one(content: pa.LargeBinaryArray, first: int) -> TextBatch:
    texts: list[str] = []
    rows: list[int] = []
    bad: list[BadRow] = []
    for row, value in enumerate(content.to_pylist(), first):
        try:
            texts.append(value.decode())
            rows.append(row)
        except AttributeError:
            bad.append(_null(row))
        except UnicodeDecodeError as error:
            bad.append(BadRow(row, "invalid_utf8", str(error), excerpt(value)))
    return TextBatch(pa.array(texts, pa.large_string()), np.array(rows, np.int64), bad)


def _null(row: int) -> BadRow:
    return BadRow(row, "null_text", "the column is null here", "")
