"""Documents that share a key: what exact duplicates and the cap per prompt have in common.

A key is the xxh3_128 of a text. The odds that any two of a billion texts share one by chance are 1 in 10^21. A row is
32 bytes; hashing and grouping a million takes half a second.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128_digest

from .documents import content
from .partitions import PartitionedFile

KEYED = pa.schema(
    [
        pa.field("high", pa.uint64()),
        pa.field("low", pa.uint64()),
        pa.field("number", pa.int64()),
        pa.field("rank", pa.uint64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Groups:
    """Documents by key: group i is `numbers[starts[i]:starts[i + 1]]` (int64), the best document first."""

    numbers: np.ndarray
    starts: np.ndarray

    @property
    def places(self) -> np.ndarray:
        """The place of each document in its group, int64 [documents], from 0."""
        return np.arange(len(self.numbers)) - np.repeat(self.starts[:-1], np.diff(self.starts))


def keys(texts: pa.LargeStringArray) -> np.ndarray:
    """The xxh3_128 of each text, uint64 [n, 2], the high half first."""
    characters, bounds = content(texts)
    view = characters.data
    digests = b"".join(xxh3_128_digest(view[start:stop]) for start, stop in pairwise(bounds.tolist()))
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


def write_keyed(file: PartitionedFile, both: np.ndarray, numbers: np.ndarray, ranks: np.ndarray) -> None:
    """Append documents to a file of `KEYED`, cut by key: `both` uint64 [n, 2], `numbers` int64 [n], `ranks` uint64 [n]."""
    columns = [pa.array(each) for each in (both[:, 0], both[:, 1], numbers, ranks)]
    file.write(pa.Table.from_arrays(columns, schema=KEYED), both[:, 0])


def grouped(table: pa.Table) -> Groups:
    """The groups of a table of `KEYED` that holds all documents of each of its keys, whatever the order of its rows."""
    high, low, number, rank = (table[name].to_numpy() for name in KEYED.names)
    order = np.lexsort((number, ~rank, low, high))
    high, low = high[order], low[order]
    starts = np.flatnonzero((high[1:] != high[:-1]) | (low[1:] != low[:-1])) + 1
    ends = [len(order)] if len(order) else []
    return Groups(number[order], np.concatenate([np.zeros(1, np.int64), starts, np.array(ends, np.int64)]))
