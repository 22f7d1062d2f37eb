"""Which rows of a data set are kept: `filters` by value, and the predicate `where`.

Both drop rows before anything else looks at them, so a dropped row may lack its text. Of Parquet, whole batches are judged by Arrow.
JSON has no columns: a row is judged by the types of its own values. A batch of JSON becomes an Arrow table of the fields that the
predicate names; rows whose values differ in type are judged in groups. So a row has the same fate in any batch and any format.

A row of JSON whose values cannot be compared, such as a text with a number, is a bad row: `not_comparable`. Whole numbers outside 64
bits are compared as doubles. A predicate on one field costs 0.2 microseconds per row of JSON, values to filter by two.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, cast

import numpy as np
import pyarrow as pa
from tokenmill.tasks.blend.models import DataSource, Value
from tokenmill.tasks.blend.predicates import where_of
from tokenmill.tasks.errors import InputError

from .arrow_predicates import expression, expression_of, masks
from .exact_json import RepeatedKeys, SpelledFloat
from .files import Record, Slice, field_path
from .parquet_batches import is_text

USED_IN = "used_in"
OUTSIDE = "outside 64 bits"

KINDS: Mapping[type, type] = {SpelledFloat: float, RepeatedKeys: dict}
"""Types that count as another."""

TYPES: Mapping[Any, pa.DataType] = {
    NoneType: pa.null(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), OUTSIDE: pa.float64(),
    str: pa.large_string(), list: pa.list_(pa.null()), dict: pa.struct([]),
}  # fmt: skip

Judged = tuple[np.ndarray, Mapping[int, str]]
"""A mask, bool [rows], of the rows that are kept, and why rows cannot be judged, by number."""


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Keeps the rows in which every field of `wanted` has one of its wanted values, and for which `where` is true.

    Dots in field names separate nested keys. A field matches a value if it equals it, is a list that contains it, or is
    comma-separated text that contains it. Types matter: `true` is not 1, and "1" is not 1.
    """

    wanted: dict[str, list[Value]]
    where: str = ""

    def __bool__(self) -> bool:
        """Whether it may drop a row."""
        return bool(self.wanted or self.where)

    @property
    def fields(self) -> list[str]:
        """The fields that the filter reads."""
        where = [".".join(path) for path in where_of(self.where).paths] if self.where else []
        return list(dict.fromkeys([*self.wanted, *where]))

    def read_with(self, fields: Sequence[str]) -> list[str]:
        """The fields to read for `fields` of the rows that are kept; none means all fields."""
        return list(dict.fromkeys([*fields, *self.fields])) if fields else []

    def describe(self) -> str:
        """The filter in words, for people."""
        values = [f"{field} is one of {list(wanted)}" for field, wanted in self.wanted.items()]
        return " and ".join([*values, *([self.where] if self.where else [])])

    def keeps(self, record: Mapping[str, Any]) -> bool:
        """Whether a record has the wanted values."""
        return all(_has_one(value_at(record, field_path(field)), values) for field, values in self.wanted.items())

    def of_records(self, records: Sequence[Record]) -> Judged:
        """Judge records."""
        kept = np.fromiter(map(self.keeps, records), np.bool_, len(records))
        if not self.where:
            return kept, {}
        true, problems = _judged(self.where, records)
        return kept & true, {row: why for row, why in problems.items() if kept[row]}

    def of_batch(self, batch: pa.RecordBatch) -> np.ndarray:
        """A mask, bool [rows], of the rows of an Arrow batch that are kept. Raises InputError for an unknown field."""
        kept = np.ones(len(batch), np.bool_)
        for field, values in self.wanted.items():
            kept &= _matches(column_at(batch, field_path(field)), values)
        if self.where:
            table = pa.Table.from_batches([batch])
            kept &= masks(table, [expression(where_of(self.where), batch.schema)])[0]
        return kept


def row_filter(source: DataSource) -> RowFilter:
    """The filter of a data set: its `filters`, `used_in` on the field of that name, and `where`.

    It is part of a shard's identity, so it is normalized: values are sorted and deduplicated.
    """
    asked = source.filters if source.used_in is None else {**source.filters, USED_IN: source.used_in}
    return RowFilter({field: _normalized(wanted) for field, wanted in sorted(asked.items())}, source.where or "")


def _normalized(wanted: Value | list[Value]) -> list[Value]:
    values = wanted if isinstance(wanted, list) else [wanted]
    return [value for _, value in sorted({(type(value).__name__, value) for value in values})]


