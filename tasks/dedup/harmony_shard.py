"""Build one shard of Harmony rows after deduplication: all rows marked, or dropped rows removed.

Rows remain as normalized. Added columns are the outcome (`dedup_outcome`), the row kept instead (`dup_of`, a `row_id`), and the
similarity of the two (`dup_jaccard`). A shard's identity is the normalized shard's plus the decisions about its rows, so
unchanged decisions don't rebuild shards, even if other datasets change. Rows remain in Arrow, so this costs no more than
rewriting the Parquet file.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.harmony.columns import SCHEMA
from tokenmill.tasks.harmony.inventory import coverage_of, licences_of, merged
from tokenmill.tasks.harmony.shard import FILE
from tokenmill.tasks.shards.build import building
from tokenmill.tasks.shards.plan import WHOLE, Finished, Plan, PlannedShard
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice, SourceFile

from .decisions import KEPT, REASONS, rows_decided
from .rounds import DocumentSlice
from .settings import Mode

DUPLICATES = pa.array(REASONS[:2])
"""The outcomes of rows that duplicate other rows."""


@dataclass(frozen=True, slots=True)
class Deduplicated:
    """The shards after deduplication, in order; the files of dropped and kept rows, with their places in the store; and the
    facts: the number of documents by outcome, and the evaluations. `marked` is the plan that made them, if any had rows.
    """

    final: Sequence[Finished]
    files: Sequence[tuple[str, Output]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    marked: Plan | None = None


def document_slices(normalized: Sequence[Finished], store: Store) -> list[DocumentSlice]:
    """Return the non-empty rows of normalized shards, as documents."""
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
        for number in range(file.num_row_groups):
            read = file.read_row_group(number, use_threads=False)
            rows = marked(read, decided, first)
            first += read.num_rows
            kept = compute.call_function("equal", [rows["dedup_outcome"], pa.scalar(KEPT)])
            outcomes.update(rows["dedup_outcome"].filter(compute.call_function("invert", [kept])).to_pylist())
            rows = rows.filter(kept) if drop else rows
            if rows.num_rows:
                builder.table(FILE, SCHEMA).write_table(rows)
                builder.keep(WHOLE, rows.num_rows, compute.call_function("sum", [rows["stats_token_len"]]).as_py())
                licences.update(licences_of(rows))
                coverage = merged(coverage, coverage_of(rows))
        builder.carry_on(normalized, FILE)
        builder.drops += outcomes if drop else Counter[str]()
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
