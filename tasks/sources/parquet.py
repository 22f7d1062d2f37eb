"""Apache Parquet: read only the needed columns of some row groups, in batches of about 4 MB.

Only the bytes of those columns are fetched, through a buffer, so memory is bounded by a batch and not by a row group,
which may be a gigabyte. Page checksums are verified where the writer added them.

Arrow does not check the UTF-8 of string columns, so every batch of texts is cast through binary, which checks it at a few GB/s;
a batch that fails is decoded row by row. Every text type (string, large_string, string_view, dictionaries of these, and
binary that is UTF-8) becomes large_string. Records are Python objects. In Parquet every row has all fields of a struct, null if
absent; nulls are dropped, so that a record from JSON and from Parquet is the same.

With a `where`, row groups are skipped if their statistics exclude every row (`groups_to_read`); rows in other groups are
dropped by whole batches, before any becomes an object.

Reasons for bad rows: null_text, invalid_utf8, unreadable_value and row_too_long.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import BinaryIO, TypeVar, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.predicates import WithKeys, where_of
from tokenmill.tasks.errors import InputError, nearest

from .arrow_predicates import RowGroupStatistics, expression, type_at
from .files import (
    NO_ROWS,
    BadRow,
    Ranges,
    Record,
    RecordBatch,
    Refused,
    Require,
    Slice,
    SourceFile,
    SourceFormat,
    TextBatch,
    field_path,
    leading,
)
from .integrity import VerifiedStream, is_hashed, require_content, verified
from .json_lines import MAX_ROW_BYTES
from .json_rows import each_row
from .opening import SMALL, UNENCRYPTED, SourceCorrupt, is_decoder_error, open_source, require_stored
from .parquet_batches import (
    column_numbers,
    decoded_bytes,
    drop_nulls,
    group_batches,
    holds,
    is_text,
    named,
    only_row,
    python_rows,
    taken,
)
from .row_filter import RowFilter, column_at, filter_of

NULL = ("null_text", "the column is null here")
"""Reason and detail of a null."""

NO_TEXTS = pa.nulls(0, pa.large_string())

BUFFER_BYTES = 8 << 20

MAGIC = b"PAR1"

SIGNATURE_BYTES = 28
"""What follows the footer of a file with encrypted columns. https://github.com/apache/parquet-format/blob/master/Encryption.md"""

ARROW_INDEX_BITS = 32
"""The index width at which Arrow reads dictionaries of Parquet; others are converted."""


