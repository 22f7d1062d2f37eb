"""Verify the shards of a normalization beyond sizes and hashes: rows, pools and candidates."""

from collections.abc import Iterator
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.harmony.inspect import inspect_harmony_shard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import filesystem

from .planning import KIND
from .shard import PART, pool_part


def inspect_normalization_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of the files of a shard, either of rows or of a selection."""
    if receipt.identity["kind"] != KIND:
        return inspect_harmony_shard(store, receipt)
    return list(_selection(store, receipt))


def _selection(store: Store, receipt: Receipt) -> Iterator[str]:
    """Check that the files hold the recorded numbers of rows."""
    pools = receipt.facts.get("tally", {}).get("pool_rows", [])
    counts = {PART: receipt.documents, **{pool_part(number): rows for number, rows in enumerate(pools)}}
    files = {output.path.partition(".")[0] for output in receipt.outputs}
    for part, count in counts.items():
        place = store.path(receipt.key, f"{part}.parquet")
        if part not in files:
            found = 0
        else:
            try:
                found = _rows(place)
            except (pa.ArrowException, OSError) as error:
                yield f"{place}: cannot be read as Parquet: {error}"
                continue
        if found != count:
            yield f"{place}: holds {found:,} rows, its receipt says {count:,}"


def _rows(place: str) -> int:
    """Read every row of a file."""
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        return sum(len(batch) for batch in pq.ParquetFile(stream).iter_batches(use_threads=False))
