"""Documents that share a key: exact duplicates by their normalized text, and the cap per prompt.

A key is the xxh3_128 of a text; two of a billion texts collide with odds of 1 in 10^21. Keys of a million documents take 1 s of
a core.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128_digest

from .documents import Documents, content, edge_table
from .partitions import NONE, PartitionedFile, SliceFile, read_numbered

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
    """The xxh3_128 of each text, uint64 [n, 2], the high half first."""
    characters, bounds = content(texts)
    view = characters.data
    digests = b"".join(xxh3_128_digest(view[start:stop]) for start, stop in pairwise(bounds.tolist()))
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


def write_keyed(file: PartitionedFile, both: np.ndarray, numbers: np.ndarray, ranks: np.ndarray) -> None:
    """Append documents to a file of `KEYED`, partitioned by key.

    `both` is uint64 [n, 2], `numbers` int64 [n], `ranks` uint64 [n].
    """
    columns = [pa.array(each) for each in (both[:, 0], both[:, 1], numbers, ranks)]
    file.write(pa.Table.from_arrays(columns, schema=KEYED), both[:, 0])


def grouped(table: pa.Table) -> Groups:
    """The groups of a table of `KEYED` that holds all documents of each of its keys, in any order."""
    high, low, number, rank = (table[name].to_numpy() for name in KEYED.names)
    order = np.lexsort((number, ~rank, low, high))
    high, low = high[order], low[order]
    starts = np.flatnonzero((high[1:] != high[:-1]) | (low[1:] != low[:-1])) + 1
    ends = [len(order)] if len(order) else []
    return Groups(number[order], np.concatenate([np.zeros(1, np.int64), starts, np.array(ends, np.int64)]))


def sign(file: PartitionedFile, documents: Documents) -> None:
    """Append the keys of documents with normalized texts to a file of `KEYED`."""
    for batch in documents.batches():
        write_keyed(file, keys(batch.texts), batch.numbers, batch.ranks)


def resolve(files: Iterable[SliceFile], partition: int, partitions: int) -> pa.Table:
    """The exact duplicates of one partition, given the files of all slices: a table of `EDGES`, ascending by `dropped`."""
    groups = grouped(read_numbered(files, partition, partitions, KEYED))
    sizes = np.diff(groups.starts)
    best = np.repeat(groups.numbers[groups.starts[:-1]], sizes)
    first = np.repeat(np.minimum.reduceat(groups.numbers, groups.starts[:-1]), sizes) if sizes.size else best
    worse = groups.places > 0
    return edge_table(groups.numbers[worse], best[worse], np.ones(np.count_nonzero(worse)), first[worse])


CAPPED = pa.schema({"dropped": pa.int64()})


def sign_prompts(file: PartitionedFile, numbers: np.ndarray, prompts: pa.LargeStringArray, ranks: np.ndarray) -> int:
    """Append the prompts of documents (`numbers` int64 [n], `ranks` uint64 [n]) to a file of `KEYED`.

    Returns the number of documents without a prompt (null); these are not counted.
    """
    known = prompts.is_valid().to_numpy(zero_copy_only=False)
    write_keyed(file, keys(prompts.drop_null()), numbers[known], ranks[known])
    return prompts.null_count


def beyond_cap(
    files: Iterable[SliceFile], partition: int, partitions: int, most: int, gone: np.ndarray = NONE
) -> pa.Table:
    """The documents of one partition that are not among the best `most` of their prompt: a table of `CAPPED`, ascending.

    Documents in `gone` (int64, ascending) are not counted.
    """
    groups = grouped(read_numbered(files, partition, partitions, KEYED, gone))
    return pa.Table.from_arrays([pa.array(np.sort(groups.numbers[groups.places >= most]))], schema=CAPPED)
