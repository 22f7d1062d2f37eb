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
from tokenmill.tasks.sources.files import Row, RowBatch, Slice, SourceFile, TextBatch, field_path
from tokenmill.tasks.sources.formats import format_of, read_texts
from tokenmill.tasks.sources.json_rows import BYTE_ORDER_MARK, pick_texts
from tokenmill.tasks.sources.parquet import require_text
from tokenmill.tasks.sources.parquet_batches import taken
from tokenmill.tasks.sources.row_filter import filter_of
from tokenmill.tasks.sources.slices import cut

from .decisions import KEPT, OUTCOMES, REASONS, rows_decided
from .rounds import DocumentSlice
from .settings import Mode

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
        if gone.total() != decided.num_rows:
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
    if part is not None:
        cut(part.file, maxsize, [source.text_field], require_text)


def read_rows(part: Slice, text_field: str) -> Iterator[SliceRows]:
    """Return the rows of a slice, unchanged and in order; rows without a text are separated."""
    return _arrow_rows(part, text_field) if format_of(part.file).columnar else _json_rows(part, text_field)


def _json_rows(part: Slice, text_field: str) -> Iterator[SliceRows]:
    path, first, chosen = field_path(text_field), 0, filter_of(part)
    for rows in cast("Iterator[list[Row]]", format_of(part.file).rows(part)):
        texts = pick_texts(rows, path, first, chosen)
        content = [_on_one_line(cast("bytes", rows[number - first])) for number in texts.rows.tolist()]
        yield SliceRows(
            content, texts.texts, rows=texts.rows, bad=texts.bad, blank=texts.blank, filtered=texts.filtered
        )
        first += len(rows)


def _on_one_line(row: bytes) -> bytes:
    """Strip a row and replace its line breaks, which JSON allows only as white space between values."""
    return row.removeprefix(BYTE_ORDER_MARK).strip().replace(b"\n", b" ").replace(b"\r", b" ")


def _arrow_rows(part: Slice, text_field: str) -> Iterator[SliceRows]:
    """Read whole rows with their texts, in differently sized batches that also report bad and filtered rows."""
    read, held = read_texts(part, text_field), TextBatch(pa.array([], pa.large_string()), rows=np.empty(0, np.int64))
    first = ahead = 0
    for batch in cast("Iterator[pa.RecordBatch | range]", format_of(part.file).rows(part)):
        stop = first + len(batch)
        while ahead < stop:
            found = next(read)
            held, ahead = _joined(held, found), ahead + found.consumed
        texts, held = _cut(held, stop)
        filtered = len(batch) - len(texts.rows) - len(texts.bad)
        content = [] if isinstance(batch, range) else _documents(batch, texts.rows - first)
        yield SliceRows(content, texts.texts, rows=texts.rows, bad=texts.bad, filtered=filtered)
        first = stop


def _documents(batch: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
    return batch if len(rows) == len(batch) else taken(batch, rows)


def _joined(one: TextBatch, other: TextBatch) -> TextBatch:
    texts = pa.concat_arrays([one.texts, other.texts])
    return TextBatch(texts, rows=np.concatenate([one.rows, other.rows]), bad=[*one.bad, *other.bad])


def _cut(batch: TextBatch, row: int) -> tuple[TextBatch, TextBatch]:
    """The rows of a batch before `row`, and the others."""
    count = int(np.searchsorted(batch.rows, row))
    before = [bad for bad in batch.bad if bad.row < row]
    return (
        TextBatch(batch.texts[:count], rows=batch.rows[:count], bad=before),
        TextBatch(batch.texts[count:], rows=batch.rows[count:], bad=batch.bad[len(before) :]),
    )


def write_rows(builder: ShardBuilder, content: Content, rows: np.ndarray) -> None:
    """Write and count documents, made of `rows` (int64 [n])."""
    if not len(content):
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
    there = np.append(numbers, -1)[places] == rows
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
    if any(name in line for name in MARK_NAMES):
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


def document_slices(normalized: Sequence[Finished], store: Store) -> list[DocumentSlice]:
    """Return the non-empty rows in normalized shards, as documents."""
    slices: list[DocumentSlice] = []
    for item in normalized:
        (rows,) = (output for output in item.receipt.outputs if output.path == FILE)
        file = SourceFile(store.path(item.key, FILE), rows.size, "parquet")
        slices.append(DocumentSlice("harmony", Slice(file, 0, rows.size, item.key, size=rows.size)))
    return slices


def plan_marked(
    normalized: Sequence[Finished], digests: Sequence[str], mode: Mode, store: Store, *, rebuild: bool
) -> Plan:
    """Plan a shard for each normalized shard with rows; `digests` are the hashes of the decisions about each."""
    pairs = zip(normalized, digests, strict=True)
    shards = [item.decided({"mode": mode, "outcomes": digest}) for item, digest in pairs]
    return Plan.of(store, shards, rebuild=rebuild)


def mark_shard(shard: PlannedShard, store: Store, decisions: str) -> Receipt:
    """Build one shard of `plan_marked`; `decisions` is the file of all outcomes.

    Raises RunError if the normalized rows are missing or damaged, OSError from the storage.
    """
    (normalized,) = shard.inputs
    decided = rows_decided(decisions, shard.identity["decided"]["outcomes"])
    drop = shard.identity["decided"]["mode"] == "drop"
    outcomes, licences = Counter[str](), Counter[str]()
    coverage: dict[str, Any] = {}
    file = pq.ParquetFile(pa.BufferReader(store.read(normalized, FILE)))
    first = 0
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
    places = np.full(rows.num_rows, -1, np.int64)
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
