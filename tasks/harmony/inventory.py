"""What sources hold and what became of it: the fields of their records, and how many rows have which column.

Records are counted by shape, their names and types as one key, which takes 1 µs for a record and 1 µs for each of its
messages; few shapes make up a source, and only shapes are taken apart into fields. Tables are counted in Arrow.
Both are trees of counts in plain JSON: they travel in the facts of receipts and are added up in any order.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
from tokenmill.tasks.sources.exact_json import RepeatedKeys, SpelledFloat

from .columns import SCHEMA

TYPES: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    SpelledFloat: "number",
    RepeatedKeys: "object",
}
"""How JSON calls what Python reads; what only Parquet has keeps Python's name."""

LENGTHS = {"tokens": "stats_token_len", "completion_tokens": "stats_completion_tokens"}
METADATA = [name for name in SCHEMA.names if name.startswith(("meta_", "source_"))]

MOST_NAMES, LONGEST_NAME = 500, 100
OTHER = "(other)"
"""Stands for the other names where there are very many, because some sources have ids or texts for names."""

Counts = dict[str, Any]
"""A tree of counts: objects of objects, and whole numbers at the ends."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one shard counted: `fields` by `fields_of`, `coverage` by `coverage_of`, `drops` rows by reason."""

    dataset: str
    split: str
    rows_in: int
    rows_out: int
    tokens: int
    drops: Mapping[str, int]
    fields: Counts = field(default_factory=dict[str, Any])
    coverage: Counts = field(default_factory=dict[str, Any])


