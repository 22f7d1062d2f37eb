"""Decoding row groups of Parquet in batches of about 4 MB, in bounded memory.

The footer does not show how much memory a batch takes: a dictionary may expand a few bytes into a gigabyte, and long rows may
follow short ones. So rows are decoded a few at a time: one at first in every row group, then up to 64, fewer if rows are long.
A batch ends early if it would exceed 64 MB. So memory does not depend on the size of the file. Beyond a batch, the bound is one
page, plus 64 of the longest rows if they follow short ones.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute

from .files import Record, Refused

Read = TypeVar("Read")

BATCH_BYTES = 4 << 20
MAX_BATCH_ROWS = 8192

MAX_BATCH_BYTES = 64 << 20
"""The most that a batch of several rows decodes to. Far above BATCH_BYTES, so that only files with huge rows are cut
here: batches decide where the row groups of some outputs end."""

PIECE_ROWS = 64
"""The most rows to decode at a time."""


def named(columns: Sequence[str], fields: Sequence[str]) -> list[str]:
    """`fields`, and in place of a pattern (a regular expression between slashes) the columns whose whole names match it."""
    found: list[str] = []
    for field in fields:
        pattern = field[1:-1] if field.startswith("/") and field.endswith("/") else None
        found += [field] if pattern is None else [name for name in columns if re.fullmatch(pattern, name)]
    return list(dict.fromkeys(found))


def column_numbers(metadata: pq.FileMetaData, fields: Sequence[str]) -> list[int]:
    """Return the leaf columns named in `fields` or, without a match, below them; without fields, all columns."""
    if not fields:
        return list(range(metadata.num_columns))
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    found: set[int] = set()
    for field in named([path.partition(".")[0] for path in paths], fields):
        exact = [number for number, path in enumerate(paths) if path == field]
        found.update(exact or (number for number, path in enumerate(paths) if path.startswith(f"{field}.")))
    return sorted(found)


def group_batches(opened: pq.ParquetFile, group: int, fields: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Return the rows of a row group, in order, in batches of about BATCH_BYTES and at most MAX_BATCH_BYTES, except a single row.

    Raises Arrow's errors.
    """
    metadata, leaves = opened.metadata.row_group(group), column_numbers(opened.metadata, fields)
    size = sum(metadata.column(leaf).total_uncompressed_size for leaf in leaves)
    # By the footer alone, so that batches end at the same rows however they are decoded.
    rows = min(MAX_BATCH_ROWS, max(1, BATCH_BYTES * metadata.num_rows // max(1, size)))
    return _regrouped(_pieces(opened, group, fields, rows), rows)


def _pieces(
    opened: pq.ParquetFile, group: int, fields: Sequence[str], rows: int
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The rows of a row group, a few at a time and never across a multiple of `rows`, and their decoded bytes.

    The sizes of the last rows decide how many are decoded next, to remain below BATCH_BYTES.
    """
    wanted, seen = 1, 0
    expands = any(holds(kind, pa.types.is_dictionary) for kind in opened.schema_arrow.types)
    for piece in opened.iter_batches(wanted, row_groups=[group], columns=[*fields] or None, use_threads=False):
        size, seen = decoded_bytes(piece) if expands else piece.nbytes, seen + len(piece)
        yield piece, size
        # Every piece copies the dictionaries, which takes longer than decoding a few rows.
        shared = sum(column.dictionary.nbytes for column in piece.columns if pa.types.is_dictionary(column.type))
        most = rows if shared >= BATCH_BYTES // PIECE_ROWS else PIECE_ROWS
        wanted = max(1, min(2 * wanted, most, BATCH_BYTES * len(piece) // max(1, size)))
        opened.reader.set_batch_size(min(wanted, rows - seen % rows))  # takes effect with the next piece


def _regrouped(pieces: Iterator[tuple[pa.RecordBatch, int]], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that end at each multiple of `rows`, and before they exceed MAX_BATCH_BYTES."""
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


def taken(batch: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
    """Some rows of a batch, int64, ascending. Arrow cannot take views of text, so their runs are joined."""

    def is_view(kind: pa.DataType) -> bool:
        return pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)

    if not any(holds(kind, is_view) for kind in batch.schema.types):
        return batch.take(pa.array(rows))
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return pa.concat_batches([batch[run[0] : run[-1] + 1] for run in runs if run.size] or [batch[:0]])


def _joined(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The held batches as one; releases them."""
    batch = pa.concat_batches(held)
    held.clear()
    return batch


def _portions(piece: pa.RecordBatch, size: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """A piece, halved until each part takes at most MAX_BATCH_BYTES or is one row."""
    if size <= MAX_BATCH_BYTES or len(piece) == 1:
        yield piece, size
        return
    half = len(piece) // 2  # its rows differ in length, so that a size for each half must be found anew
    for part in (piece[:half], piece[half:]):
        yield from _portions(part, decoded_bytes(part))


def decoded_bytes(batch: pa.RecordBatch) -> int:
    """Return the size of a batch with every dictionary expanded."""
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
    if not is_text(array.type):
        return array.indices.nbytes
    lengths = compute.call_function("binary_length", [array.dictionary])
    return compute.call_function("sum", [lengths.take(array.indices)]).as_py() or 0


def holds(kind: pa.DataType, wanted: Callable[[pa.DataType], bool]) -> bool:
    """Return whether a type or one nested in it is wanted."""
    return wanted(kind) or any(holds(kind.field(number).type, wanted) for number in range(kind.num_fields))


def is_text(found: pa.DataType) -> bool:
    """Return whether a type holds text: strings, binary (which may be UTF-8), or a dictionary of these."""
    kind = found.value_type if pa.types.is_dictionary(found) else found
    return kind in {pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()}


def python_rows(batch: pa.RecordBatch) -> list[Record]:
    """Return the rows of a batch as Python objects, maps as dicts."""
    # Asking for dicts makes Arrow five times slower, whether there are maps or not.
    maps = "lossy" if any(holds(kind, pa.types.is_map) for kind in batch.schema.types) else None
    return batch.to_pylist(maps_as_pydicts=maps)


def only_row(row: pa.RecordBatch, read: Callable[[pa.RecordBatch], Sequence[Read]]) -> Read | Refused:
    """Return what `read` makes of a batch of one row, or why Python can't represent the row."""
    try:
        return read(row)[0]
    except UnicodeDecodeError as error:
        return Refused("invalid_utf8", str(error), error.object)
    except (ValueError, OverflowError) as error:
        return Refused("unreadable_value", str(error), b"")


def drop_nulls(value: object) -> None:
    """Remove fields that are null, at any depth; nulls in lists remain, to keep positions."""
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        for name in [name for name, inner in fields.items() if inner is None]:
            del fields[name]
        values = fields.values()
    elif isinstance(value, list):
        values = cast("list[object]", value)
    else:
        return
    for inner in values:
        drop_nulls(inner)
