"""Documents (number, text and rank), and the edges between duplicates.

A document's number is its position among all documents (file by file, row by row). It breaks ties, so results do not depend on
slices, partitions or arrival order.

Of duplicates, the document with the highest quality is kept, then the largest, then the first. Quality and size are packed into
one rank of 64 bits.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128_digest

from .partitions import NONE, PartitionedFile, SliceFile, read_numbered

SIZE_BITS, LOW_BITS = 24, 8
LARGEST = (1 << SIZE_BITS - 1) - 1
LOW = np.uint64((1 << LOW_BITS) - 1)
"""The lowest bits of every rank, so that ranks in existing stores remain comparable."""

SIGN = np.uint32(1 << 31)

BATCH_BYTES = 1 << 20
"""Text per batch: arrays with 8 bytes per byte of text fit into the processor's cache."""


@dataclass(frozen=True, slots=True)
class NumberedTexts:
    """Documents: `numbers` int64 [n] ascending, `texts` [n], and `ranks` uint64 [n] from `ranks_of`."""

    numbers: np.ndarray
    texts: pa.LargeStringArray
    ranks: np.ndarray

    def batches(self) -> "Iterator[NumberedTexts]":
        """Yield the documents in order, about BATCH_BYTES of text and at least one document at a time."""
        for start, stop in batches(self.texts):
            yield NumberedTexts(self.numbers[start:stop], self.texts.slice(start, stop - start), self.ranks[start:stop])


