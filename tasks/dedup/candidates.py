"""Candidates: pairs of documents that share a band, of which there may be far too many to look at.

A bucket, all documents with one band key, is small for ordinary text and huge for what a machine wrote to a pattern: a
million of one kind would be half a trillion pairs. So each document is paired with the best 16 of its bucket and with
no others: all pairs in buckets up to that size, and never more than 16 a document and band. If a bucket's documents are
alike, the best of them is among the 16, and that is the one which stays. The loss only shows where very many differ by
about the threshold: of 1,200 versions of one text with one to three words of 100 replaced, 472 go when all pairs are
looked at, and 461, in a seventh of the time, with 16 leaders.

Buckets are whole in a partition, so that the pairs follow from the documents alone. 24 bytes a band and document,
768 a document, go through the disk.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from tasks.dedup.distinct import distinct
from tasks.dedup.partitions import NONE, SliceFile, partitioned, read_numbered, read_partition
from tasks.dedup.shingles import combined
from tasks.shards.publish import Output

BANDS_SCHEMA = pa.schema([pa.field("key", pa.uint64()), pa.field("number", pa.int64()), pa.field("rank", pa.uint64())])
"""A band of a document: its key, the document, and how good that is."""

PAIRS = pa.schema([pa.field("better", pa.int64()), pa.field("worse", pa.int64())])
"""Two documents, the one that would stay and the one that would go."""

LEADERS = 16
"""The best documents of a bucket, with whom all its documents are compared."""

PAIRS_AT_ONCE = 1 << 22
"""Pairs in memory, 16 bytes each and twice that while they are sorted."""


def band_table(keys: np.ndarray, numbers: np.ndarray, ranks: np.ndarray) -> pa.Table:
    """A table of `BANDS_SCHEMA` from the band keys, uint64 [documents, bands], of some documents."""
    bands = keys.shape[1]
    columns = [keys.reshape(-1), np.repeat(numbers, bands), np.repeat(ranks, bands)]
    return pa.Table.from_arrays([pa.array(column) for column in columns], schema=BANDS_SCHEMA)


def write_candidates(
    bands: Iterable[SliceFile], partition: int, uri: str, partitions: int, gone: np.ndarray = NONE
) -> Output:
    """Write the pairs of one partition of the files `bands`, cut into as many partitions by what they are.

    Documents that are `gone` (int64, ascending) are left out before there are buckets, which they would fill. Raises
    OSError and InputError as `publish` does.
    """
    rows = read_numbered(bands, partition, partitions, BANDS_SCHEMA, gone)
    with partitioned(uri, PAIRS, partitions) as file:
        for pairs in candidate_pairs(rows):
            better, worse = pairs[:, 0], pairs[:, 1]
            key = combined([better.astype(np.uint64), worse.astype(np.uint64)])
            file.write(pa.Table.from_arrays([pa.array(better), pa.array(worse)], schema=PAIRS), key)
    return file.output


def read_candidates(uris: Iterable[str], partition: int, partitions: int) -> np.ndarray:
    """The pairs of one partition, each once, int64 [pairs, 2], ascending: the better document, the worse one."""
    table = read_partition(uris, partition, partitions, PAIRS)
    return _distinct(table["better"].to_numpy(), table["worse"].to_numpy())


def candidate_pairs(bands: pa.Table) -> Iterator[np.ndarray]:
    """The pairs, int64 [pairs, 2], of a table of `BANDS_SCHEMA` that holds whole buckets; some pairs come repeatedly."""
    numbers, places = _buckets(bands)
    leaders = np.minimum(places, LEADERS)
    ends = np.cumsum(leaders)
    start = 0
    while start < len(numbers):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + PAIRS_AT_ONCE, side="right")), start + 1)
        counts = leaders[start:stop]
        worse = np.repeat(np.arange(start, stop), counts)
        leader = np.arange(len(worse)) - np.repeat(ends[start:stop] - counts - before, counts)
        yield _distinct(numbers[worse - places[worse] + leader], numbers[worse])
        start = stop


def _buckets(bands: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """The documents of all buckets of two or more, bucket by bucket, best first, and the place of each in its bucket."""
    key = bands["key"].to_numpy()
    ascending = np.sort(key)
    shared = distinct(ascending[1:][ascending[1:] == ascending[:-1]])
    if not shared.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    nearest = np.minimum(np.searchsorted(shared, key), len(shared) - 1)
    rows = np.flatnonzero(shared[nearest] == key)
    number, bucket = bands["number"].to_numpy()[rows], nearest[rows]
    order = np.lexsort((number, ~bands["rank"].to_numpy()[rows], bucket))
    starts = np.cumsum(np.bincount(bucket)) - np.bincount(bucket)
    return number[order], np.arange(len(rows)) - starts[bucket[order]]


def _distinct(better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    order = np.lexsort((worse, better))
    pairs = np.stack([better[order], worse[order]], axis=1)
    new = np.ones(len(pairs), np.bool_)
    new[1:] = np.any(pairs[1:] != pairs[:-1], axis=1)
    return pairs[new]
