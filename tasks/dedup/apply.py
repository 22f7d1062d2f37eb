"""Build one shard of a deduplicated blend: the kept rows in a slice, or all rows with their outcomes, and their fates.

JSON rows are written as the bytes that were read, without a byte order mark, and with line breaks within a row replaced by
blanks. In tag mode three fields are inserted before the closing brace, without parsing the others. Parquet rows keep all of
their columns. A row with unreadable text isn't a document; it is quarantined, as everywhere.

A shard of Harmony rows has all rows marked, or the dropped rows removed. Rows remain as normalized. Added columns are the outcome (`dedup_outcome`), the row kept instead (`dup_of`, a `row_id`), and the
similarity of the two (`dup_jaccard`). A shard's identity is the normalized shard's plus the decisions about its rows, so
unchanged decisions don't rebuild shards, even if other datasets change. Rows remain in Arrow, so this costs no more than
rewriting the Parquet file.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from sys import maxsize
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.columns import SCHEMA
from tokenmill.tasks.harmony.inventory import coverage_of, licences_of, merged
from tokenmill.tasks.harmony.shard import FILE
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.plan import WHOLE, Finished, Plan, PlannedShard
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import BadRow, Row, RowBatch, Slice, field_path
from tokenmill.tasks.sources.formats import format_of, read_texts
from tokenmill.tasks.sources.json_rows import BYTE_ORDER_MARK, pick_texts
from tokenmill.tasks.sources.parquet import require_text
from tokenmill.tasks.sources.parquet_batches import taken
from tokenmill.tasks.sources.row_filter import filter_of
from tokenmill.tasks.sources.slices import cut

from .decisions import KEPT, OUTCOMES, REASONS, rows_decided

MARKS = pa.schema([
    pa.field("dedup_outcome", pa.string()),
    pa.field("duplicate_of", pa.large_string()),
    pa.field("jaccard", pa.float64()),
])  # fmt: skip
"""The fields added to tagged rows: `kept` or the reason for dropping, the document kept instead, and their similarity."""

MARK_NAMES = [f'"{name}"'.encode() for name in MARKS.names]


def file_of(part: Slice) -> str:
    """Return the name of the file of rows."""
    return f"{WHOLE}.parquet" if format_of(part.file).columnar else f"{WHOLE}.jsonl"


Content = list[bytes] | pa.RecordBatch


@dataclass(frozen=True, slots=True)
class SliceRows(RowBatch):
    """Consecutive rows of a slice as documents: their `content`, and `texts` [n]."""

    content: Content
    texts: pa.LargeStringArray


def apply_decisions(shard: PlannedShard, store: Store, outcomes: str, on_bad_row: OnBadRow) -> Receipt:
    """Build one shard of kept or tagged rows; `outcomes` is the `uri` of the decisions. Without decisions every row is kept.

    Raises BadRowError for a bad row if the policy is `fail`, RunError if the source changed since it was signed.
    """
    decisions = shard.identity.get("decided")
    decided = rows_decided(outcomes, decisions["outcomes"]) if decisions else OUTCOMES.empty_table()
    drop = decisions is not None and decisions["mode"] == "drop"
    gone: Counter[str] = Counter()
    with building(shard, store, on_bad_row) as builder:
        for rows in read_rows(shard.part, shard.identity["recipe"]["options"]["text_field"]):
            builder.count(rows)
            marks = marks_of(rows.rows, decided)
            kept = compute.call_function("equal", [marks["dedup_outcome"], pa.scalar(KEPT)])
            reasons, stays = np.asarray(marks["dedup_outcome"]), np.asarray(kept)
            gone.update(reasons[~stays].tolist())
            if drop:
                builder.drop_each(reasons[~stays], rows.rows[~stays])
                write_rows(builder, kept_rows(rows.content, kept), rows.rows[stays])
            else:
                write_rows(builder, _tagged(rows.content, marks), rows.rows)
        if gone.total() != decided.num_rows:  # a row that was decided about is a bad row now, or beyond the end
            raise RunError(
                f"{shard.place}: {decided.num_rows} rows should be dropped, but the slice has {gone.total()} of them; run "
                "the same command again"
            )
        builder.write_fates()
        builder.facts["outcomes"] = dict(sorted(gone.items()))
    return builder.receipt


def require_text_in_first(source: DataSource, slices: Sequence[Slice]) -> None:
    """Raises InputError unless the first columnar file has the text field; reading checks the others."""
    part = next((part for part in slices if format_of(part.file).columnar), None)
    if part is not None:  # JSON has no columns
        cut(part.file, maxsize, [source.text_field], require_text)


def read_rows(part: Slice, text_field: str) -> Iterator[SliceRows]:
    """Return the rows of a slice, unchanged and in order; rows without a text are separated."""
    if format_of(part.file).columnar:
        yield from _arrow_rows(part, text_field)
        return
    path, first, chosen = field_path(text_field), 0, filter_of(part)
    for rows in cast("Iterator[list[Row]]", format_of(part.file).rows(part)):
        found = pick_texts(rows, path, first, chosen)
        read = [cast("bytes", rows[number - first]) for number in found.rows.tolist()]
        # JSON allows line breaks only as white space between values, so a blank in place of one changes nothing.
        lines = [row.removeprefix(BYTE_ORDER_MARK).strip().replace(b"\n", b" ").replace(b"\r", b" ") for row in read]
        yield SliceRows(lines, found.texts, rows=found.rows, bad=found.bad, blank=found.blank, filtered=found.filtered)
        first += len(rows)


def _arrow_rows(part: Slice, text_field: str) -> Iterator[SliceRows]:
    """Read whole rows with their texts, in differently sized batches that also report bad and filtered rows."""
    read, first, ahead = read_texts(part, text_field), 0, 0
    texts, rows, bad = pa.array([], pa.large_string()), np.empty(0, np.int64), list[BadRow]()
    for batch in cast("Iterator[pa.RecordBatch | range]", format_of(part.file).rows(part)):
        stop = first + len(batch)
        while ahead < stop:  # texts that belong to the next batch are held
            found = next(read)
            texts, rows = pa.concat_arrays([texts, found.texts]), np.concatenate([rows, found.rows])
            bad, ahead = bad + found.bad, ahead + found.consumed
        count = int(np.searchsorted(rows, stop))
        here = [row for row in bad if row.row < stop]
        content: Content = []
        if not isinstance(batch, range):
            content = batch if count == len(batch) else taken(batch, rows[:count] - first)
        filtered = len(batch) - count - len(here)
        yield SliceRows(content, texts[:count], rows=rows[:count], bad=here, filtered=filtered)
        texts, rows, bad, first = texts[count:], rows[count:], bad[len(here) :], stop


def write_rows(builder: ShardBuilder, content: Content, rows: np.ndarray) -> None:
    """Write and count documents, made of `rows` (int64 [n])."""
    if not len(content):  # a file is created by its first row, so that none is empty
        return
    builder.keep(WHOLE, rows)
    name = file_of(builder.shard.part)
    if isinstance(content, list):
        builder.open(name).write(b"\n".join([*content, b""]))
    else:
        builder.table(name, content.schema).write_batch(content)


def marks_of(rows: np.ndarray, decided: pa.Table) -> pa.RecordBatch:
    """Return the outcomes of rows (int64, ascending) of a slice, a table of `MARKS`, given the decisions about its dropped rows."""
    numbers = decided["row"].to_numpy()
    places = np.searchsorted(numbers, rows)
    there = np.append(numbers, -1)[places] == rows  # -1, behind the last, isn't a row
    found = decided.take(pa.array(places, mask=~there))
    outcome, duplicate_of, jaccard = (found[name].combine_chunks() for name in OUTCOMES.names[1:])
    outcome = compute.call_function("coalesce", [outcome, pa.scalar(KEPT)])
    return pa.RecordBatch.from_arrays([outcome, duplicate_of, jaccard], schema=MARKS)


def kept_rows(content: Content, kept: pa.BooleanArray) -> Content:
    """Return the rows that `kept` [n] chooses."""
    return list(compress(content, kept.to_pylist())) if isinstance(content, list) else content.filter(kept)


def _tagged(content: Content, marks: pa.RecordBatch) -> Content:
    """Rows with their marks, which replace fields and columns of the same names."""
    if isinstance(content, list):
        return [tagged(line, mark) for line, mark in zip(content, marks.to_pylist(), strict=True)]
    kept = [name for name in content.schema.names if name not in MARKS.names]
    columns = [*(content[name] for name in kept), *(marks[name] for name in MARKS.names)]
    fields = [*(content.schema.field(name) for name in kept), *MARKS]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, content.schema.metadata))


def tagged(line: bytes, mark: dict[str, Any]) -> bytes:
    """Return a JSON row, with at least one field, with its marks added; if it already has one of these fields, it is encoded again."""
    if any(name in line for name in MARK_NAMES):  # perhaps only in a text, which costs no more than time
        return json.dumps({**json.loads(line), **mark}, ensure_ascii=False, separators=(",", ":")).encode()
    return line[:-1].rstrip() + b"," + orjson.dumps(mark)[1:]


DUPLICATES = pa.array(REASONS[:2])
"""The outcomes of rows that duplicate other rows."""


@dataclass(frozen=True, slots=True)
class Deduplicated:
    """The shards after deduplication, in order; files with dropped and kept rows, and their places in the store; and the
    facts: the number of documents by outcome, and the evaluations. `marked` is the plan that made them, if any had rows.
    """

    final: Sequence[Finished]
    files: Sequence[tuple[str, Output]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    marked: Plan | None = None


def mark_shard(shard: PlannedShard, store: Store, decisions: str) -> Receipt:
    """Build one marked shard of a normalized one; `decisions` is the file of all outcomes.

    Raises RunError if the normalized rows are missing or damaged, OSError from the storage.
    """
    (normalized,) = shard.inputs
    decided = rows_decided(decisions, shard.identity["decided"]["outcomes"])
    drop = shard.identity["decided"]["mode"] == "drop"
    outcomes, licences = Counter[str](), Counter[str]()
    coverage: dict[str, Any] = {}
    file, first = pq.ParquetFile(pa.BufferReader(store.read(normalized, FILE))), 0
    with building(shard, store) as builder:
        builder.carry_on(normalized, FILE)
        for number in range(file.num_row_groups):
            read = file.read_row_group(number, use_threads=False)
            rows = marked(read, decided, first)
            first += read.num_rows
            kept = compute.call_function("equal", [rows["dedup_outcome"], pa.scalar(KEPT)])
            against = rows.filter(compute.call_function("invert", [kept]))
            outcomes.update(against["dedup_outcome"].to_pylist())
            if drop:
                builder.drop_each(np.asarray(against["dedup_outcome"]), against["source_row"].to_numpy())
                rows = rows.filter(kept)
            if rows.num_rows:
                builder.table(FILE, SCHEMA).write_table(rows)
                builder.keep(WHOLE, rows.num_rows, compute.call_function("sum", [rows["stats_token_len"]]).as_py())
                licences.update(licences_of(rows))
                coverage = merged(coverage, coverage_of(rows))
        builder.write_fates()
        builder.facts = {
            "fields": normalized.facts["fields"],
            "licences": dict(sorted(licences.items())),
            "coverage": coverage,
            "outcomes": dict(sorted(outcomes.items())),
        }
    return builder.receipt


def marked(rows: pa.Table, decided: pa.Table, first: int) -> pa.Table:
    """Rows with their outcomes; `first` is the number of the first one in the shard.

    `decided` is a table of `decisions.OUTCOMES`, the dropped rows of the shard.
    """
    numbers = decided["row"].to_numpy()
    start, stop = np.searchsorted(numbers, [first, first + rows.num_rows])
    places = np.full(rows.num_rows, -1, np.int64)  # a row of `decided` for each that is dropped
    places[numbers[start:stop] - first] = np.arange(start, stop)
    where = pa.array(places, mask=places < 0)
    names = decided["outcome"].take(where)
    outcome = compute.call_function("coalesce", [names, pa.scalar(KEPT)])
    columns = {
        "dedup_outcome": outcome,
        "quality_is_duplicate": compute.call_function("is_in", [outcome], compute.SetLookupOptions(DUPLICATES)),
        "dup_of": decided["duplicate_of"].cast(pa.string()).take(where),
        "dup_jaccard": decided["jaccard"].take(where),
    }
    for name, column in columns.items():
        rows = rows.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), column)
    return rows