def ranks_of(qualities: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Rank documents, uint64 [n]; better documents have higher ranks.

    `qualities` float64 [n], higher is better, are compared as float32, and NaN is lowest. `sizes` int64 [n], larger is
    better, are clipped to ±8,388,607; pass negative lengths to prefer short documents.
    """
    quality = np.where(np.isnan(qualities), -np.inf, qualities).astype(np.float32) + np.float32(0)  # -0.0 becomes 0.0
    bits = quality.view(np.uint32)
    high = np.where(bits & SIGN, ~bits, bits | SIGN).astype(np.uint64)  # floats as integers of the same order
    middle = (np.clip(sizes, -LARGEST, LARGEST) + LARGEST).astype(np.uint64)
    return high << np.uint64(SIZE_BITS + LOW_BITS) | middle << np.uint64(LOW_BITS) | LOW


def content(texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the UTF-8 of all texts, uint8 [bytes], and the offsets of the texts in it, int64 [n + 1]; no copies."""
    _, offsets, characters = texts.buffers()
    if not len(texts) or characters is None:
        return np.empty(0, np.uint8), np.zeros(len(texts) + 1, np.int64)
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(characters, np.uint8)[bounds[0] : bounds[-1]], bounds - bounds[0]


def byte_counts(texts: pa.LargeStringArray) -> np.ndarray:
    """Return the bytes of each text, int64 [n]."""
    return np.diff(content(texts)[1])


def batches(texts: pa.LargeStringArray) -> Iterator[tuple[int, int]]:
    """Ranges of texts in order, about BATCH_BYTES and at least one text each."""
    _, bounds = content(texts)
    start = 0
    while start < len(texts):
        stop = int(np.searchsorted(bounds, bounds[start] + BATCH_BYTES, side="right")) - 1
        stop = max(stop, start + 1)  # a long text is a batch of its own
        yield start, stop
        start = stop


EDGES = pa.schema({"dropped": pa.int64(), "kept": pa.int64(), "jaccard": pa.float64(), "group": pa.int64()})
"""A dropped document, the one kept instead, their similarity (1 for exact duplicates), and the lowest number in their group."""


def edge_table(dropped: np.ndarray, kept: np.ndarray, jaccard: np.ndarray, group: np.ndarray) -> pa.Table:
    """Return a table of `EDGES`, ascending by `dropped`."""
    order = np.argsort(dropped, kind="stable")
    return pa.Table.from_arrays([pa.array(each[order]) for each in (dropped, kept, jaccard, group)], schema=EDGES)


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values of an array of any shape, ascending.

    Sorting 10 million values takes 1 s and 160 MB, `np.unique` 16 s and 500 MB.
    """
    ascending = np.sort(values, axis=None)
    last = np.ones(len(ascending), np.bool_)
    last[:-1] = ascending[:-1] != ascending[1:]
    return ascending[last]


def sorted_union(*arrays: np.ndarray) -> np.ndarray:
    """Return the distinct document numbers of several arrays, int64, ascending."""
    return distinct(np.concatenate([np.empty(0, np.int64), *arrays]))


KEYED = pa.schema({"high": pa.uint64(), "low": pa.uint64(), "number": pa.int64(), "rank": pa.uint64()})


@dataclass(frozen=True, slots=True)
class Groups:
    """Documents by key: group i is `numbers[starts[i]:starts[i + 1]]` (int64), the best document first."""

    numbers: np.ndarray
    starts: np.ndarray

    @property
    def places(self) -> np.ndarray:
        """The position of each document in its group, int64 [documents], from 0."""
        return np.arange(len(self.numbers)) - np.repeat(self.starts[:-1], np.diff(self.starts))


def keys(texts: pa.LargeStringArray) -> np.ndarray:
    """Return the xxh3_128 of each text, uint64 [n, 2], the high half first."""
    characters, bounds = content(texts)
    view = characters.data  # slices of it are hashed without a Python string for each text
    digests = b"".join(xxh3_128_digest(view[start:stop]) for start, stop in pairwise(bounds.tolist()))
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


def write_keyed(file: PartitionedFile, both: np.ndarray, numbers: np.ndarray, ranks: np.ndarray) -> None:
    """Append documents to a file of `KEYED`, partitioned by key.

    `both` is uint64 [n, 2], `numbers` int64 [n], `ranks` uint64 [n].
    """
    columns = [pa.array(each) for each in (both[:, 0], both[:, 1], numbers, ranks)]
    file.write(pa.Table.from_arrays(columns, schema=KEYED), both[:, 0])


def grouped(table: pa.Table) -> Groups:
    """Return the groups of a table of `KEYED` that holds all documents of each of its keys, in any order."""
    high, low, number, rank = (table[name].to_numpy() for name in KEYED.names)
    order = np.lexsort((number, ~rank, low, high))  # by key, then the best first, then the first
    high, low = high[order], low[order]
    starts = np.flatnonzero((high[1:] != high[:-1]) | (low[1:] != low[:-1])) + 1
    ends = [len(order)] if len(order) else []
    return Groups(number[order], np.concatenate([np.zeros(1, np.int64), starts, np.array(ends, np.int64)]))


def write_text_keys(file: PartitionedFile, documents: NumberedTexts) -> None:
    """Append the keys of documents with normalized texts to a file of `KEYED`."""
    for batch in documents.batches():
        write_keyed(file, keys(batch.texts), batch.numbers, batch.ranks)


def exact_duplicates(files: Iterable[SliceFile], partition: int, partitions: int) -> pa.Table:
    """Return the exact duplicates of one partition, given the files of all slices: a table of `EDGES`, ascending by `dropped`."""
    groups = grouped(read_numbered(files, partition, partitions, KEYED))
    sizes = np.diff(groups.starts)
    best = np.repeat(groups.numbers[groups.starts[:-1]], sizes)
    first = np.repeat(np.minimum.reduceat(groups.numbers, groups.starts[:-1]), sizes) if sizes.size else best
    worse = groups.places > 0  # all but the best of each group
    return edge_table(groups.numbers[worse], best[worse], np.ones(np.count_nonzero(worse)), first[worse])


CAPPED = pa.schema({"dropped": pa.int64()})


def write_prompt_keys(
    file: PartitionedFile, numbers: np.ndarray, prompts: pa.LargeStringArray, ranks: np.ndarray
) -> int:
    """Append the prompts of documents (`numbers` int64 [n], `ranks` uint64 [n]) to a file of `KEYED`.

    Returns the number of documents without a prompt (null); these are not counted.
    """
    known = prompts.is_valid().to_numpy(zero_copy_only=False)
    write_keyed(file, keys(prompts.drop_null()), numbers[known], ranks[known])
    return prompts.null_count


def beyond_cap(
    files: Iterable[SliceFile], partition: int, partitions: int, most: int, gone: np.ndarray = NONE
) -> pa.Table:
    """Return the documents of one partition that are not among the best `most` of their prompt: a table of `CAPPED`, ascending.

    Documents in `gone` (int64, ascending) are not counted.
    """
    groups = grouped(read_numbered(files, partition, partitions, KEYED, gone))
    return pa.Table.from_arrays([pa.array(np.sort(groups.numbers[groups.places >= most]))], schema=CAPPED)
