"""Documents (number, text and rank), and the edges between duplicates.

A document's number is its position among all documents (file by file, row by row). It breaks ties, so results do not depend on
slices, partitions or arrival order.

Of duplicates, the document with the highest quality is kept, then the largest, then the first. Quality and size are packed into
one rank of 64 bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

SIZE_BITS, LOW_BITS = 24, 8
LARGEST = (1 << SIZE_BITS - 1) - 1
LOW = np.uint64((1 << LOW_BITS) - 1)
"""The lowest bits of every rank, so that ranks in existing stores stay comparable."""

SIGN = np.uint32(1 << 31)

BATCH_BYTES = 1 << 20
"""Text per batch: arrays with 8 bytes per byte of text fit into the processor's cache."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents: `numbers` int64 [n] ascending, `texts` [n], and `ranks` uint64 [n] from `ranks_of`."""

    numbers: np.ndarray
    texts: pa.LargeStringArray
    ranks: np.ndarray

    def batches(self) -> "Iterator[Documents]":
        """The documents in order, about BATCH_BYTES of text and at least one document at a time."""
        for start, stop in batches(self.texts):
            yield Documents(self.numbers[start:stop], self.texts.slice(start, stop - start), self.ranks[start:stop])


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
    """The UTF-8 of all texts, uint8 [bytes], and the offsets of the texts in it, int64 [n + 1]; no copies."""
    _, offsets, characters = texts.buffers()
    if not len(texts) or characters is None:
        return np.empty(0, np.uint8), np.zeros(len(texts) + 1, np.int64)
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(characters, np.uint8)[bounds[0] : bounds[-1]], bounds - bounds[0]


def byte_counts(texts: pa.LargeStringArray) -> np.ndarray:
    """The bytes of each text, int64 [n]."""
    return np.diff(content(texts)[1])


def batches(texts: pa.LargeStringArray) -> Iterator[tuple[int, int]]:
    """Ranges of texts in order, about BATCH_BYTES and at least one text each."""
    _, bounds = content(texts)
    start = 0
    while start < len(texts):
        stop = int(np.searchsorted(bounds, bounds[start] + BATCH_BYTES, side="right")) - 1
        stop = max(stop, start + 1)
        yield start, stop
        start = stop


EDGES = pa.schema({"dropped": pa.int64(), "kept": pa.int64(), "jaccard": pa.float64(), "group": pa.int64()})
"""A dropped document, the one kept instead, their similarity (1 for exact duplicates), and the lowest number in their group."""


def edge_table(dropped: np.ndarray, kept: np.ndarray, jaccard: np.ndarray, group: np.ndarray) -> pa.Table:
    """A table of `EDGES`, ascending by `dropped`."""
    order = np.argsort(dropped, kind="stable")
    return pa.Table.from_arrays([pa.array(each[order]) for each in (dropped, kept, jaccard, group)], schema=EDGES)


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values of an array of any shape, ascending.

    Sorting 10 million values takes 1 s and 160 MB, `np.unique` 16 s and 500 MB.
    """
    ascending = np.sort(values, axis=None)
    last = np.ones(len(ascending), np.bool_)
    last[:-1] = ascending[:-1] != ascending[1:]
    return ascending[last]


def sorted_union(*arrays: np.ndarray) -> np.ndarray:
    """The distinct document numbers of several arrays, int64, ascending."""
    return distinct(np.concatenate([np.empty(0, np.int64), *arrays]))
