"""Apache Parquet: only the columns that are asked for, of some row groups, in batches of about 4 MB.

Only the bytes of those columns are fetched, through a buffer, so that memory is bounded by a batch and not by a row
group (which may be a gigabyte). Page checksums are verified where the writer left them.

How much a batch takes cannot be told from the footer: a dictionary spells a gigabyte in a few bytes, and long rows may
follow short ones. So rows are decoded a few at a time, 64 at most and one at first in every row group, fewer the longer
they are, and a batch ends early where it would take more than 64 MB. A file of some kilobytes takes as little memory as
a large one; what bounds it is 64 of the longest rows where they follow short ones, and one page.

Arrow trusts the UTF-8 of a string column without looking, so every batch of texts is cast by way of binary, which
looks (a few GB/s); a batch that fails is gone through row by row. Whatever holds text (string, large_string,
string_view, the same in a dictionary, and binary that is UTF-8) comes out as large_string.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO, Protocol, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.errors import InputError, nearest
from xxhash import xxh3_128

from .files import BadRow, Slice, SourceFile, TextBatch
from .json_lines import MAX_ROW_BYTES
from .json_rows import excerpt
from .leading import leading
from .opening import SourceCorrupt, is_decoder_error, open_source
from .planned import ComparedStream, Ranges, as_planned, is_hashed, require_content
from .text_field import field_path

BATCH_BYTES = 4 << 20
MAX_BATCH_ROWS = 8192

MAX_BATCH_BYTES = 64 << 20
"""What a batch of several rows may decode to. It is far above BATCH_BYTES, so that only files that swell are cut here:
the places where others are cut decide where the row groups of some outputs end."""

PIECE_ROWS = 64
"""Rows that are decoded at a time, at most."""

NO_TEXTS = pa.array([], pa.large_string())
NO_ROWS = np.empty(0, np.int64)

BUFFER_BYTES = 8 << 20

MAGIC = b"PAR1"

ARROW_INDEX_BITS = 32
"""The width of the numbers by which Arrow reads the dictionaries of Parquet; others are converted."""


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


def slice_ranges(part: Slice, metadata: pq.FileMetaData, fields: Sequence[str]) -> Ranges:
    """The places of the bytes of `fields` in the row groups of a slice, in the order in which its content is hashed."""
    groups = row_groups(metadata, fields)[part.start : part.stop]
    return [(offset, offset + length) for group in groups for offset, length in group.ranges]


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
        too_long = row_too_long(batch, first)
        yield TextBatch(NO_TEXTS, NO_ROWS, [too_long]) if too_long else _texts(_column(batch, text_field), first)
        first += len(batch)


def row_too_long(batch: pa.RecordBatch, row: int) -> BadRow | None:
    """The row of a batch, whose number is `row`, as a bad one if it is longer than rows of JSON may be.

    Several rows are never: they are no more than MAX_BATCH_BYTES together.
    """
    size = decoded_bytes(batch)
    if size <= MAX_ROW_BYTES:
        return None
    return BadRow(row, "row_too_long", f"{size:,} bytes; at most {MAX_ROW_BYTES:,} are read", "")


def column_batches(part: Slice, fields: Sequence[str], require: Require) -> Iterator[pa.RecordBatch]:
    """The rows of the row groups `[start, stop)`, in order, with only those of `fields` that the file has; without
    fields, with all columns.

    Raises the InputError of `require`, and SourceCorrupt when the file is damaged.
    """
    with open_source(part.file, cache="none") as stream, as_planned(part, stream) as hasher:
        metadata = _metadata(part.file, stream, fields)
        require(metadata, fields, part.file.uri)
        content = _compared(part, stream, metadata, hasher) if is_hashed(part) else stream
        yield from leading(_batches(part, open_parquet(part.file, content, metadata), fields), part.rows)


def _compared(part: Slice, stream: BinaryIO, metadata: pq.FileMetaData, hasher: xxh3_128) -> BinaryIO:
    """The file, of which only those bytes are read that `hasher` was given, as `content.content_hash` does it."""
    require_any(metadata, part.fields, part.file.uri)
    hasher.update(layout(metadata, part.fields))
    compared = ComparedStream(stream, slice_ranges(part, metadata, part.fields), hasher, part.file.uri)
    require_content(part, hasher)
    return cast("BinaryIO", compared)


def parquet_rows(part: Slice) -> int:
    """How many rows a slice holds, from the footer alone."""
    with open_source(part.file, cache="none") as stream:
        metadata = open_parquet(part.file, stream).metadata
        rows = sum(metadata.row_group(number).num_rows for number in range(part.start, part.stop))
    return rows if part.rows is None else min(rows, part.rows)


def open_parquet(file: SourceFile, stream: BinaryIO, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """The file with its footer, which is read unless it is given. Raises SourceCorrupt when there is none."""
    try:
        return pq.ParquetFile(stream, metadata=metadata, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise _named(file, "its footer", error) from error


def _metadata(file: SourceFile, stream: BinaryIO, fields: Sequence[str]) -> pq.FileMetaData:
    """The footer, by which `fields` can be read row by row."""
    opened = open_parquet(file, stream)
    asked = {field_path(field)[0] for field in fields}
    converted = any(holds(column.type, _is_converted) for column in opened.schema_arrow if column.name in asked)
    return _with_types_of_parquet(stream) if converted else opened.metadata


def _is_converted(kind: pa.DataType) -> bool:
    """Whether Arrow converts a dictionary while it is read: if one text is not UTF-8, all others are refused with it."""
    return pa.types.is_dictionary(kind) and kind.index_type.bit_width != ARROW_INDEX_BITS and _is_text(kind)


def _with_types_of_parquet(stream: BinaryIO) -> pq.FileMetaData:
    """The footer without the Arrow types that its writer added. https://github.com/apache/parquet-format#file-format"""
    size = stream.seek(-8, 2)
    length = int.from_bytes(stream.read(4), "little")
    stream.seek(size - length)
    footer = stream.read(length).replace(b"ARROW:schema", b"arrow:schema")
    return pq.read_metadata(BytesIO(b"".join([MAGIC, footer, length.to_bytes(4, "little"), MAGIC])))


