"""Which row groups of a Parquet file can hold a row that a predicate keeps, by the statistics in its footer.

A test has up to three outcomes in a row group: true, false and null. The smallest and largest value bound the outcomes of a
comparison, the number of nulls tells whether null is one, and `and`, `or` and `not` combine outcomes. A group is read if true is an
outcome. So a group is left out only if no row of it can be kept; without statistics, every group is read.

Statistics leave out NaN, so a comparison of fractions may also be false. Bounds of long text may be cut, which only widens them. A
row group takes some 20 microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.predicates import Column, Literal, Operand, WithKeys, where_of

from .arrow_predicates import COMPARE, NUMBER, TEXT, kind_of
from .files import Slice
from .row_filter import filter_of

MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes that a test may have in a row group."""

    true: bool = True
    false: bool = True
    null: bool = True

    def __invert__(self) -> "Outcomes":
        """The outcomes of `not`."""
        return Outcomes(self.false, self.true, self.null)

    def __and__(self, other: "Outcomes") -> "Outcomes":
        """The outcomes of `and`, as in SQL: false with anything is false."""
        null = (self.null and (other.null or other.true)) or (other.null and self.true)
        return Outcomes(self.true and other.true, self.false or other.false, null)

    def __or__(self, other: "Outcomes") -> "Outcomes":
        """The outcomes of `or`."""
        return ~(~self & ~other)


def groups_to_read(metadata: pq.FileMetaData, part: Slice) -> Sequence[int]:
    """The row groups of a slice in which its filter may keep a row, by its `where` and the keys of its path; all without these."""
    groups = range(part.start, part.stop)
    if not part.where and not part.keys:
        return groups
    schema = metadata.schema.to_arrow_schema()
    chosen = filter_of(part).beside(schema.names)
    if not chosen.keys_wanted():
        return []
    if not part.where:
        return groups
    tree, leaves = where_of(part.where).tree, _flat_leaves(metadata)
    found = [_Statistics(metadata.row_group(group), leaves, schema) for group in groups]
    return [group for group, each in zip(groups, found, strict=True) if tree(WithKeys(each, chosen.keys)).true]


def _flat_leaves(metadata: pq.FileMetaData) -> dict[str, int]:
    """The numbers of the leaf columns outside lists, by path; without paths that two columns have."""
    columns = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    paths = [column.path for column in columns]
    return {
        column.path: number
        for number, column in enumerate(columns)
        if column.max_repetition_level == 0 and paths.count(column.path) == 1
    }


@dataclass(frozen=True, slots=True)
class _Statistics:
    """What tests can be in one row group; an Interpretation."""

    group: pq.RowGroupMetaData
    leaves: dict[str, int]
    schema: pa.Schema

    def truth(self, operand: Column | Literal) -> Outcomes:
        return self.compared("==", operand, Literal(value=True, position=operand.position))

    def compared(self, sign: str, left: Operand, right: Operand) -> Outcomes:
        if isinstance(left, Literal) and isinstance(right, Column):
            return self.compared(MIRRORED[sign], right, left)
        if isinstance(right, Literal) and right.value is None:
            return Outcomes(true=False, false=False)
        if isinstance(left, Literal) and isinstance(right, Literal):
            if left.value is None:
                return Outcomes(true=False, false=False)
            found = COMPARE[sign](left.value, right.value)
            return Outcomes(true=found, false=not found, null=False)
        if not isinstance(left, Column) or not isinstance(right, Literal):
            return Outcomes()
        return self._bounded(sign, left, right.value)

    def is_null(self, column: Column) -> Outcomes:
        statistics = self._of(column)
        if statistics is None or not statistics.has_null_count:
            return Outcomes(null=False)
        nulls = statistics.null_count
        return Outcomes(true=nulls > 0, false=nulls < self.group.num_rows, null=False)

    def _bounded(self, sign: str, column: Column, value: Any) -> Outcomes:  # noqa: ANN401 - of any kind
        """The outcomes of a comparison with a literal."""
        statistics, kind = self._of(column), self._type(column)
        if statistics is None or kind is None:
            return Outcomes()
        nulls = not statistics.has_null_count or statistics.null_count > 0
        if statistics.has_null_count and statistics.null_count == self.group.num_rows:
            return Outcomes(true=False, false=False)
        if not statistics.has_min_max:
            return Outcomes()
        low, high, value = _comparable(statistics, kind, value)
        if not low <= high:  # NaN
            return Outcomes()
        can = _compared_with_range("==" if sign == "!=" else sign, low, high, value)
        may_be_nan = pa.types.is_floating(kind)
        found = Outcomes(can.true, can.false or may_be_nan, nulls)
        return ~found if sign == "!=" else found

    def _of(self, column: Column) -> Any:  # noqa: ANN401 - Arrow's stubs lack statistics
        leaf = self.leaves.get(column.name)
        return None if leaf is None else self.group.column(leaf).statistics

    def _type(self, column: Column) -> pa.DataType | None:
        """The type of a field whose statistics are understood, otherwise None."""
        found: Any = self.schema
        for key in column.path:
            index = found.get_field_index(key) if isinstance(found, pa.Schema | pa.StructType) else -1
            if index < 0:
                return None
            found = found.field(index).type
        strange = pa.types.is_unsigned_integer(found) or pa.types.is_float16(found)
        return None if strange or kind_of(found) is None else found


def _comparable(statistics: Any, kind: pa.DataType, value: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401 - of any kind
    """Bounds and a literal as the values that the predicate compares: bytes of text, whole numbers, or doubles."""
    if kind_of(kind) == TEXT:
        return statistics.min_raw, statistics.max_raw, value.encode()
    low, high = statistics.min, statistics.max
    if kind_of(kind) == NUMBER and (pa.types.is_floating(kind) or isinstance(value, float)):
        return float(low), float(high), float(value)
    return low, high, value


def _compared_with_range(sign: str, low: Any, high: Any, value: Any) -> Outcomes:  # noqa: ANN401 - of any kind
    """Whether values in `[low, high]` can compare as true, and as false."""
    if sign == "==":
        return Outcomes(true=low <= value <= high, false=not low == value == high)
    first, last = (low, high) if sign in {"<", "<="} else (high, low)
    return Outcomes(true=COMPARE[sign](first, value), false=not COMPARE[sign](last, value))
