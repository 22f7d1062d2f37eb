"""Verification of a Harmony shard beyond sizes and hashes: every text must be strict Harmony."""

from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import filesystem

from .columns import SCHEMA
from .grammar import Fault, parse
from .shard import FILE

BATCH_ROWS = 256


def inspect_harmony_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of the file of a shard: columns, texts, and counts against the receipt."""
    if not receipt.parts:
        return []
    place = store.path(receipt.key, FILE)
    try:
        return [f"{place}: {problem}" for problem in _file(place, receipt.documents, receipt.tokens)]
    except (pa.ArrowException, OSError) as error:
        return [f"{place}: cannot be read as Parquet: {error}"]


def _file(place: str, documents: int, tokens: int) -> list[str]:
    system, path = filesystem(place)
    rows = counted = 0
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        file = pq.ParquetFile(stream)
        if not file.schema_arrow.equals(SCHEMA):
            return [f"its columns are {file.schema_arrow.names}, not those of normalized rows"]
        for batch in file.iter_batches(BATCH_ROWS, columns=["text", "stats_token_len"], use_threads=False):
            for text, length in zip(batch["text"].to_pylist(), batch["stats_token_len"].to_pylist(), strict=True):
                found = parse(text)
                if isinstance(found, Fault):
                    return [f"row {rows:,} is not valid Harmony: {found.code} at character {found.offset}"]
                rows, counted = rows + 1, counted + length
    agrees = (rows, counted) == (documents, tokens)
    return (
        [] if agrees else [f"holds {rows:,} rows and {counted:,} tokens, its receipt says {documents:,} and {tokens:,}"]
    )