def _batches(part: Slice, opened: pq.ParquetFile, fields: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for group in range(part.start, part.stop):
        try:
            yield from group_batches(opened, group, fields)
        except (pa.ArrowException, OSError) as error:
            where = f"row group {group}, column {', '.join(map(repr, fields)) or 'unknown'}"
            raise _named(part.file, where, error) from error


def group_batches(opened: pq.ParquetFile, group: int, fields: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a row group, in order, in batches of about BATCH_BYTES and never more than MAX_BATCH_BYTES, unless one
    row takes more. Raises what Arrow raises.
    """
    metadata, leaves = opened.metadata.row_group(group), _leaves(opened.metadata, fields)
    size = sum(metadata.column(leaf).total_uncompressed_size for leaf in leaves)
    rows = min(MAX_BATCH_ROWS, max(1, BATCH_BYTES * metadata.num_rows // max(1, size)))
    return _regrouped(_pieces(opened, group, fields, rows), rows)


def _pieces(
    opened: pq.ParquetFile, group: int, fields: Sequence[str], rows: int
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The rows of a row group, a few at a time and never across a multiple of `rows`, and the bytes that they decode to.

    As many are decoded as the last ones let expect to take BATCH_BYTES at most.
    """
    wanted, seen = 1, 0
    for piece in opened.iter_batches(wanted, row_groups=[group], columns=[*fields] or None, use_threads=False):
        size, seen = decoded_bytes(piece), seen + len(piece)
        yield piece, size
        # Every piece comes with a copy of the dictionaries, which takes longer than the rows if these are few.
        most = PIECE_ROWS if _dictionary_bytes(piece) < BATCH_BYTES // PIECE_ROWS else rows
        wanted = max(1, min(2 * wanted, most, BATCH_BYTES * len(piece) // max(1, size)))
        opened.reader.set_batch_size(min(wanted, rows - seen % rows))  # counts from the next piece on


def _dictionary_bytes(batch: pa.RecordBatch) -> int:
    return sum(column.dictionary.nbytes for column in batch.columns if pa.types.is_dictionary(column.type))


def _regrouped(pieces: Iterator[tuple[pa.RecordBatch, int]], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that end at each multiple of `rows`, and before they take more than MAX_BATCH_BYTES."""
    held: list[pa.RecordBatch] = []
    held_bytes = seen = 0
    for piece, size in (portion for pair in pieces for portion in _portions(*pair)):
        if held and held_bytes + size > MAX_BATCH_BYTES:
            yield _joined(held)
            held_bytes = 0
        held.append(piece)
        held_bytes, seen = held_bytes + size, seen + len(piece)
        if seen % rows == 0:
            yield _joined(held)
            held_bytes = 0
    if held:
        yield _joined(held)


def _joined(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of those that are held, which are let go of."""
    batch = pa.concat_batches(held)
    held.clear()
    return batch


def _portions(piece: pa.RecordBatch, size: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """A piece, halved until each part takes MAX_BATCH_BYTES at most or is one row."""
    if size <= MAX_BATCH_BYTES or len(piece) == 1:
        yield piece, size
        return
    half = len(piece) // 2
    for part in (piece[:half], piece[half:]):
        yield from _portions(part, decoded_bytes(part))


def decoded_bytes(batch: pa.RecordBatch) -> int:
    """How many bytes the rows of a batch take when every dictionary is spelled out."""
    return sum(map(_decoded, batch.columns))


def _decoded(array: pa.Array) -> int:
    if not holds(array.type, pa.types.is_dictionary):
        return array.nbytes
    if pa.types.is_struct(array.type):
        return sum(map(_decoded, array.flatten()))
    if pa.types.is_map(array.type):
        return _decoded(array.cast(pa.list_(array.type.field(0))))
    if not pa.types.is_dictionary(array.type):
        return _decoded(array.flatten())  # a kind of list
    if not _is_text(array.type):
        return array.indices.nbytes
    lengths = compute.call_function("binary_length", [array.dictionary])
    return compute.call_function("sum", [lengths.take(array.indices)]).as_py() or 0


def holds(kind: pa.DataType, wanted: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type is one that is wanted, or has one inside."""
    return wanted(kind) or any(holds(kind.field(number).type, wanted) for number in range(kind.num_fields))


def _named(file: SourceFile, where: str, error: Exception) -> Exception:
    """The error to raise for `error`: the store's or the machine's own, or what is wrong with the content."""
    if not is_decoder_error(error):
        return error
    if isinstance(error, pa.ArrowNotImplementedError):
        return InputError(
            f"{file.uri}: {where} cannot be read by Arrow: {error}; write the file again, with rows of less than 2 GiB and "
            "a common compression such as zstd"
        )
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
