"""Reading a slice as whole records: a dict a row, for what is more than one text, such as conversations.

Rows are found, numbered and judged as they are for texts (`read`); only what is taken from them differs. A row of JSON
is parsed whole, which costs two or three microseconds more than orjson alone, most of them in Python's garbage
collector, which looks at all that is held. Of Parquet only the columns that are asked for are read and spelt out as
Python objects, at about the cost of JSON. Structs spell all of their fields in every row, those that a row does not
have as null: nulls are left out, so that a record is the same whether it was stored as JSON or as Parquet.

The reasons for bad rows are those of `json_rows`, and for Parquet invalid_utf8, unreadable_value and row_too_long.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa

from .exact_json import NumberRangeError, loads
from .files import BadRow, Slice
from .json_rows import Refused, Row, each_row, excerpt, from_row, kind_of
from .parquet import NO_ROWS, column_batches, holds, require_any, row_too_long
from .read import blocks_of_rows

Record = dict[str, Any]

EXCERPTS = Repr()
EXCERPTS.maxlevel, EXCERPTS.maxdict, EXCERPTS.maxlist, EXCERPTS.maxstring = 4, 8, 4, 60


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Some consecutive rows of a slice, as Python objects.

    `records` holds the rows that could be read, `rows` the number in the slice of each (int64, ascending), `bad` the
    rows that could not, and `blank` counts blank lines: `len(records) + len(bad) + blank` rows were consumed. `raw` are
    the bytes of each record's row of JSON, as they stand in the file; of Parquet there are none.
    """

    records: list[Record]
    rows: np.ndarray
    raw: Sequence[bytes] = ()
    bad: list[BadRow] = field(default_factory=list[BadRow])
    blank: int = 0

    @property
    def consumed(self) -> int:
        """How many rows of the slice this batch accounts for."""
        return len(self.records) + len(self.bad) + self.blank


def excerpt_of(record: Mapping[str, Any]) -> str:
    """The beginning of a record, however deep or large it is and whatever values it holds."""
    return excerpt(EXCERPTS.repr(record).encode())


def read_records(part: Slice, fields: Sequence[str]) -> Iterator[RecordBatch]:
    """The rows of a slice, in order, as batches of about a mebibyte (Parquet: four) of records.

    `fields` are the fields that are needed, dots leading into objects; a record may hold others too, and lacks those
    that its row lacks. Of Parquet only these are read (all, where none is named), and fields that are null are left out.

    Raises SourceCorrupt when the file is cut short or damaged, and InputError when a Parquet file has none of `fields`.
    A row that cannot be read is no error: it is in the batch, with its reason.
    """
    return _parquet_records(part, fields) if part.file.format == "parquet" else _json_records(part)


def _json_records(part: Slice) -> Iterator[RecordBatch]:
    first = 0
    for rows in blocks_of_rows(part):
        yield pick_records(rows, first)
        first += len(rows)


def pick_records(rows: Sequence[Row], first: int) -> RecordBatch:
    """The records in `rows`, which are consecutive rows of JSON and numbered from `first`."""
    records = _all_records(rows)
    if records is not None:
        numbers = np.arange(first, first + len(rows), dtype=np.int64)
        return RecordBatch(records, numbers, cast("Sequence[bytes]", rows))
    records, numbers, bad = each_row(rows, _record_of, first)
    raw = [cast("bytes", rows[number - first]) for number in numbers.tolist()]
    return RecordBatch(records, numbers, raw, bad, len(rows) - len(records) - len(bad))


def _all_records(rows: Sequence[Row]) -> list[Record] | None:
    """The records of rows that are all good, otherwise None."""
    try:
        records = [loads(cast("bytes", row)) for row in rows]
    except (orjson.JSONDecodeError, NumberRangeError):
        return None
    return records if all(isinstance(record, dict) for record in records) else None


def _record_of(row: Row) -> Record | Refused | None:
    """The record in one row, why there is none, or None for a blank row."""
    return from_row(row, loads, _object)


def _object(value: object) -> Record | tuple[str, str]:
    if isinstance(value, dict):
        return cast("Record", value)
    return "not_an_object", f"the row is {kind_of(value)}"


def _parquet_records(part: Slice, fields: Sequence[str]) -> Iterator[RecordBatch]:
    first = 0
    for batch in column_batches(part, fields, require_any):
        yield _spelt(batch, first)
        first += len(batch)


def _spelt(batch: pa.RecordBatch, first: int) -> RecordBatch:
    """A batch of columns as records; rows that are too long, or hold what Python cannot spell, become bad rows."""
    if too_long := row_too_long(batch, first):
        return RecordBatch([], NO_ROWS, bad=[too_long])
    try:
        return RecordBatch(_objects(batch), np.arange(first, first + len(batch), dtype=np.int64))
    except (ValueError, OverflowError):  # text that is not UTF-8, or a time outside of what `datetime` knows
        return _one_by_one(batch, first)


def _one_by_one(batch: pa.RecordBatch, first: int) -> RecordBatch:
    records: list[Record] = []
    rows: list[int] = []
    bad: list[BadRow] = []
    for row in range(len(batch)):
        try:
            records += _objects(batch[row : row + 1])
            rows.append(first + row)
        except UnicodeDecodeError as error:
            bad.append(BadRow(first + row, "invalid_utf8", str(error), excerpt(error.object)))
        except (ValueError, OverflowError) as error:
            bad.append(BadRow(first + row, "unreadable_value", str(error), ""))
    return RecordBatch(records, np.array(rows, np.int64), bad=bad)


def _objects(batch: pa.RecordBatch) -> list[Record]:
    """The rows of a batch as Python objects, maps as dicts, without fields that are null."""
    # Asking for dicts makes Arrow five times slower, whether there are maps or not.
    maps = "lossy" if any(holds(kind, pa.types.is_map) for kind in batch.schema.types) else None
    records = batch.to_pylist(maps_as_pydicts=maps)
    _drop_nulls(records)
    return records


def _drop_nulls(value: object) -> None:
    """Remove the fields that are null, at any depth; nulls in lists stay, where each has its place."""
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
        _drop_nulls(inner)
