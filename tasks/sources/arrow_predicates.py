"""Predicates on whole Arrow tables: checked against a schema, and evaluated with the nulls of SQL.

Arrow's implicit casts are avoided (it compares 64-bit integers with 1.5 as 32-bit floats): integers are compared as int64, and as
doubles where one side has a fraction. Text is compared by code point. A comparison takes 2 to 10 nanoseconds per row.

A row group of Parquet is judged by the statistics in its footer. A test has up to three outcomes there: true, false and null. The
smallest and largest value bound the outcomes of a comparison, the number of nulls shows whether null is one, and `and`, `or` and
`not` combine outcomes. A group is read if true is an outcome. So a group is skipped only if no row of it can be kept; without
statistics, every group is read. Statistics ignore NaN, so a comparison of fractions may also be false. Bounds of long text may be
cut, which only widens them. A row group takes 20 microseconds.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NoReturn, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.blend.predicates import Column, Length, Literal, Operand, Predicate, WithKeys
from tokenmill.tasks.errors import nearest

from .parquet_batches import is_text

COMPARE: dict[str, Callable[[Any, Any], Any]] = {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}

MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}

NO_KEYS: Mapping[str, str | None] = {}

KINDS = ("a boolean", "a number", "text")
BOOLEAN, NUMBER, TEXT = KINDS

Find = Callable[[Column], tuple[compute.Expression, pa.DataType] | None]
"""The values of a field and their type; None if it is missing in every row. Raises InputError for an unknown field."""


def expression(
    predicate: Predicate, schema: pa.Schema, absent: Collection[str] = (), keys: Mapping[str, str | None] = NO_KEYS
) -> compute.Expression:
    """Return a predicate as a boolean Arrow expression over tables of `schema`, null where its value is unknown.

    `absent` names further columns that rows may have; they are null in every row. `keys` are as of WithKeys. Raises InputError for any other
    column and for a comparison of unlike types.
    """

    def find(column: Column) -> tuple[compute.Expression, pa.DataType] | None:
        first, *deeper = column.path
        known = {*schema.names, *absent, *keys}
        if first in keys:
            predicate.refuse(
                column.position, f"field {first!r} is part of the file's path, so it's text without fields"
            )
        if first not in known:
            predicate.refuse(column.position, f"unknown field {first!r}; {nearest(first, known)}")
        if first not in schema.names:  # one that rows may have, and that these haven't
            return None
        kind = schema.field(first).type
        for key in deeper:
            names = [each.name for each in kind] if pa.types.is_struct(kind) else []
            if key not in names:
                has = nearest(key, names) if names else f"it is {named(kind)}"
                predicate.refuse(column.position, f"unknown field {key!r} in {column.name!r}; {has}")
            kind = kind.field(key).type
        return compute.field(*column.path), kind

    return predicate.tree(WithKeys(_Binding(predicate, find), keys))


def expression_of(
    predicate: Predicate, types: Mapping[tuple[str, ...], pa.DataType], keys: Mapping[str, str | None] = NO_KEYS
) -> compute.Expression:
    """Return a predicate over tables whose columns are its fields, in the order of `types`. Raises as `expression`."""
    places = {path: number for number, path in enumerate(types)}
    binding = _Binding(predicate, lambda column: (compute.field(places[column.path]), types[column.path]))
    return predicate.tree(WithKeys(binding, keys))


def masks(table: pa.Table, expressions: Sequence[compute.Expression]) -> list[np.ndarray]:
    """For each expression a mask, bool [rows], of the rows for which it is true; null counts as false."""
    if not expressions:
        return []
    from pyarrow import acero  # imports pandas where that is installed, in 0.2 s, and most blends have no predicate

    names = [str(number) for number in range(len(expressions))]
    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
            acero.Declaration("project", acero.ProjectNodeOptions(list(expressions), names)),
        ]
    )
    found = plan.to_table(use_threads=False)  # with threads, rows may be reordered
    return [column.fill_null(fill_value=False).to_numpy() for column in found.columns]


@dataclass(frozen=True, slots=True)
class _Value:
    """An operand in Arrow; `kind` is one of KINDS, or None for a field that is null in every row."""

    expression: compute.Expression
    kind: str | None
    type: pa.DataType


class _Binding:
    """Turns the tree of a predicate into an expression over the fields that `find` finds."""

    def __init__(self, predicate: Predicate, find: Find) -> None:
        self._predicate, self._find = predicate, find

    def truth(self, operand: Column | Literal) -> compute.Expression:
        value = self._value(operand)
        if value.kind is None:
            return _null()
        if value.kind != BOOLEAN:
            described = self._described(operand, value)
            self._refuse(operand, f"{described}, which is neither true nor false; compare it with a value")
        return _as(value, pa.bool_())

    def compared(self, sign: str, left: Operand, right: Operand) -> compute.Expression:
        one, other = self._value(left), self._value(right)
        if one.kind is None or other.kind is None:
            return _null()
        if one.kind != other.kind:
            both = f"{self._described(left, one)} and {self._described(right, other)}"
            self._refuse(right, f"{both}; compare values of one type")
        if one.kind == BOOLEAN and sign not in {"==", "!="}:
            self._refuse(right, f"{self._described(right, other)}, which isn't ordered; write == or !=")
        wanted = pa.bool_()  # one type for both, because Arrow would choose a different one
        if one.kind == NUMBER:
            types = [each.value_type if pa.types.is_dictionary(each) else each for each in (one.type, other.type)]
            wanted = pa.float64() if any(map(pa.types.is_floating, types)) else pa.int64()
        elif one.kind == TEXT:
            wanted = pa.string() if one.type == other.type == pa.string() else pa.large_string()
        return COMPARE[sign](_as(one, wanted), _as(other, wanted))

    def is_null(self, column: Column) -> compute.Expression:
        found = self._find(column)
        return compute.scalar(value=True) if found is None else found[0].is_null()

    def _value(self, operand: Operand) -> _Value:
        if isinstance(operand, Literal):
            scalar = pa.scalar(operand.value)
            return _Value(compute.scalar(scalar), kind_of(scalar.type), scalar.type)
        column = operand.column if isinstance(operand, Length) else operand
        found = self._find(column)
        if found is None or pa.types.is_null(found[1]):  # writers give a column without values the type null
            return _Value(_null(), None, pa.null())
        value, what = _Value(found[0], kind_of(found[1]), found[1]), f"field {column.name!r} is"
        if isinstance(operand, Length):
            if value.kind != TEXT:
                self._refuse(column, f"{what} {value.kind or named(value.type)}; length() takes text")
            lengths = cast("Any", compute).utf8_length(_as(value, pa.large_string()))
            return _Value(lengths, NUMBER, pa.int64())
        if value.kind is None:
            self._refuse(operand, f"{what} {named(value.type)}, which can only be tested with `is null`")
        return value

    def _described(self, operand: Operand, value: _Value) -> str:
        if isinstance(operand, Literal):
            return f"{json.dumps(operand.value, ensure_ascii=False)} is {value.kind}"
        name = f"length({operand.column.name})" if isinstance(operand, Length) else f"field {operand.name!r}"
        return f"{name} is {value.kind}"

    def _refuse(self, operand: Operand, problem: str) -> NoReturn:
        self._predicate.refuse(operand.position, problem)


def kind_of(kept: pa.DataType) -> str | None:
    """Return how predicates treat values of an Arrow type; None for types that cannot be compared."""
    values = kept.value_type if pa.types.is_dictionary(kept) else kept
    if pa.types.is_boolean(values):
        return BOOLEAN
    if pa.types.is_floating(values) or (pa.types.is_integer(values) and not pa.types.is_uint64(values)):
        return NUMBER
    return TEXT if is_text(values) else None


def named(kept: pa.DataType) -> str:
    """Return an Arrow type, for messages: `a list`, `an object`, or its name."""
    if pa.types.is_nested(kept):
        return "an object" if pa.types.is_struct(kept) or pa.types.is_map(kept) else "a list"
    return str(kept)


def _null() -> compute.Expression:
    """Return the truth of a comparison with a field that is null in every row."""
    return compute.scalar(pa.scalar(None, pa.bool_()))  # not a constant: it imports pandas, in 0.2 s


def _as(value: _Value, wanted: pa.DataType) -> compute.Expression:
    return value.expression if value.type == wanted else value.expression.cast(wanted, safe=False)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes that a test may have in a row group."""

    true: bool = True
    false: bool = True
    null: bool = True

    def __invert__(self) -> "Outcomes":
        return Outcomes(self.false, self.true, self.null)

    def __and__(self, other: "Outcomes") -> "Outcomes":
        """The outcomes of `and`, as in SQL: false with anything is false."""
        null = (self.null and (other.null or other.true)) or (other.null and self.true)
        return Outcomes(self.true and other.true, self.false or other.false, null)

    def __or__(self, other: "Outcomes") -> "Outcomes":
        return ~(~self & ~other)


