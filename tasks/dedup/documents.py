"""Documents as this room sees them: a number, a text, and how good they are.

A number is the place of a document in the fixed order of all documents (file by file, row by row). It is the same
however the documents are cut into slices, and it settles what is otherwise equal: so no result depends on slices,
partitions or the order of arrival.

Of duplicates the best one stays: the one of the highest quality, then of the largest size, then of the source with the
lowest priority number, then the one that comes first. All but the last are one number of 64 bits, which travels with
every key that is written down: 8 bytes instead of 20.

Edges: which document goes, and which one stays in its stead.

Distinct numbers of large arrays, by sorting.

`np.unique` puts them in a hash table first: of ten million, nearly all distinct, that takes 16 s and 500 MB, where
sorting takes one second and 160 MB.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

SIZE_BITS, PRIORITY_BITS = 24, 8
LARGEST = (1 << SIZE_BITS - 1) - 1
LAST_PRIORITY = (1 << PRIORITY_BITS) - 1
SIGN = np.uint32(1 << 31)

BATCH_BYTES = 1 << 20
"""Text that is worked on at a time: its arrays of 8 bytes per byte still lie in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Some documents: `numbers` int64 [n] ascending, `texts` [n], and `ranks` uint64 [n] as `ranks_of` makes them."""

    numbers: np.ndarray
    texts: pa.LargeStringArray
    ranks: np.ndarray

    def __post_init__(self) -> None:
        """Raises ValueError unless all three are of one length and the numbers ascend."""
        if not len(self.numbers) == len(self.texts) == len(self.ranks):
            raise ValueError(
                f"{len(self.numbers)} numbers, {len(self.texts)} texts and {len(self.ranks)} ranks; "
                "every document has one of each"
            )
        if np.any(self.numbers[1:] <= self.numbers[:-1]):
            raise ValueError("the numbers of documents do not ascend; number them in the order of their files and rows")

    def batches(self) -> "Iterator[Documents]":
        """The documents in order, with about BATCH_BYTES of text at a time, and never less than one document."""
        for start, stop in batches(self.texts):
            yield Documents(self.numbers[start:stop], self.texts.slice(start, stop - start), self.ranks[start:stop])


def ranks_of(qualities: np.ndarray, sizes: np.ndarray, priorities: np.ndarray) -> np.ndarray:
    """How good documents are, uint64 [n], the best highest.

    `qualities` float64 [n], the higher the better, are compared as float32, and NaN is below everything. `sizes` int64
    [n], the larger the better, count up to 8,388,607 (and down to minus that: pass negative lengths where the shortest
    is best). `priorities` int64 [n] of the sources are 0 to 255, the lower the better. Raises ValueError for others.
    """
    unfit = np.flatnonzero((priorities < 0) | (priorities > LAST_PRIORITY))
    if unfit.size:
        raise ValueError(
            f"document {unfit[0]} has priority {priorities[unfit[0]]}; priorities are 0 to {LAST_PRIORITY}"
        )
    quality = np.where(np.isnan(qualities), -np.inf, qualities).astype(np.float32) + np.float32(0)  # -0.0 becomes 0.0
    bits = quality.view(np.uint32)
    high = np.where(bits & SIGN, ~bits, bits | SIGN).astype(np.uint64)  # floats, as integers that order like them
    middle = (np.clip(sizes, -LARGEST, LARGEST) + LARGEST).astype(np.uint64)
    low = (LAST_PRIORITY - priorities).astype(np.uint64)
    return high << np.uint64(SIZE_BITS + PRIORITY_BITS) | middle << np.uint64(PRIORITY_BITS) | low


def content(texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """The UTF-8 of all texts, uint8 [bytes], and where each begins in it and the last ends, int64 [n + 1]; no copies."""
    _, offsets, characters = texts.buffers()
    if not len(texts) or characters is None:
        return np.empty(0, np.uint8), np.zeros(len(texts) + 1, np.int64)
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(characters, np.uint8)[bounds[0] : bounds[-1]], bounds - bounds[0]


def batches(texts: pa.LargeStringArray) -> Iterator[tuple[int, int]]:
    """Ranges of texts in order, with about BATCH_BYTES at a time, and never less than one text."""
    _, bounds = content(texts)
    start = 0
    while start < len(texts):
        stop = int(np.searchsorted(bounds, bounds[start] + BATCH_BYTES, side="right")) - 1
        stop = max(stop, start + 1)
        yield start, stop
        start = stop


EDGES = pa.schema(
    [
        pa.field("dropped", pa.int64()),
        pa.field("kept", pa.int64()),
        pa.field("jaccard", pa.float64()),
        pa.field("group", pa.int64()),
    ]
)
"""Numbers of documents, how alike the two are (1 for exact duplicates), and the lowest number in their group."""


def edge_table(dropped: np.ndarray, kept: np.ndarray, jaccard: np.ndarray, group: np.ndarray) -> pa.Table:
    """A table of `EDGES`, ascending by `dropped`."""
    order = np.argsort(dropped, kind="stable")
    return pa.Table.from_arrays([pa.array(each[order]) for each in (dropped, kept, jaccard, group)], schema=EDGES)


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct numbers of an array of any shape, ascending."""
    ascending = np.sort(values, axis=None)
    last = np.ones(len(ascending), np.bool_)
    last[:-1] = ascending[:-1] != ascending[1:]
    return ascending[last]


def sorted_union(*arrays: np.ndarray) -> np.ndarray:
    """Numbers of documents out of several arrays, int64, ascending, each once."""
    return distinct(np.concatenate([np.empty(0, np.int64), *arrays]))
