"""The inventory of a normalized dataset: fields of the sources, columns of the rows, licenses, counts.

Records are counted by field names and types, which takes half a µs per record and per message. Counts are trees in plain JSON.
Receipts hold them as facts, and they can be added in any order.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pyarrow as pa
from tokenmill.tasks.kit.parts import Table, table_lines
from tokenmill.tasks.sources.exact_json import RepeatedKeys

from .columns import SCHEMA

TYPES: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    RepeatedKeys: "object",
}
"""JSON's names for Python types; types that only Parquet has keep Python's names."""

LENGTHS = {"tokens": "stats_token_len", "completion_tokens": "stats_completion_tokens"}
METADATA = [name for name in SCHEMA.names if name.startswith(("meta_", "source_"))]

MAX_NAMES, MAX_NAME_LENGTH = 500, 100
OTHER = "(other)"  # replaces further names, because some sources use ids or texts as names
Counts = dict[str, Any]  # a tree of counts: nested objects with integers as leaves


@dataclass(frozen=True, slots=True)
class Entry:
    """Counts of one shard: `fields` by `fields_of`, `coverage` by `coverage_of`, `drops` rows by reason."""

    dataset: str
    split: str
    rows_in: int
    rows_out: int
    tokens: int
    drops: Mapping[str, int]
    fields: Counts = field(default_factory=dict[str, Any])
    coverage: Counts = field(default_factory=dict[str, Any])


def fields_of(records: Iterable[Mapping[str, Any]]) -> Counts:
    """Count fields of records by type: `{"records", "fields": {field: {type: count}}}`.

    If `messages` are lists of objects, also `roles` and `message_fields`.
    """
    known = list(records)
    lists = [cast("list[Any]", record["messages"]) for record in known if isinstance(record.get("messages"), list)]
    messages: list[dict[str, Any]] = [message for each in lists for message in each if isinstance(message, dict)]
    found: Counts = {"records": len(known), "fields": _by_field(known)}
    if not messages:
        return found
    roles: list[Any] = [message.get("role") for message in messages]
    named = Counter(role if isinstance(role, str) else OTHER for role in roles)
    return found | {"roles": dict(named), "message_fields": _by_field(messages)}


def _by_field(records: Sequence[Mapping[str, Any]]) -> Counts:
    # Records with the same fields are counted column by column.
    shapes: dict[tuple[str, ...], list[Iterable[Any]]] = {}
    for record in records:
        shapes.setdefault(tuple(record), []).append(record.values())
    fields: dict[str, Counter[str]] = {}
    for names, rows in shapes.items():
        for name, values in zip(names, zip(*rows, strict=True), strict=True):
            for kind, count in Counter(map(type, values)).items():
                fields.setdefault(name, Counter())[TYPES.get(kind) or kind.__name__] += count
    return {name: dict(of) for name, of in fields.items()}


def bounded(counts: Counts) -> Counts:
    """Return the counts with the MAX_NAMES most frequent names per object; other names, and long ones (MAX_NAME_LENGTH), become OTHER."""
    # Long names last: they are others at any frequency. Names break ties, so the order of shards doesn't matter.
    names = sorted(counts, key=lambda name: (len(name) > MAX_NAME_LENGTH, -_total(counts[name]), name))
    kept = [name for name in names[:MAX_NAMES] if len(name) <= MAX_NAME_LENGTH]
    rest: Counts = {}
    for name in names[len(kept) :]:
        rest = merged(rest, {OTHER: counts[name]})
    few = merged({name: counts[name] for name in kept}, rest)
    return {name: bounded(each) if isinstance(each, dict) else each for name, each in few.items()}


def _total(counts: Any) -> int:  # noqa: ANN401 - a tree of counts, or a count
    return sum(map(_total, counts.values())) if isinstance(counts, dict) else counts


def coverage_of(rows: pa.Table) -> Counts:
    """Count values per column and lengths of rows in a table with SCHEMA.

    `{"rows", "columns": {column: count}, "tokens": {"128": count, …}, "completion_tokens": {…}}`: a row of 128 to 255
    tokens counts under "128", one without tokens under "0".
    """
    columns = {name: len(rows) - rows[name].null_count for name in rows.column_names}
    found: Counts = {"rows": len(rows), "columns": columns}
    for name, column in LENGTHS.items():
        # The exponent of a float is the number of bits of an integer, so a bin ends at every power of two.
        _, bits = np.frexp(rows[column].drop_null().to_numpy().astype(np.float64))
        counts = np.bincount(bits.astype(np.int64)).tolist()
        found[name] = {str((1 << bit) >> 1): count for bit, count in enumerate(counts) if count}
    return found


def merged(one: Counts, other: Counts) -> Counts:
    """Return the sum of two trees of counts."""
    total = dict(one)
    for name, value in other.items():
        mine = total.get(name)
        if mine is None:
            total[name] = value
        else:
            total[name] = merged(mine, value) if isinstance(value, dict) else mine + value
    return total


def inventory(entries: Iterable[Entry]) -> dict[str, dict[str, Any]]:
    """Per dataset and split: rows in and out, drops, tokens, fields of the sources, columns and lengths of the rows.

    `metadata` is the share of rows with a value, per metadata column. Names and lengths are in sorted order.
    """
    totals: dict[tuple[str, str], Counts] = {}
    for entry in entries:
        counted = {
            "rows_in": entry.rows_in, "rows_out": entry.rows_out, "tokens": entry.tokens, "drops": dict(entry.drops),
            "source": entry.fields, "coverage": entry.coverage,
        }  # fmt: skip
        place = entry.dataset, entry.split
        totals[place] = merged(totals.get(place, {}), counted)
    found: dict[str, dict[str, Any]] = {}
    for (dataset, split), counted in sorted(totals.items()):
        coverage = counted["coverage"]
        rows, columns = coverage.get("rows", 0), coverage.get("columns", {})
        found.setdefault(dataset, {})[split] = {
            **{name: counted[name] for name in ("rows_in", "rows_out", "tokens")},
            "drops": _sorted(counted["drops"]),
            "source": _sorted(counted["source"]),
            "columns": _sorted(columns),
            "metadata": {name: round(columns[name] / rows, 6) for name in METADATA if columns.get(name)},
            # Names of lengths are numbers: as text, 128 would be before 16.
            "lengths": {name: dict(sorted(coverage.get(name, {}).items(), key=lambda pair: int(pair[0]))) for name in LENGTHS},
        }  # fmt: skip
    return found


def _sorted(counts: Counts) -> Counts:
    return {name: _sorted(each) if isinstance(each, dict) else each for name, each in sorted(counts.items())}


def coverage_markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return an inventory as Markdown: a table of all splits, then details of each."""
    splits = [(dataset, split, summary) for dataset, of in found.items() for split, summary in of.items()]
    rows = [
        (dataset, split, summary["rows_in"], summary["rows_out"], sum(summary["drops"].values()), summary["tokens"])
        for dataset, split, summary in splits
    ]
    lines = ["# Coverage", "", *_table(("dataset", "split", "rows in", "rows out", "dropped", "tokens"), rows)]
    for dataset, split, summary in splits:
        source, lengths = summary["source"], summary["lengths"]
        metadata = [(name, f"{share:.1%}") for name, share in summary["metadata"].items()]
        bounds = sorted({bound for of in lengths.values() for bound in of}, key=int)
        lines += [
            f"## {dataset}, {split}", "",
            *_table(("field of the source", "types"), [(name, _listed(of)) for name, of in source.get("fields", {}).items()]),
            *_table(("field of messages", "types"), [(name, _listed(of)) for name, of in source.get("message_fields", {}).items()]),
            *_table(("role", "messages"), list(source.get("roles", {}).items())),
            *_table(("dropped because", "rows"), list(summary["drops"].items())),
            *_table(("column", "rows that have it"), metadata),
            *_table(("tokens from", "rows", "of the assistant"), [(int(bound), *(of.get(bound, 0) for of in lengths.values())) for bound in bounds]),
        ]  # fmt: skip
    return "\n".join(lines)


def _listed(types: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in types.items())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | int]]) -> list[str]:
    return table_lines(Table("", columns, rows))


UNNAMED = "none named"


def licences_of(rows: pa.Table) -> Counter[str]:
    """Rows by license."""
    return Counter(name or UNNAMED for name in rows["source_license"].to_pylist())
