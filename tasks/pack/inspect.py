"""Verification of an SFT shard beyond sizes and hashes: each file must contain valid packs."""

from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import filesystem

from .parquet import SCHEMA


def inspect_sft_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of the Parquet files of a shard: columns, borders of sequences, masks, and counts against the receipt."""
    recipe = receipt.identity["recipe"]
    problems: list[str] = []
    for part in receipt.parts:
        place = store.path(receipt.key, f"{part}.parquet")
        try:
            problems += [f"{place}: {problem}" for problem in _file(place, recipe["pack_size"], receipt.facts[part])]
        except (pa.ArrowException, OSError, KeyError) as error:
            problems.append(f"{place}: cannot be read as packed Parquet: {error}")
    return problems


def _file(place: str, pack_size: int, facts: dict[str, int]) -> list[str]:
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        file = pq.ParquetFile(stream)
        if not file.schema_arrow.equals(SCHEMA):
            return [f"its columns are {file.schema_arrow.names}, not those of packs"]
        found = {"packs": 0, "sequences": 0, "stored": 0, "loss_tokens": 0}
        for batch in file.iter_batches(64, use_threads=False):
            problem = _rows(batch, pack_size, found) or _values(batch)
            if problem:
                return [problem]
    recorded = {name: facts.get(name) for name in found} | {"stored": facts["tokens"] + facts["padding"]}
    return [] if found == recorded else [f"holds {found}, but its receipt says {recorded}"]


def _values(batch: pa.RecordBatch) -> str | None:
    """The first rule that the values of a batch break."""
    loss, ids = (batch.column(name).flatten().to_numpy() for name in ("loss_mask", "input_ids"))
    if np.any((loss != 0) & (loss != 1)) or np.any(ids < 0):
        return "a value of loss_mask is not 0 or 1, or an id is negative"
    return None


def _rows(batch: pa.RecordBatch, pack_size: int, found: dict[str, int]) -> str | None:
    """The first rule that a batch of packs breaks; its counts are added to `found`."""
    ids, mask, starts = (batch.column(name) for name in ("input_ids", "loss_mask", "seq_start_id"))
    rows, counts = (np.diff(column.offsets.to_numpy()) for column in (ids, starts))
    loss, places = mask.flatten().to_numpy(), starts.flatten().to_numpy()
    if not np.array_equal(rows, np.diff(mask.offsets.to_numpy())):
        return "loss_mask and input_ids of a pack differ in length"
    if rows.size and int(rows.max()) > pack_size:
        return f"a pack holds {int(rows.max())} tokens, more than pack_size {pack_size}"
    row_starts = np.cumsum(rows) - rows
    firsts = np.cumsum(counts) - counts
    if counts.size and (int(counts.min()) < 1 or places[firsts].any()):
        return "seq_start_id of a pack does not begin with 0"
    begin = places + np.repeat(row_starts, counts)
    if np.any(np.diff(begin) < 1) or np.any(places >= np.repeat(rows, counts)):
        return "seq_start_id of a pack does not increase, or exceeds its tokens"
    ends = np.append(begin[1:], rows.sum()) - 1
    if loss[ends].any():
        return "loss_mask is 1 at the last token of a sequence"
    found["packs"] += len(rows)
    found["sequences"] += len(places)
    found["stored"] += int(rows.sum())
    found["loss_tokens"] += int(np.count_nonzero(loss))
    return None
