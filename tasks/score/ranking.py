"""Scores among each other: percentiles, which are known only when every slice is scored.

A ranked shard is a scored one with its column filled in. Its identity is that of the scored shard and a digest of the
percentiles, so that rows of other splits, or none that change anything, rebuild nothing. Ranking reads three columns of
every shard and writes those again whose percentiles changed: 2 microseconds a row.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.build import build_batch, building
from tokenmill.tasks.shards.manifest import WHOLE, Finished
from tokenmill.tasks.shards.plan import Plan, PlannedShard, shard_record
from tokenmill.tasks.shards.publication import collect
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store

from .percentile import percentile_within_split
from .shard import FILE
from .tables import NLL, PERCENTILE

SPLIT = ("dataset", "split")
"""What rows have in common that are compared."""


def ranked(scored: Sequence[Finished], store: Store, *, rebuild: bool) -> list[Finished]:
    """The shards with percentiles, one for each of the scored ones, every one proven."""
    percentiles = _percentiles(scored, store)
    shards = [
        PlannedShard(item.shard.dataset, item.shard.split, item.shard.part, _identity(item, column))
        for item, column in zip(scored, percentiles, strict=True)
    ]
    plan = Plan.of(store, shards, rebuild=rebuild)
    made_of = {shard.key: (item, column) for shard, item, column in zip(shards, scored, percentiles, strict=True)}
    build_batch(
        map(shard_record, plan.pending),
        store,
        lambda shard, _: _rank_shard(shard, *made_of[shard.key], store),
        announce=lambda _: None,
        rebuild=rebuild,
    )
    finished, _ = collect(plan, allow_partial=False)
    return finished


def require_unique(finished: Sequence[Finished], store: Store) -> None:
    """Raises RunError, naming two places, when a row is scored twice."""
    ids = [table_of(item, store, ["row_id"])["row_id"] for item in finished]
    counted = pa.chunked_array([chunk for column in ids for chunk in column.chunks], pa.string()).value_counts()
    counts = counted.field("counts").to_numpy()
    if counts.max(initial=0) <= 1:
        return
    twice = counted.field("values")[int(np.argmax(counts))]
    places = [item.shard.place for item, column in zip(finished, ids, strict=True) if column.index(twice).as_py() >= 0]
    raise RunError(
        f"row {twice.as_py()!r} is there {counts.max()} times, in {' and '.join(places[:2])}; scores are joined by row_id, "
        "so name each file once, and give every row an id of its own"
    )


def table_of(item: Finished, store: Store, columns: Sequence[str] | None = None) -> pa.Table:
    """Some columns of the file of a shard, or all; no rows where there is none. Raises RunError for a damaged file."""
    if WHOLE not in item.receipt.parts:
        return NLL.empty_table().select(list(columns or NLL.names))
    return pq.read_table(pa.BufferReader(store.read(item.receipt, FILE)), columns=columns, use_threads=False)


def _percentiles(scored: Sequence[Finished], store: Store) -> list[pa.Array]:
    """The percentiles of the rows of each shard."""
    tables = [table_of(item, store, ["nll_mean", *SPLIT]) for item in scored]
    whole = pa.concat_tables(tables)
    found = percentile_within_split(whole["nll_mean"], [whole[name] for name in SPLIT])
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    return [found.slice(start, table.num_rows) for start, table in zip(starts.tolist(), tables, strict=False)]


def _identity(item: Finished, column: pa.Array) -> dict[str, object]:
    digest = xxhash.xxh3_128_hexdigest(column.to_numpy(zero_copy_only=False).tobytes())
    return {**item.receipt.identity, "decided": {"percentiles": f"xxh3_128:{digest}"}}


def _rank_shard(shard: PlannedShard, item: Finished, column: pa.Array, store: Store) -> Receipt:
    """The scored shard `item` again, with percentiles."""
    scored = item.receipt
    with building(shard, store) as builder:
        for output in scored.outputs:
            if output.path != FILE:
                builder.open(output.path).write(store.read(scored, output.path))
        if WHOLE in scored.parts:
            groups = pq.ParquetFile(pa.BufferReader(store.read(scored, FILE)))
            start = 0
            for number in range(groups.num_row_groups):
                rows = groups.read_row_group(number, use_threads=False)
                filled = column.slice(start, rows.num_rows)
                rows = rows.set_column(NLL.get_field_index(PERCENTILE), NLL.field(PERCENTILE), filled)
                builder.table(FILE, NLL).write_table(rows)
                start += rows.num_rows
        builder.rows_in, builder.quarantined, builder.truncated = scored.rows_in, scored.quarantined, scored.truncated
        builder.parts, builder.drops = dict(scored.parts), Counter(scored.drops)
        builder.facts, builder.volatile = dict(scored.facts), dict(scored.volatile)
    return builder.receipt