def filter_of(part: Slice) -> RowFilter:
    """The filter of the rows of a slice."""
    return RowFilter(part.filters, part.where)


def value_at(record: Mapping[str, Any], path: Sequence[str]) -> object:
    """The value at a path in a record, None where there is none."""
    found: object = record
    for key in path:
        found = cast("Mapping[str, object]", found).get(key) if isinstance(found, Mapping) else None
    return found


def _has_one(found: object, values: Sequence[Value]) -> bool:
    members = cast("list[object]", found) if isinstance(found, list) else [found]
    if isinstance(found, str):
        members = [found, *(member.strip() for member in found.split(","))]
    return any(_same(member, value) for member in members for value in values)


def _same(found: object, value: Value) -> bool:
    return found == value and isinstance(found, bool) == isinstance(value, bool)


def _judged(where: str, records: Sequence[Record]) -> Judged:
    """The records for which a predicate is true."""
    columns = [[value_at(record, path) for record in records] for path in where_of(where).paths]
    kinds = [{KINDS.get(kind, kind) for kind in set(map(type, column))} - {NoneType} for column in columns]
    if all(len(each) <= 1 for each in kinds):
        try:
            return _true(where, columns, [next(iter(each), NoneType) for each in kinds], len(records)), {}
        except (InputError, OverflowError):  # of a type that cannot be compared, or outside 64 bits
            pass
    return _judged_by_type(where, columns, len(records))


def _judged_by_type(where: str, columns: Sequence[Sequence[object]], rows: int) -> Judged:
    """The same for rows of different types, in groups of the same."""
    groups: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row in range(rows):
        groups[tuple(_kind(column[row]) for column in columns)].append(row)
    true, problems = np.zeros(rows, np.bool_), dict[int, str]()
    for kinds, members in groups.items():
        try:
            true[members] = _true(where, [[column[row] for row in members] for column in columns], kinds, len(members))
        except InputError as error:
            problems |= dict.fromkeys(members, str(error))
    return true, problems


def _kind(value: object) -> Any:  # noqa: ANN401 - a key of TYPES
    if type(value) is int and not -(2**63) <= value < 2**63:
        return OUTSIDE
    return KINDS.get(type(value), type(value))


def _true(where: str, columns: Sequence[Sequence[object]], kinds: Sequence[Any], rows: int) -> np.ndarray:
    """The rows for which a predicate is true, given the values of its fields, of one kind each, and null."""
    paths = where_of(where).paths
    types = {path: TYPES[kind] for path, kind in zip(paths, kinds, strict=True)}
    found = expression_of(where_of(where), types)
    arrays = [pa.array(_plain(column, kind), TYPES[kind]) for column, kind in zip(columns, kinds, strict=True)]
    table = pa.table([*arrays, pa.nulls(rows)], names=[str(number) for number in range(len(arrays) + 1)])
    return masks(table, [found])[0]


def _plain(column: Sequence[Any], kind: Any) -> Sequence[object]:  # noqa: ANN401 - a key of TYPES
    if kind is list or kind is dict:
        return [None if value is None else kind() for value in column]
    return [_double(value) for value in column] if kind is OUTSIDE else column


def _double(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def column_at(batch: pa.RecordBatch, path: Sequence[str]) -> pa.Array | None:
    """The column at `path`, null where a struct above it is; None if there is none."""
    name, *deeper = path
    if name not in batch.schema.names:
        return None
    column: Any = batch.column(name)
    for key in deeper:
        number = column.type.get_field_index(key) if pa.types.is_struct(column.type) else -1
        if number < 0:
            return None
        column = column.flatten()[number]
    return column


def _matches(column: pa.Array | None, values: Sequence[Value]) -> np.ndarray | bool:
    """The rows of a column that have one of the wanted values; distinct values are compared once."""
    if column is None:
        return False
    if pa.types.is_nested(column.type):
        return np.fromiter((_has_one(value, values) for value in column.to_pylist()), np.bool_, len(column))
    # Text as bytes, because Arrow does not check that it is UTF-8.
    plain: Any = column.cast(pa.large_binary()) if is_text(column.type) else column
    encoded = plain if pa.types.is_dictionary(plain.type) else plain.dictionary_encode()
    hits = np.array([*(_has_one(_as_text(value), values) for value in encoded.dictionary.to_pylist()), False])
    return hits[encoded.indices.fill_null(len(hits) - 1).to_numpy(zero_copy_only=False)]


def _as_text(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