class Parquet(SourceFormat):
    """`.parquet`. A slice is a run of row groups."""

    name = "parquet"
    endings = (".parquet",)
    compressible = False
    columnar = True

    def cut(self, file: SourceFile, shard_size: int, fields: Sequence[str], require: Require) -> list[Slice]:
        """See SourceFormat. Raises the InputError of `require`."""
        with open_source(file) as stream:
            metadata = open_parquet(file, stream).metadata
        require(metadata, fields, file.uri)
        slices: list[Slice] = []
        start = size = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            size += sum(group.column(leaf).total_compressed_size for leaf in range(group.num_columns))
            # A row group is never cut, so that a slice is at least one.
            if size >= shard_size or number + 1 == metadata.num_row_groups:
                slices.append(Slice(file, start, number + 1, size=size))
                start, size = number + 1, 0
        return slices

    def owned(self, part: Slice, stream: BinaryIO, fields: Sequence[str]) -> tuple[bytes, Ranges]:
        """Return the bytes of the columns `fields`; before them their names and types, except for a single leaf column.

        With a `where` or keys, of row groups that are not read only the number of rows counts.
        """
        metadata = open_parquet(part.file, stream).metadata
        require_any(metadata, fields, part.file.uri)
        return _owned(metadata, part, fields)

    def rows(self, part: Slice) -> Iterator[pa.RecordBatch | range]:
        return column_batches(part, (), require_any)

    def texts(self, part: Slice, text_field: str) -> Iterator[TextBatch]:
        """See SourceFormat. Raises InputError if the text column doesn't exist."""

        def read(batch: pa.RecordBatch) -> TextBatch:
            column = cast(
                "pa.Array", column_at(batch, column_path(text_field, batch.schema))
            )  # `require_text` has found it
            content = column.cast(pa.large_binary())
            try:
                texts = content.cast(pa.large_string())  # checks the UTF-8
            except pa.ArrowInvalid:
                found, rows, bad = each_row(content.to_pylist(), _text, 0)
                return TextBatch(pa.array(found, pa.large_string()), rows=rows, bad=bad)
            bad = [BadRow(int(row), *NULL, "") for row in np.flatnonzero(column.is_null())]
            rows = np.arange(len(texts))
            return TextBatch(texts.drop_null(), rows=rows[np.asarray(column.is_valid())] if bad else rows, bad=bad)

        return _read(part, [text_field], require_text, partial(TextBatch, NO_TEXTS, rows=NO_ROWS), read)

    def records(self, part: Slice, fields: Sequence[str]) -> Iterator[RecordBatch]:
        """See SourceFormat. Reads only `fields` and drops nulls; raises InputError if the file has none of `fields`."""

        def read(batch: pa.RecordBatch) -> RecordBatch:
            try:
                return RecordBatch(_objects(batch), rows=np.arange(len(batch)))
            except (ValueError, OverflowError):  # text that is not UTF-8, or a time outside the range of `datetime`
                found, rows, bad = each_row(range(len(batch)), lambda row: only_row(batch[row : row + 1], _objects), 0)
                return RecordBatch(found, rows=rows, bad=bad)

        return _read(part, fields, require_any, partial(RecordBatch, [], rows=NO_ROWS), read)

    def count_rows(self, part: Slice, limit: int) -> int:
        """Return the number of rows in the footer, at most `limit`."""
        rows = self._rows_between(part.file, part.start, part.stop)
        return min(limit, rows if part.rows is None else part.rows, rows)

    def first_row(self, part: Slice) -> int:
        return self._rows_between(part.file, 0, part.start)

    def share_read(self, part: Slice) -> float:
        """Return the share of the rows in a slice in row groups that are read."""
        with open_source(part.file, cache="none") as stream:
            metadata = open_parquet(part.file, stream).metadata
        rows = {group: metadata.row_group(group).num_rows for group in range(part.start, part.stop)}
        return sum(rows[group] for group in groups_to_read(metadata, part)) / max(1, sum(rows.values()))

    def _rows_between(self, file: SourceFile, start: int, stop: int) -> int:
        with open_source(file, cache="none") as stream:
            metadata = open_parquet(file, stream).metadata
        return sum(metadata.row_group(number).num_rows for number in range(start, stop))


Batch = TypeVar("Batch", TextBatch, RecordBatch)


def _read(
    part: Slice,
    fields: Sequence[str],
    require: Require,
    empty: Callable[..., Batch],
    read: Callable[[pa.RecordBatch], Batch],
) -> Iterator[Batch]:
    """What `read` makes of the rows in each batch that the slice's filter keeps, numbered in the slice; `empty` makes a batch of none."""
    first, chosen = 0, filter_of(part)
    for batch in column_batches(part, fields, require):
        if isinstance(batch, range):
            yield empty(filtered=len(batch))
        elif (size := decoded_bytes(batch)) > MAX_ROW_BYTES:  # of one row: a batch of several is never that large
            detail = f"{size:,} bytes; at most {MAX_ROW_BYTES:,} are read"
            yield empty(bad=[BadRow(first, "row_too_long", detail, "")])
        else:
            rows = np.flatnonzero(chosen.of_batch(batch)) if chosen else np.arange(len(batch))
            found = read(taken(batch, rows) if chosen else batch)
            bad = [replace(row, row=first + int(rows[row.row])) for row in found.bad]
            yield replace(found, rows=first + rows[found.rows], bad=bad, filtered=len(batch) - len(rows))
        first += len(batch)