def fields_of(records: Iterable[Mapping[str, Any]]) -> Counts:
    """How many records have which field in which type: `{"records", "fields": {field: {type: count}}}`.

    Where `messages` is a list of objects, `roles` counts what they say under `role`, and `message_fields` their fields.
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
    types = map(tuple, map(partial(map, type), (record.values() for record in records)))
    shapes = Counter(zip(map(tuple, records), types, strict=True))
    fields: dict[str, Counter[str]] = {}
    for (names, kinds), count in shapes.items():
        for name, kind in zip(names, kinds, strict=True):
            fields.setdefault(name, Counter())[TYPES.get(kind) or kind.__name__] += count
    return {name: dict(of) for name, of in fields.items()}


def bounded(counts: Counts) -> Counts:
    """The same with at most MOST_NAMES names in an object, the most frequent, and all others together as OTHER.

    Names that are texts rather (longer than LONGEST_NAME) are among the others.
    """
    names = sorted(counts, key=lambda name: (len(name) > LONGEST_NAME, -_total(counts[name]), name))
    kept = [name for name in names[:MOST_NAMES] if len(name) <= LONGEST_NAME]
    rest: Counts = {}
    for name in names[len(kept) :]:
        rest = merged(rest, {OTHER: counts[name]})
    few = merged({name: counts[name] for name in kept}, rest)
    return {name: bounded(each) if isinstance(each, dict) else each for name, each in few.items()}


def _total(counts: Any) -> int:  # noqa: ANN401 - a tree of counts, or a count
    return sum(map(_total, counts.values())) if isinstance(counts, dict) else counts


def coverage_of(rows: pa.Table) -> Counts:
    """How many rows of a table with SCHEMA have a value in which column, and how long they are.

    `{"rows", "columns": {column: count}, "tokens": {"128": count, …}, "completion_tokens": {…}}`: a row of 128 to 255
    tokens counts under "128", one without any under "0".
    """
    columns = {name: len(rows) - rows[name].null_count for name in rows.column_names}
    histograms = {name: _histogram(rows[column]) for name, column in LENGTHS.items()}
    return {"rows": len(rows), "columns": columns, **histograms}


def _histogram(lengths: pa.ChunkedArray) -> Counts:
    """Counts by powers of two: the exponent of a number is how many bits it has."""
    _, bits = np.frexp(lengths.drop_null().to_numpy().astype(np.float64))
    counts = np.bincount(bits.astype(np.int64)).tolist()
    return {str((1 << bit) >> 1): count for bit, count in enumerate(counts) if count}


def merged(one: Counts, other: Counts) -> Counts:
    """Two trees of counts added up; `{}` adds nothing."""
    total = dict(one)
    for name, value in other.items():
        mine = total.get(name)
        if mine is None:
            total[name] = value
        else:
            total[name] = merged(mine, value) if isinstance(value, dict) else mine + value
    return total


def inventory(entries: Iterable[Entry]) -> dict[str, dict[str, Any]]:
    """Per data set and split: rows in and out, drops, tokens, fields of the sources, columns and lengths of the rows.

    `metadata` is the share of rows that have each column with metadata. Names are sorted, lengths go up.
    """
    found: dict[str, dict[str, Counts]] = {}
    for entry in entries:
        counted = {
            "rows_in": entry.rows_in, "rows_out": entry.rows_out, "tokens": entry.tokens, "drops": dict(entry.drops),
            "source": entry.fields, "coverage": entry.coverage,
        }  # fmt: skip
        splits = found.setdefault(entry.dataset, {})
        splits[entry.split] = merged(splits.get(entry.split, {}), counted)
    return {
        dataset: {split: _told(found[dataset][split]) for split in sorted(found[dataset])} for dataset in sorted(found)
    }


def _told(counted: Counts) -> dict[str, Any]:
    coverage = counted["coverage"]
    rows, columns = coverage.get("rows", 0), coverage.get("columns", {})
    return {
        **{name: counted[name] for name in ("rows_in", "rows_out", "tokens")},
        "drops": _sorted(counted["drops"]),
        "source": _sorted(counted["source"]),
        "columns": _sorted(columns),
        "metadata": {name: round(columns[name] / rows, 6) for name in METADATA if columns.get(name)},
        "lengths": {name: dict(sorted(coverage.get(name, {}).items(), key=lambda pair: int(pair[0]))) for name in LENGTHS},
    }  # fmt: skip


def _sorted(counts: Counts) -> Counts:
    return {name: _sorted(each) if isinstance(each, dict) else each for name, each in sorted(counts.items())}


def coverage_markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """An inventory for people: a table of all splits, then what each holds."""
    splits = [(dataset, split, told) for dataset, of in found.items() for split, told in of.items()]
    rows = [
        (dataset, split, told["rows_in"], told["rows_out"], sum(told["drops"].values()), told["tokens"])
        for dataset, split, told in splits
    ]
    lines = ["# Coverage", "", *markdown_table(("data set", "split", "rows in", "rows out", "dropped", "tokens"), rows)]
    for dataset, split, told in splits:
        lines += [f"## {dataset}, {split}", "", *_details(told)]
    return "\n".join(lines)


def _details(told: Mapping[str, Any]) -> list[str]:
    source, lengths = told["source"], told["lengths"]
    metadata = [(name, f"{share:.1%}") for name, share in told["metadata"].items()]
    bounds = sorted({bound for of in lengths.values() for bound in of}, key=int)
    return [
        *markdown_table(("field of the source", "types"), [(name, _listed(of)) for name, of in source.get("fields", {}).items()]),
        *markdown_table(("field of messages", "types"), [(name, _listed(of)) for name, of in source.get("message_fields", {}).items()]),
        *markdown_table(("role", "messages"), list(source.get("roles", {}).items())),
        *markdown_table(("dropped because", "rows"), list(told["drops"].items())),
        *markdown_table(("column", "rows that have it"), metadata),
        *markdown_table(("tokens from", "rows", "of the assistant"), [(int(bound), *(of.get(bound, 0) for of in lengths.values())) for bound in bounds]),
    ]  # fmt: skip


def _listed(types: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in types.items())


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str | int]]) -> list[str]:
    """A table in Markdown, and an empty line; nothing for no rows. No cell can end its cell, its row or the table."""
    if not rows:
        return []
    lines = [[f"{cell:,}" if isinstance(cell, int) else _plain(cell) for cell in row] for row in rows]
    return [_line(headings), _line(["---"] * len(headings)), *map(_line, lines), ""]


def _plain(text: str) -> str:
    """Text in one line, without what Markdown or HTML would make of it in a table."""
    return " ".join(re.sub(r"[\\|`<&]", lambda found: f"&#{ord(found[0])};", text).split())


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
