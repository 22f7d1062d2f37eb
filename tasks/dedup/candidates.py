"""Candidate pairs of near-duplicates: documents whose MinHash sketches share a band.

A sketch holds 128 minima of random functions over a document's shingles; two sketches agree in each of them with probability J,
the Jaccard similarity. Four of them make a band, and documents that share one of 32 bands are candidates, with probability 1 -
(1 - J^4)^32:

    J             0.3    0.4    0.5    0.6    0.7    0.8
    probability   23 %   56 %   87 %   98.8 % 99.98% 99.999995 %

Candidates are verified later, so only misses matter here.

A bucket (all documents with one band key) is small for ordinary text and huge for machine-written text. So each document is
first paired with the best 8 of its bucket, its leaders. Other pairs of larger buckets are compared later, once most duplicates
are known (`near.compare_large_buckets`).

The random functions are `(shingle ^ mask) * factor` modulo 2**32, of the low half of a shingle, with an odd factor: bijections
of numbers that are already well mixed. `kernel.c` computes a million sketches of 60 shingles and their keys in 0.5 s per core. A
document's bands take 768 bytes on disk.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.splitmix import splitmix64

from . import kernel
from .kernel import BANDS, ROWS
from .partitions import NONE, SliceFile, left, numbered, partitioned, tables
from .shingles import Shingles, combined

_CONSTANTS = splitmix64(np.arange(2 * BANDS * ROWS, dtype=np.uint64)).astype(np.uint32).reshape(2, -1)
MASKS, FACTORS = _CONSTANTS[0], _CONSTANTS[1] | np.uint32(1)
"""The constants of the random functions. Fixed, because others give other candidates."""


def band_keys(shingles: Shingles) -> np.ndarray:
    """The keys of the bands of each document, uint64 [documents, 32]; equal if band number and minima are equal. They mean
    nothing for a document without shingles.
    """
    return kernel.band_keys(shingles.hashes, shingles.offsets, MASKS, FACTORS)


BANDS_SCHEMA = pa.schema({"key": pa.uint64(), "number": pa.int64(), "rank": pa.uint64()})
"""A band key, the document and its rank."""

PAIRS = pa.schema({"better": pa.int64(), "worse": pa.int64()})
"""A pair of documents, the better first."""

CROWDED = pa.schema({"bucket": pa.int64(), "number": pa.int64()})
"""A document of a large bucket that is not a leader. Rows are ordered by bucket, the best document first."""

LEADERS = 8
"""The number of best documents in a bucket that all others are compared with first."""

PAIRS_AT_ONCE = 1 << 22
"""Pairs in memory, 16 bytes each and twice that during sorting."""


def band_table(keys: np.ndarray, numbers: np.ndarray, ranks: np.ndarray) -> pa.Table:
    """A table of `BANDS_SCHEMA` from band keys, uint64 [documents, bands]."""
    bands = keys.shape[1]
    columns = [keys.reshape(-1), np.repeat(numbers, bands), np.repeat(ranks, bands)]
    return pa.Table.from_arrays([pa.array(column) for column in columns], schema=BANDS_SCHEMA)


@dataclass(frozen=True, slots=True)
class Buckets:
    """The documents of all buckets of two or more, bucket by bucket, the best first: int64 arrays of one length with
    the number of the bucket, the document, and its place in the bucket.
    """

    buckets: np.ndarray
    numbers: np.ndarray
    places: np.ndarray

    @property
    def crowded(self) -> pa.Table:
        """The documents that were not compared with all of their bucket: a table of `CROWDED`."""
        behind = np.flatnonzero(self.places >= LEADERS)
        behind = behind[np.bincount(self.buckets)[self.buckets[behind]] > LEADERS + 1]
        columns = [pa.array(each[behind]) for each in (self.buckets, self.numbers)]
        return pa.Table.from_arrays(columns, schema=CROWDED)


def read_buckets(bands: Iterable[SliceFile], partition: int, partitions: int, gone: np.ndarray = NONE) -> Buckets:
    """The buckets of one partition, without the documents `gone` (int64, ascending)."""
    files = [
        (file.first, table) for file in bands for table in tables(file.uri, partition, partitions) if table.num_rows
    ]
    keys = [table["key"].to_numpy() for _, table in files]
    rows = np.flatnonzero(kernel.repeated(np.concatenate([np.empty(0, np.uint64), *keys])))
    ends = np.cumsum([len(each) for each in keys])
    found: list[pa.Table] = []
    for (first, table), some in zip(files, np.split(rows, np.searchsorted(rows, ends[:-1])), strict=False):
        within = pa.array(some - (ends[len(found)] - table.num_rows))
        found.append(left(numbered(table.take(within), first), gone))
    return buckets_of(pa.concat_tables([BANDS_SCHEMA.empty_table(), *found]).combine_chunks())


def write_candidates(buckets: Buckets, uri: str, partitions: int) -> Output:
    """Write the pairs of leaders and other documents, partitioned by pair. Errors as in `publish`."""
    with partitioned(uri, PAIRS, partitions) as file:
        for pairs in candidate_pairs(buckets):
            better, worse = pairs[:, 0], pairs[:, 1]
            key = combined([better.astype(np.uint64), worse.astype(np.uint64)])
            file.write(pa.Table.from_arrays([pa.array(better), pa.array(worse)], schema=PAIRS), key)
    return file.output


def read_candidates(uris: Iterable[str], partition: int, partitions: int) -> np.ndarray:
    """The distinct pairs of one partition, int64 [pairs, 2], ascending, the better document of each first.

    Similar documents share many bands, so a pair occurs often; deduplicating while reading keeps at most twice the
    distinct pairs in memory.
    """
    found, waiting, size = np.empty((0, 2), np.int64), list[np.ndarray](), 0
    for table in (table for uri in uris for table in tables(uri, partition, partitions)):
        waiting.append(np.stack([table["better"].to_numpy(), table["worse"].to_numpy()], axis=1))
        size += table.num_rows
        if size > max(PAIRS_AT_ONCE, len(found)):
            found, waiting, size = _distinct(np.concatenate([found, *waiting])), [], 0
    return _distinct(np.concatenate([found, *waiting]))


def candidate_pairs(buckets: Buckets) -> Iterator[np.ndarray]:
    """The pairs of leaders and other documents, int64 [pairs, 2], the better first; pairs may repeat."""
    numbers, places = buckets.numbers, buckets.places
    leaders = np.minimum(places, LEADERS)
    ends = np.cumsum(leaders)
    start = 0
    while start < len(numbers):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + PAIRS_AT_ONCE, side="right")), start + 1)
        counts = leaders[start:stop]
        worse = np.repeat(np.arange(start, stop), counts)
        leader = np.arange(len(worse)) - np.repeat(ends[start:stop] - counts - before, counts)
        yield _distinct(np.stack([numbers[worse - places[worse] + leader], numbers[worse]], axis=1))
        start = stop


def buckets_of(bands: pa.Table) -> Buckets:
    """The buckets of a table of `BANDS_SCHEMA` that holds whole buckets."""
    key, number, rank = (bands[name].to_numpy() for name in BANDS_SCHEMA.names)
    order = np.lexsort((number, ~rank, key))
    starts = np.flatnonzero(np.diff(key[order], prepend=~key[order[:1]]))
    sizes = np.diff(starts, append=len(order))
    kept = order[np.repeat(sizes > 1, sizes)]
    sizes = sizes[sizes > 1]
    places = np.arange(len(kept)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return Buckets(np.repeat(np.arange(len(sizes)), sizes), number[kept], places)


def _distinct(pairs: np.ndarray) -> np.ndarray:
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    new = np.ones(len(pairs), np.bool_)
    new[1:] = np.any(pairs[1:] != pairs[:-1], axis=1)
    return pairs[new]