def groups_to_read(metadata: pq.FileMetaData, part: Slice) -> Sequence[int]:
    """Return the row groups of a slice in which its filter may keep a row, by its `where` and the keys of its path; all without these."""
    groups = range(part.start, part.stop)
    if not part.where and not part.keys:  # filters by value are judged row by row
        return groups
    schema = metadata.schema.to_arrow_schema()
    chosen = filter_of(part).beside(schema.names)
    if not chosen.keys_wanted():
        return []
    if not part.where:
        return groups
    columns = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    counts = Counter(column.path for column in columns)
    # Statistics of a list's items, or of one of two columns with a path, don't bound a row's value.
    leaves = {
        column.path: number
        for number, column in enumerate(columns)
        if column.max_repetition_level == 0 and counts[column.path] == 1
    }
    tree = where_of(part.where).tree
    found = [RowGroupStatistics(metadata.row_group(group), leaves, schema) for group in groups]
    return [group for group, each in zip(groups, found, strict=True) if tree(WithKeys(each, chosen.keys)).true]


def _owned(metadata: pq.FileMetaData, part: Slice, fields: Sequence[str]) -> tuple[bytes, Ranges]:
    groups, prefix = groups_to_read(metadata, part), layout(metadata, fields)
    if part.where or part.keys:
        counts = [[metadata.row_group(group).num_rows, group in groups] for group in range(part.start, part.stop)]
        prefix += orjson.dumps(counts)
    return prefix, column_ranges(metadata, groups, fields)


def column_ranges(metadata: pq.FileMetaData, groups: Sequence[int], fields: Sequence[str]) -> Ranges:
    """Return the places of the bytes of `fields` in some row groups, in the order in which they are hashed."""
    leaves, ranges = column_numbers(metadata, fields), list[tuple[int, int]]()
    for column in (metadata.row_group(group).column(leaf) for group in groups for leaf in leaves):
        # A column chunk begins with its dictionary page if it has one. https://github.com/apache/parquet-format#file-format
        start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
        ranges.append((start, start + column.total_compressed_size))
    return ranges


def layout(metadata: pq.FileMetaData, fields: Sequence[str]) -> bytes:
    """Name, type and nesting of each leaf column of `fields`, which only the footer holds.

    Empty for a single leaf field, such as a column of text, because its name is enough.
    """
    leaves = [metadata.schema.column(number) for number in column_numbers(metadata, fields)]
    if len(fields) == 1 and {leaf.path for leaf in leaves} == {*fields}:
        return b""
    return orjson.dumps(
        [
            [
                leaf.path,
                leaf.physical_type,
                leaf.logical_type.type,
                leaf.max_definition_level,
                leaf.max_repetition_level,
            ]
            for leaf in leaves
        ]
    )


def require_any(metadata: pq.FileMetaData, fields: Sequence[str], uri: str) -> None:
    """Raises InputError unless at least one of `fields` is a column or a struct field, and each in one column only."""
    columns = metadata.schema.to_arrow_schema().names
    fields = named(columns, fields)
    counts, asked = Counter(columns), [field_path(field)[0] for field in fields] or columns
    twice = next((name for name in asked if counts[name] > 1), None)
    if twice is not None:
        raise InputError(f"{uri}: {counts[twice]} columns are called {twice!r}; {AMBIGUOUS}")
    if not column_numbers(metadata, fields):
        remedy = _note(metadata) or f"name one that it has (columns: {', '.join(columns) or 'none'})"
        shown = ", ".join(map(repr, fields[:MAX_SHOWN])) + (", …" if len(fields) > MAX_SHOWN else "")
        raise InputError(f"{uri}: has none of the fields {shown}; {remedy}")


MAX_SHOWN = 12
"""Fields that an error lists."""

NOTE = "tokenmill.note"
"""The metadata key under which a file's writer states how to treat a missing field."""


def _note(metadata: pq.FileMetaData) -> str:
    return (metadata.metadata or {}).get(NOTE.encode(), b"").decode()


AMBIGUOUS = "it is unclear which is meant: write the file again with distinct names"


