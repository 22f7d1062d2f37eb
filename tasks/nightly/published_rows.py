"""What became of every row of a shard, and a hash of what is published of it, as arrays.

Both are read from the store: the document map, or for conversations the index of their sequences; and the stored documents.
"""

from collections.abc import Iterator
from typing import cast

import numpy as np
import zstandard
from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.pack.sequences import read_index as read_sequences
from tokenmill.tasks.report.view_parts import Part, parts_of_entry, split_of
from tokenmill.tasks.report.why_fate import Prepared
from tokenmill.tasks.shards.origins import Origin
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import filesystem
from tokenmill.tasks.tokenize.binidx import read_index
from tokenmill.tasks.tokenize.document_map import OUTCOMES, read_map
from xxhash import xxh3_64_intdigest

CODES = {split: number for number, split in enumerate(SPLITS, 1)}
"""The outcome of a row: 0 if it is dropped, otherwise the split of its document."""


def outcomes(prepared: Prepared, shard: int) -> np.ndarray:
    """The outcome of every row of a shard (uint8 [rows]). Raises RunError for missing or damaged files."""
    entry, receipt = prepared.entries[shard], prepared.receipt(shard)
    found = np.zeros(entry["rows"], np.uint8)
    rows = None if prepared.manifest["type"] == "sft" else read_map(prepared.store, receipt)
    for part, documents in entry["documents"].items():
        code = CODES[split_of(entry, part)]
        if rows is not None:
            found[rows.outcomes == OUTCOMES[part]] = code
        elif documents and prepared.manifest["type"] == "sft":
            found[read_sequences(prepared.store, receipt, part, ["row"])["row"].to_numpy()] = code
        elif documents:
            raise RunError(
                f"{prepared.path}: shard {entry['key']} has no document map; prepare the data again with force=true"
            )
    return found


def digests(prepared: Prepared, shard: int) -> np.ndarray:
    """A hash of what is published of every row of a shard (uint64 [rows]); 0 for dropped rows."""
    entry, receipt = prepared.entries[shard], prepared.receipt(shard)
    found = np.zeros(entry["rows"], np.uint64)
    if prepared.manifest["type"] == "sft":
        for part in (name for name, documents in entry["documents"].items() if documents):
            table = read_sequences(prepared.store, receipt, part, ["row", "content"])
            np.add.at(found, table["row"].to_numpy(), table["content"].to_numpy() | np.uint64(1))
        return found
    rows = read_map(prepared.store, receipt)
    for part in parts_of_entry(prepared.manifest, entry, [Origin(entry["file"], 0, 0, 0, 0)]):
        if rows is not None:
            hashes = [xxh3_64_intdigest(document) | 1 for document in _documents(part, prepared.manifest["type"])]
            found[rows.rows(part.name)] = np.array(hashes, np.uint64)
    return found


def _documents(part: Part, kind: str) -> Iterator[bytes | memoryview]:
    """The stored documents of a part."""
    if kind == "pretrain":
        yield from _tokens(part)
        return
    for ending in (".jsonl", ".jsonl.zst"):
        content = read_bytes(f"{part.place}{ending}")
        if content is not None:
            plain = zstandard.ZstdDecompressor().stream_reader(content).readall() if ending.endswith("zst") else content
            yield from plain.splitlines()
            return
    raise RunError(f"{part.place}: missing; run tokenmill verify on the folder, then prepare it again")


def _tokens(part: Part) -> Iterator[memoryview]:
    content = read_bytes(f"{part.place}.idx")
    if content is None or not part.tokens.size:
        raise RunError(f"{part.place}.idx: missing; run tokenmill verify on the folder, then prepare it again")
    index = read_index(content, part.tokens.size)
    system, path = filesystem(part.stored)
    content = cast("bytes", system.cat_file(path, start=part.tokens.start, end=part.tokens.start + part.tokens.size))
    stored = memoryview(content)
    ends = np.cumsum(index.lengths, dtype=np.int64) * index.dtype.itemsize
    for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        yield stored[start:stop]
