"""Verify a shard of deduplicated rows beyond sizes and hashes: its rows must be readable, and the document map must count them."""

from typing import BinaryIO, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.json_lines import split_lines
from tokenmill.tasks.sources.opening import BLOCK_BYTES
from tokenmill.tasks.storage import filesystem
from tokenmill.tasks.tokenize.document_map import map_problems

BATCH_ROWS = 8192


def inspect_dedup_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of a shard's file: unreadable rows, and their number against the receipt."""
    for output in receipt.outputs:
        stem, _, ending = output.path.partition(".")
        if stem == WHOLE:
            place = store.path(receipt.key, output.path)
            count = _parquet_rows if ending == "parquet" else _json_rows
            try:
                problem = _miscounted(count(place), receipt.documents)
            except (pa.ArrowException, OSError, orjson.JSONDecodeError) as error:
                problem = f"cannot be read: {error}"
            return [f"{place}: {problem}"] if problem else map_problems(store, receipt)
    return map_problems(store, receipt)


def _miscounted(rows: int, documents: int) -> str:
    return "" if rows == documents else f"holds {rows:,} rows, its receipt says {documents:,}"


def _parquet_rows(place: str) -> int:
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        return sum(len(batch) for batch in pq.ParquetFile(stream).iter_batches(BATCH_ROWS, use_threads=False))


def _json_rows(place: str) -> int:
    """The number of lines, each a JSON object. Raises JSONDecodeError for invalid JSON."""
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        lines = split_lines(iter(lambda: stream.read(BLOCK_BYTES), b""))
        return sum(isinstance(row, bytes) and isinstance(orjson.loads(row), dict) for rows in lines for row in rows)