def require_text(metadata: pq.FileMetaData, fields: Sequence[str], uri: str) -> None:
    """Raises InputError unless each of `fields` is a column of text, or a field of text inside structs."""
    schema, note = metadata.schema.to_arrow_schema(), _note(metadata)
    for field in fields:
        if note and column_path(field, schema)[0] not in schema.names:
            raise InputError(f"{uri}: text_field {field!r}: the file doesn't have this column; {note}")
        _require_text(schema, field, uri)


def require_filtered(metadata: pq.FileMetaData, chosen: RowFilter, uri: str) -> None:
    """Raises InputError unless a file has the fields of its filter, and values of the types that `where` compares."""
    if not chosen:
        return
    schema = metadata.schema.to_arrow_schema()
    keys = chosen.beside(schema.names).keys
    for field in chosen.wanted:
        if field not in keys and field_path(field)[0] not in schema.names:
            raise InputError(f"{uri}: filters: unknown field {field!r}; {nearest(field, [*schema.names, *keys])}")
    if chosen.where:
        try:
            expression(where_of(chosen.where), schema, keys=keys)
        except InputError as error:
            raise InputError(f"{uri}: {error} (columns: {', '.join(schema.names)})") from error


@dataclass(frozen=True, slots=True)
class Needed:
    """Require `fields` as `require` does, and the fields that a filter needs; a Require."""

    require: Require
    fields: Sequence[str]
    chosen: RowFilter

    @property
    def __name__(self) -> str:
        above = f":{self.chosen.above}" if self.chosen.above else ""
        return f"{self.require.__name__}:{self.chosen.describe()}{above}"

    def __call__(self, metadata: pq.FileMetaData, fields: Sequence[str], uri: str) -> None:  # noqa: ARG002 - with the filter's
        self.require(metadata, self.fields, uri)
        require_filtered(metadata, self.chosen.in_file(uri), uri)


def _require_text(schema: pa.Schema, text_field: str, uri: str) -> None:
    fields: list[pa.Field] = [*schema]
    place = "the file"
    found: pa.DataType = pa.null()
    for key in column_path(text_field, schema):
        types = [each.type for each in fields if each.name == key]
        if len(types) != 1:
            names = [each.name for each in fields]
            problem = f"{len(types)} columns {key!r}" if types else f"no column {key!r}"
            dotted = [name for name in (*names, *schema.names) if "." in name and f".{name}." in f".{text_field}."]
            if types:
                remedy = AMBIGUOUS
            elif dotted:
                remedy = (
                    f"a dot means a struct field: rename column {dotted[0]!r} without dots, and write the file again"
                )
            else:
                remedy = nearest(key, names)
            columns = ", ".join(names) or "none"
            raise InputError(f"{uri}: text_field {text_field!r}: {place} has {problem}; {remedy} (columns: {columns})")
        found = types[0]
        place = f"column {key!r}"
        fields = [*found] if pa.types.is_struct(found) else []
    if not is_text(found) and not pa.types.is_null(found):
        columns = ", ".join(f"{each.name}: {each.type}" for each in schema)
        raise InputError(
            f"{uri}: text_field {text_field!r} is of type {found}, not text; name a column of text ({columns})"
        )


def column_batches(part: Slice, fields: Sequence[str], require: Require) -> Iterator[pa.RecordBatch | range]:
    """Yield the rows of a slice, in order, with the `fields` that the file has, and the filter's fields; without fields, all columns.

    A `range` represents the rows of a row group that isn't read. Raises the InputError of `require` and of
    `require_filtered`, and SourceCorrupt if the file is damaged.
    """
    chosen = filter_of(part)
    read = chosen.read_with(fields)
    with open_source(part.file, cache=SMALL) as stream, verified(part, stream) as hasher:
        # The footer is read first, so that a wrong file is named before any content is.
        metadata = _metadata(part.file, stream, read)
        require(metadata, fields, part.file.uri)
        require_filtered(metadata, chosen, part.file.uri)
        content = stream
        if is_hashed(part):
            require_any(metadata, part.fields, part.file.uri)
            prefix, ranges = _owned(metadata, part, part.fields)
            hasher.update(prefix)
            content = cast("BinaryIO", VerifiedStream(stream, ranges, hasher, part.file.uri))
            require_content(part, hasher)
        opened = open_parquet(part.file, content, metadata)
        yield from leading(_batches(part, opened, named(opened.schema_arrow.names, read)), part.rows)


