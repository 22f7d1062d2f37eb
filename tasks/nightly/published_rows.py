"""The outcome of every row in a shard, and a hash of its published form, as arrays.

Both are read from the store: the fates of rows, or for conversations the index of their sequences; and the stored documents.
Normalized rows have both. Their hash omits the columns with a row's position, which every row inserted before it
changes.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.dataset.index import ShardIndex
from tokenmill.tasks.dataset.parts import WINDOW, ShardPart, parts_of_entry
from tokenmill.tasks.dataset.stored import StoredFileError
from tokenmill.tasks.harmony.columns import SCHEMA as ROWS
from tokenmill.tasks.harmony.publication import published_split
from tokenmill.tasks.harmony.shard import FILE as ROWS_FILE
from tokenmill.tasks.pack.sequences import read_index as read_sequences
from tokenmill.tasks.shards.manifest import split_of
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import open_binary
from xxhash import xxh3_64_intdigest

# The outcome of a row: 0 if it is dropped, otherwise the split of its document; a hash of its name for normalized rows,
# whose blends name their own splits.
SPLIT_CODES = {split: number for number, split in enumerate(SPLITS, 1)}

PLACE = frozenset({"dataset", "file"})  # parts of the recipe of normalized rows that name their origin

# The columns of normalized rows that follow from their position; `dup_of` names the position of the kept duplicate.
PLACED = frozenset({"dataset", "split", "source_file", "source_row", "row_id", "dup_of"})


def outcomes(prepared: ShardIndex, shard: int) -> np.ndarray:
    """Return the outcome of every row of a shard (unsigned integers [rows]). Raises RunError for missing or damaged files."""
    entry, receipt = prepared.entries[shard], prepared.receipt(shard)
    if prepared.type == "harmony":
        split = published_split(prepared.manifest["recipes"][entry["recipe"]]["recipe"])
        found = np.zeros(entry["rows"], np.uint64)
        for batch in _normalized(prepared, shard, ["source_row"]):
            found[batch["source_row"].to_numpy()] = xxh3_64_intdigest(split.encode()) | 1  # never 0, a dropped row
        return found
    found = np.zeros(entry["rows"], np.uint8)
    # The fate of a conversation is that of its packs
    rows = None if prepared.type == "sft" else prepared.row_fates(shard)
    for part, documents in entry["documents"].items():
        code = SPLIT_CODES[split_of(entry, part)]
        if rows is not None:
            found[rows.rows(part)] = code
        elif documents:
            found[read_sequences(prepared.store, receipt, part, ["row"])["row"].to_numpy()] = code
    return found


def digests(prepared: ShardIndex, shard: int) -> np.ndarray:
    """Return a hash of the published form of every row in a shard (uint64 [rows]); 0 for dropped rows."""
    entry, receipt = prepared.entries[shard], prepared.receipt(shard)
    found = np.zeros(entry["rows"], np.uint64)
    if prepared.type == "sft":
        for part in (name for name, documents in entry["documents"].items() if documents):
            table = read_sequences(prepared.store, receipt, part, ["row", "content"])
            # Pieces of a split conversation are added up
            np.add.at(found, table["row"].to_numpy(), table["content"].to_numpy() | np.uint64(1))
        return found
    if prepared.type == "harmony":
        for batch in _normalized(prepared, shard, [name for name in ROWS.names if name not in PLACED - {"source_row"}]):
            content = batch.drop_columns(["source_row"]).to_pylist()
            hashes = [xxh3_64_intdigest(orjson.dumps(row)) | 1 for row in content]
            found[batch["source_row"].to_numpy()] = np.array(hashes, np.uint64)
        return found
    for part in parts_of_entry(prepared.manifest, entry, prepared.origins[shard]):
        hashes = [xxh3_64_intdigest(document) | 1 for document in _documents(part, prepared.type)]
        found[prepared.rows_of_part(shard, part.name)] = np.array(hashes, np.uint64)
    return found


def _normalized(prepared: ShardIndex, shard: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Batches of the rows in a shard of normalized rows; none if it kept no row."""
    entry = prepared.entries[shard]
    if not sum(entry["documents"].values()):
        return
    place = prepared.store.path(entry["key"], ROWS_FILE)
    try:
        with open_binary(place) as stream:
            yield from pq.ParquetFile(stream).iter_batches(columns=list(columns))
    except FileNotFoundError as error:
        raise StoredFileError(place, "missing") from error


def _documents(part: ShardPart, kind: str) -> Iterator[bytes | memoryview]:
    if kind == "pretrain":
        for ids, lengths in part.pair.batches(WINDOW):
            yield from (document.data.cast("B") for document in np.split(ids, np.cumsum(lengths[:-1])))
        return
    for ending in (".jsonl", ".jsonl.zst"):
        content = read_bytes(f"{part.place}{ending}")
        if content is not None:
            plain = zstandard.ZstdDecompressor().stream_reader(content).readall() if ending.endswith("zst") else content
            yield from plain.splitlines()
            return
    raise StoredFileError(part.place, "missing")
