"""The inventory and the card of a normalized dataset: fields of the sources, columns of the rows, licenses, counts.

Records are counted by field names and types, which takes half a µs per record and per message. Counts are trees in plain JSON.
Receipts hold them as facts, and they can be added in any order. The card's license is the strictest license of any row, because
one share-alike row makes the whole collection share-alike. If a row lacks a license or has an unknown one, it is `other`.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pyarrow as pa
from tokenmill.tasks.kit.parts import Table, table_lines
from tokenmill.tasks.sources.exact_json import RepeatedKeys

from .columns import SCHEMA
from .message import TEMPLATE_VERSION

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
OTHER = "(other)"
"""Replaces further names, because some sources use ids or texts as names."""

Counts = dict[str, Any]
"""A tree of counts: nested objects with integers as leaves."""


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
    """The counts with the MAX_NAMES most frequent names per object; other names, and long ones (MAX_NAME_LENGTH), become OTHER."""
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
    """Count values per column and lengths of rows of a table with SCHEMA.

    `{"rows", "columns": {column: count}, "tokens": {"128": count, …}, "completion_tokens": {…}}`: a row of 128 to 255
    tokens counts under "128", one without tokens under "0".
    """
    columns = {name: len(rows) - rows[name].null_count for name in rows.column_names}
    histograms = {name: _histogram(rows[column]) for name, column in LENGTHS.items()}
    return {"rows": len(rows), "columns": columns, **histograms}


def _histogram(lengths: pa.ChunkedArray) -> Counts:
    """Counts by powers of two."""
    _, bits = np.frexp(lengths.drop_null().to_numpy().astype(np.float64))
    counts = np.bincount(bits.astype(np.int64)).tolist()
    return {str((1 << bit) >> 1): count for bit, count in enumerate(counts) if count}


def merged(one: Counts, other: Counts) -> Counts:
    """The sum of two trees of counts."""
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
    found: dict[str, dict[str, Counts]] = {}
    for entry in entries:
        counted = {
            "rows_in": entry.rows_in, "rows_out": entry.rows_out, "tokens": entry.tokens, "drops": dict(entry.drops),
            "source": entry.fields, "coverage": entry.coverage,
        }  # fmt: skip
        splits = found.setdefault(entry.dataset, {})
        splits[entry.split] = merged(splits.get(entry.split, {}), counted)
    return {
        dataset: {split: _summary(found[dataset][split]) for split in sorted(found[dataset])}
        for dataset in sorted(found)
    }


def _summary(counted: Counts) -> dict[str, Any]:
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
    """An inventory as Markdown: a table of all splits, then details of each."""
    splits = [(dataset, split, summary) for dataset, of in found.items() for split, summary in of.items()]
    rows = [
        (dataset, split, summary["rows_in"], summary["rows_out"], sum(summary["drops"].values()), summary["tokens"])
        for dataset, split, summary in splits
    ]
    lines = ["# Coverage", "", *_table(("dataset", "split", "rows in", "rows out", "dropped", "tokens"), rows)]
    for dataset, split, summary in splits:
        lines += [f"## {dataset}, {split}", "", *_details(summary)]
    return "\n".join(lines)


def _details(summary: Mapping[str, Any]) -> list[str]:
    source, lengths = summary["source"], summary["lengths"]
    metadata = [(name, f"{share:.1%}") for name, share in summary["metadata"].items()]
    bounds = sorted({bound for of in lengths.values() for bound in of}, key=int)
    return [
        *_table(("field of the source", "types"), [(name, _listed(of)) for name, of in source.get("fields", {}).items()]),
        *_table(("field of messages", "types"), [(name, _listed(of)) for name, of in source.get("message_fields", {}).items()]),
        *_table(("role", "messages"), list(source.get("roles", {}).items())),
        *_table(("dropped because", "rows"), list(summary["drops"].items())),
        *_table(("column", "rows that have it"), metadata),
        *_table(("tokens from", "rows", "of the assistant"), [(int(bound), *(of.get(bound, 0) for of in lengths.values())) for bound in bounds]),
    ]  # fmt: skip


def _listed(types: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in types.items())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | int]]) -> list[str]:
    return table_lines(Table("", columns, rows))


UNNAMED = "none named"

LICENCES = ("cc0-1.0", "mit", "apache-2.0", "odc-by", "cc-by", "cc-by-sa", "cc-by-nc", "cc-by-nc-sa")
"""Known licenses, the least strict first; a name belongs to the last one that is a prefix of it."""

FULL_NAMES = {
    "cc-by": "cc-by-4.0",
    "cc-by-sa": "cc-by-sa-4.0",
    "cc-by-nc": "cc-by-nc-4.0",
    "cc-by-nc-sa": "cc-by-nc-sa-4.0",
}

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a card: `rows` and `tokens` by split and by source, source files, rows by license and by drop reason, and the
    languages that the blend states.
    """

    splits: Mapping[str, Mapping[str, int]]
    sources: Mapping[str, Mapping[str, int]]
    files: Sequence[str]
    licences: Mapping[str, int]
    drops: Mapping[str, int]
    languages: Sequence[str] = ()


