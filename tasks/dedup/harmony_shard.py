"""Build one shard of Harmony rows after deduplication: all rows marked, or dropped rows removed.

Rows stay as normalized. Added columns are the outcome (`dedup_outcome`), the row kept instead (`dup_of`, a `row_id`), and the
similarity of the two (`dup_jaccard`). A shard's identity is that of the normalized shard plus the decisions about its rows, so
unchanged decisions rebuild nothing, whatever changes in other data sets. Marking copies the pages of all other columns, and
costs 20 ms per 25 MB of text; removing rows rewrites the Parquet file.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.columns import SCHEMA
from tokenmill.tasks.harmony.inventory import coverage_of, licences_of, merged
from tokenmill.tasks.harmony.shard import FILE
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.identity import shard_key
from tokenmill.tasks.shards.manifest import WHOLE, Finished
from tokenmill.tasks.shards.plan import Plan, PlannedShard
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice, SourceFile

from .decisions import KEPT, REASONS, rows_decided
from .parquet_columns import with_columns
from .rounds import DocumentSlice
from .settings import Mode

DUPLICATES = pa.array(REASONS[:2])
"""The outcomes of rows that duplicate other rows."""


@dataclass(frozen=True, slots=True)
class Deduplicated:
    """The shards after deduplication, in order; the files of dropped and kept rows, with their places in the store; and the
    facts: the number of documents by outcome, and the evaluations.
    """

    final: Sequence[Finished]
    files: Sequence[tuple[str, Output]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


def document_slices(normalized: Sequence[Finished], store: Store) -> list[DocumentSlice]:
    """The rows of normalized shards, none of them empty, as documents."""
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
    shards = [
        PlannedShard(
            item.shard.dataset,
            item.shard.split,
            item.shard.part,
            {**item.receipt.identity, "decided": {"mode": mode, "outcomes": digest}},
        )
        for item, digest in zip(normalized, digests, strict=True)
    ]
    return Plan.of(store, shards, rebuild=rebuild)


def mark_shard(shard: PlannedShard, store: Store, decisions: str) -> Receipt:
    """Build one shard of `plan_marked`; `decisions` is the file of all outcomes.

    Raises RunError if the normalized shard is missing or damaged, OSError from the storage.
    """
    normalized = store.receipt(shard_key({name: value for name, value in shard.identity.items() if name != "decided"}))
    if normalized is None:
        raise RunError(f"{shard.place}: the normalized shard is missing; run the same command again to build it")
    decided = rows_decided(decisions, shard.identity["decided"]["outcomes"])
    drop = shard.identity["decided"]["mode"] == "drop"
    outcomes = Counter(decided["outcome"].to_pylist())
    with building(shard, store) as builder:
        counted = (_write_kept if drop else _write_tagged)(builder, normalized, decided)
        for output in normalized.outputs:
            if output.path != FILE:
                builder.open(output.path).write(store.read(normalized, output.path))
        builder.rows_in, builder.quarantined = normalized.rows_in, normalized.quarantined
        builder.drops = Counter(normalized.drops) + (outcomes if drop else Counter[str]())
        builder.facts = {"fields": normalized.facts["fields"], **counted, "outcomes": dict(sorted(outcomes.items()))}
    return builder.receipt


def _write_tagged(builder: ShardBuilder, normalized: Receipt, decided: pa.Table) -> dict[str, Any]:
    """Write all rows, whose other columns are not even decoded. Returns their licences and coverage."""
    rows = builder.store.read(normalized, FILE)
    metadata, first = pq.read_metadata(pa.BufferReader(rows)), 0
    columns, filled = pa.BufferOutputStream(), Counter[str]()
    with pq.ParquetWriter(columns, MARKS, compression="zstd") as writer:
        for number in range(metadata.num_row_groups):
            marks = marks_of(decided, first, metadata.row_group(number).num_rows)
            writer.write_table(marks)
            first += marks.num_rows
            filled.update({name: marks.num_rows - marks[name].null_count for name in MARKS.names})
    for part in with_columns(rows, columns.getvalue().to_pybytes()):
        builder.open(FILE).write(part)
    builder.keep(WHOLE, normalized.documents, normalized.tokens)
    licences, coverage = normalized.facts["licences"], normalized.facts["coverage"]
    return {"licences": licences, "coverage": {**coverage, "columns": {**coverage["columns"], **filled}}}


def _write_kept(builder: ShardBuilder, normalized: Receipt, decided: pa.Table) -> dict[str, Any]:
    """Write the rows that are kept. Returns their licences and coverage."""
    file, first = pq.ParquetFile(pa.BufferReader(builder.store.read(normalized, FILE))), 0
    licences, coverage = Counter[str](), dict[str, Any]()
    for number in range(file.num_row_groups):
        rows = file.read_row_group(number, use_threads=False)
        marks = marks_of(decided, first, rows.num_rows)
        first += rows.num_rows
        for name in MARKS.names:
            rows = rows.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), marks[name])
        rows = rows.filter(compute.call_function("equal", [marks["dedup_outcome"], pa.scalar(KEPT)]))
        if rows.num_rows:
            builder.table(FILE, SCHEMA).write_table(rows)
            builder.keep(WHOLE, rows.num_rows, compute.call_function("sum", [rows["stats_token_len"]]).as_py())
            licences.update(licences_of(rows))
            coverage = merged(coverage, coverage_of(rows))
    return {"licences": dict(sorted(licences.items())), "coverage": coverage}


MARKS = pa.schema([SCHEMA.field(name) for name in ("dedup_outcome", "quality_is_duplicate", "dup_of", "dup_jaccard")])
"""The columns that deduplication fills in."""


def marks_of(decided: pa.Table, first: int, count: int) -> pa.Table:
    """The outcomes of `count` rows of a shard from row `first`, a table of MARKS.

    `decided` is a table of `decisions.OUTCOMES`, the dropped rows of the shard.
    """
    numbers = decided["row"].to_numpy()
    start, stop = np.searchsorted(numbers, [first, first + count])
    places = np.full(count, -1, np.int64)
    places[numbers[start:stop] - first] = np.arange(start, stop)
    where = pa.array(places, mask=places < 0)
    outcome = compute.call_function("coalesce", [decided["outcome"].take(where), pa.scalar(KEPT)])
    duplicate = compute.call_function("is_in", [outcome], compute.SetLookupOptions(DUPLICATES))
    kept, jaccard = decided["duplicate_of"].cast(pa.string()).take(where), decided["jaccard"].take(where)
    return pa.table([outcome, duplicate, kept, jaccard], MARKS)
