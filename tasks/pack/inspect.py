"""Verification of an SFT shard beyond sizes and hashes: files must contain valid sequences, or valid packs."""

from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.shards.receipt import RECEIPT, PartCount, Receipt
from tokenmill.tasks.shards.store import PACKS, Store, read_bytes, size_of
from tokenmill.tasks.storage import filesystem

from .packs import SHARDS
from .parquet import SCHEMA as PACKED
from .sequences import SCHEMA, index_file, tokens_file


def inspect_sft_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of stored sequences, or of packs: format, borders of sequences, masks, and counts against the receipt."""
    if receipt.identity["kind"] == PACKS:
        return [*_packs(store, receipt), *_lost(store, receipt)]
    return [problem for part in receipt.parts for problem in _sequences(store, receipt, part)]


def _sequences(store: Store, receipt: Receipt, part: str) -> list[str]:
    place, tokens = store.path(receipt.key, index_file(part)), store.path(receipt.key, tokens_file(part))
    data = read_bytes(place)
    try:
        index = pq.read_table(pa.BufferReader(data or b""), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        return [f"{place}: cannot be read as an index of sequences: {error}"]
    if not index.schema.equals(SCHEMA):
        return [f"{place}: its columns are {index.schema.names}, not those of sequences"]
    lengths = index["length"].to_numpy()
    found = PartCount(len(np.unique(index["row"].to_numpy())), int(lengths.sum(dtype=np.int64)))
    if found != receipt.parts[part]:
        return [f"{place}: holds {found}, but its receipt says {receipt.parts[part]}"]
    if size_of(tokens) != 4 * found.tokens:
        return [f"{tokens}: does not hold the {found.tokens:,} tokens of its index"]
    return []


def _packs(store: Store, receipt: Receipt) -> list[str]:
    recipe = receipt.identity["recipe"]
    problems: list[str] = []
    for part in receipt.parts:
        place = store.path(receipt.key, f"{part}.parquet")
        try:
            problems += [f"{place}: {problem}" for problem in _file(place, recipe["pack_size"], receipt.facts[part])]
        except (pa.ArrowException, OSError, KeyError) as error:
            problems.append(f"{place}: cannot be read as packed Parquet: {error}")
    return problems


def _lost(store: Store, receipt: Receipt) -> list[str]:
    """Whether the conversations that went into packs are those of the shards; shards without a valid receipt are not compared."""
    shards, documents = Store(store.place, SHARDS), 0
    for name in receipt.identity["source"]["sequences"]:
        key, _, part = name.partition("/")
        member = shards.read_receipt(key)
        if member is None:
            return []
        documents += member.parts[part].documents
    if documents == receipt.rows_in:
        return []
    return [f"{store.path(receipt.key, RECEIPT)}: {receipt.rows_in:,} conversations, but the shards have {documents:,}"]


def _file(place: str, pack_size: int, facts: dict[str, int]) -> list[str]:
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        file = pq.ParquetFile(stream)
        if not file.schema_arrow.equals(PACKED):
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