def licences_of(rows: pa.Table) -> Counter[str]:
    """Rows by license."""
    return Counter(name or UNNAMED for name in rows["source_license"].to_pylist())


def strictest(licences: Mapping[str, int]) -> str:
    """The license of the whole by its name on the Hub; `other` if one is missing or unknown."""
    known = [_known(name) for name in licences]
    if not known or None in known:
        return "other"
    name = max((each for each in known if each is not None), key=LICENCES.index)
    return FULL_NAMES.get(name, name)


def _known(name: str) -> str | None:
    spelled = name.lower().replace("_", "-").replace(" ", "-")
    fits = [licence for licence in LICENCES if spelled.startswith(licence)]
    return fits[-1] if fits else None


def card(contents: Contents, folders: Sequence[str] = ()) -> str:
    """The card: front matter for the hub, then tables. Each of `folders` is a separate configuration."""
    rows = sum(split["rows"] for split in contents.splits.values())
    return "\n".join([
        *_front_matter(contents, rows, folders),
        "# Conversations in Harmony",
        "",
        (
            f"{rows:,} rows, {sum(split['tokens'] for split in contents.splits.values()):,} tokens of Harmony text "
            f"(template version {TEMPLATE_VERSION}). Every text parses with a strict grammar."
        ),
        "",
        *_table(("split", "rows", "tokens"), [(name, each["rows"], each["tokens"]) for name, each in contents.splits.items()]),
        *_table(("dataset", "rows", "tokens"), [(name, each["rows"], each["tokens"]) for name, each in contents.sources.items()]),
        *_table(("license of rows", "rows"), sorted(contents.licences.items())),
        *_table(("excluded because", "rows"), sorted(contents.drops.items())),
        "Made from:",
        "",
        *(f"* `{file}`" for file in contents.files),
        "",
        *_table(("column", "type"), [(field.name, str(field.type)) for field in SCHEMA]),
    ])  # fmt: skip


def _front_matter(contents: Contents, rows: int, folders: Sequence[str]) -> list[str]:
    size = next((name for most, name in SIZES if rows < most), "n>10M")
    configs = [
        f"      - {{split: {json.dumps(_hub_split(name))}, path: {json.dumps(f'data/{name}/*.parquet')}}}"
        for name in contents.splits
    ]
    more = [
        f"  - {{config_name: {json.dumps(folder.replace('/', '-'))}, data_files: {json.dumps(f'{folder}/*.parquet')}}}"
        for folder in folders
    ]
    spoken = [f"language: {json.dumps(list(contents.languages))}"] if contents.languages else []
    return [
        "---", *spoken, f"license: {strictest(contents.licences)}", f"size_categories: [{json.dumps(size)}]",
        "tags: [harmony, text]", "configs:", "  - config_name: default", "    data_files:", *configs, *more, "---", "",
    ]  # fmt: skip


def _hub_split(name: str) -> str:
    """The name of a split with the characters that the hub allows."""
    return "".join(each if each.isalnum() or each in "._" else "_" for each in name)