@dataclass(frozen=True, slots=True)
class RowGroupStatistics:
    """What tests can be in one row group; an Interpretation."""

    group: pq.RowGroupMetaData
    leaves: dict[str, int]
    schema: pa.Schema

    def truth(self, operand: Column | Literal) -> Outcomes:
        return self.compared("==", operand, Literal(value=True, position=operand.position))

    def compared(self, sign: str, left: Operand, right: Operand) -> Outcomes:
        if isinstance(left, Literal) and isinstance(right, Column):  # `3 < x` is `x > 3`
            return self.compared(MIRRORED[sign], right, left)
        if isinstance(right, Literal) and right.value is None:
            return Outcomes(true=False, false=False)
        if isinstance(left, Literal) and isinstance(right, Literal):
            if left.value is None:
                return Outcomes(true=False, false=False)
            found = COMPARE[sign](left.value, right.value)
            return Outcomes(true=found, false=not found, null=False)
        if not isinstance(left, Column) or not isinstance(right, Literal):  # two fields, or a length
            return Outcomes()
        return self._bounded(sign, left, right.value)

    def is_null(self, column: Column) -> Outcomes:
        statistics = self._of(column)
        if statistics is None or not statistics.has_null_count:
            return Outcomes(null=False)
        nulls = statistics.null_count
        return Outcomes(true=nulls > 0, false=nulls < self.group.num_rows, null=False)

    def _bounded(self, sign: str, column: Column, value: Any) -> Outcomes:  # noqa: ANN401 - of any kind
        statistics, kind = self._of(column), type_at(self.schema, column.path)
        # Statistics of unsigned integers and of 16-bit floats aren't understood.
        is_ordered = kind is not None and not (pa.types.is_unsigned_integer(kind) or pa.types.is_float16(kind))
        if statistics is None or kind is None or not is_ordered or kind_of(kind) is None:
            return Outcomes()
        nulls = not statistics.has_null_count or statistics.null_count > 0
        if statistics.has_null_count and statistics.null_count == self.group.num_rows:  # nothing but nulls
            return Outcomes(true=False, false=False)
        if not statistics.has_min_max:
            return Outcomes()
        if kind_of(kind) == TEXT:  # compared as the predicate does: by bytes, whole numbers or doubles
            low, high, value = statistics.min_raw, statistics.max_raw, value.encode()
        else:
            low, high = statistics.min, statistics.max
            if kind_of(kind) == NUMBER and (pa.types.is_floating(kind) or isinstance(value, float)):
                low, high, value = float(low), float(high), float(value)
        if not low <= high:  # NaN
            return Outcomes()
        if sign in {"==", "!="}:
            true, false = low <= value <= high, not low == value == high
        else:
            first, last = (low, high) if sign in {"<", "<="} else (high, low)
            true, false = COMPARE[sign](first, value), not COMPARE[sign](last, value)
        found = Outcomes(true, false or pa.types.is_floating(kind), nulls)  # statistics ignore NaN
        return ~found if sign == "!=" else found

    def _of(self, column: Column) -> Any:  # noqa: ANN401 - Arrow's stubs lack statistics
        leaf = self.leaves.get(column.name)
        return None if leaf is None else self.group.column(leaf).statistics


def type_at(schema: pa.Schema, path: Sequence[str]) -> pa.DataType | None:
    """Return the type of the field that a path leads to, through structs; None if there is none, or several of one name."""
    found: Any = schema
    for key in path:  # get_field_index gives -1 for several fields of one name, too
        number = found.get_field_index(key) if isinstance(found, pa.Schema | pa.StructType) else -1
        if number < 0:
            return None
        found = found.field(number).type
    return found