def open_parquet(file: SourceFile, stream: BinaryIO, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Return the file with its footer, which is read unless it is given. Raises SourceCorrupt if there is none."""
    try:
        opened = pq.ParquetFile(stream, metadata=metadata, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        if is_decoder_error(error):
            require_stored(file, stream, "Parquet")
        raise _explained(file, "its footer", error) from error
    # Arrow ends the process at the first look at an encrypted column.
    if metadata is None and _footer_bytes(stream) - opened.metadata.serialized_size == SIGNATURE_BYTES:
        raise InputError(f"{file.uri}: holds encrypted columns; {UNENCRYPTED}")
    return opened


def _footer_bytes(stream: BinaryIO) -> int:
    stream.seek(-8, 2)
    return int.from_bytes(stream.read(4), "little")


def _metadata(file: SourceFile, stream: BinaryIO, fields: Sequence[str]) -> pq.FileMetaData:
    """The footer, adapted so that `fields` can be read row by row."""
    opened = open_parquet(file, stream)
    asked = {name for field in named(opened.schema_arrow.names, fields) for name in (field, field_path(field)[0])}

    def is_converted(kind: pa.DataType) -> bool:
        return pa.types.is_dictionary(kind) and kind.index_type.bit_width != ARROW_INDEX_BITS and is_text(kind)

    if not any(holds(column.type, is_converted) for column in opened.schema_arrow if column.name in asked):
        return opened.metadata
    # Arrow would convert the dictionary while reading, and one text that is not UTF-8 would make the whole batch fail. So the footer
    # is read without the Arrow types that its writer added. https://github.com/apache/parquet-format#file-format
    length = _footer_bytes(stream)
    stream.seek(-8 - length, 2)
    footer = stream.read(length).replace(b"ARROW:schema", b"arrow:schema")
    return pq.read_metadata(BytesIO(b"".join([MAGIC, footer, length.to_bytes(4, "little"), MAGIC])))


def _batches(part: Slice, opened: pq.ParquetFile, fields: Sequence[str]) -> Iterator[pa.RecordBatch | range]:
    wanted = {*groups_to_read(opened.metadata, part)}
    for group in range(part.start, part.stop):
        if group not in wanted:
            yield range(opened.metadata.row_group(group).num_rows)
            continue
        try:
            yield from group_batches(opened, group, fields)
        except (pa.ArrowException, OSError) as error:
            where = f"row group {group}, column {', '.join(map(repr, fields)) or 'unknown'}"
            raise _explained(part.file, where, error) from error


def _explained(file: SourceFile, where: str, error: Exception) -> Exception:
    """The error to raise for `error`: itself if the store or the machine failed, else an error about the content."""
    if not is_decoder_error(error):
        return error
    if isinstance(error, pa.ArrowNotImplementedError):
        return InputError(
            f"{file.uri}: {where} cannot be read by Arrow: {error}; write the file again, with rows smaller than 2 GiB and "
            "a common compression such as zstd"
        )
    return SourceCorrupt(
        f"{file.uri}: {where} cannot be read: {' '.join(str(error).split())}; the file is truncated or damaged: "
        "fetch it or write it again, or remove it from the blend"
    )


def column_path(field: str, schema: pa.Schema) -> list[str]:
    """Return the column of a field and the fields of structs that lead to it, or else the column with dots in its name."""
    path = field_path(field)
    return [field] if type_at(schema, path) is None and field in schema.names else path


def _text(value: bytes | None) -> str | Refused:
    try:
        return Refused(*NULL, b"") if value is None else value.decode()
    except UnicodeDecodeError as error:
        return Refused("invalid_utf8", str(error), error.object)


def _objects(batch: pa.RecordBatch) -> list[Record]:
    records = python_rows(batch)
    drop_nulls(records)
    return records
