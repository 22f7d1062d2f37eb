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

`rensa` computes a million sketches of 60 shingles in 1.2 s per core; converting them from Python numbers takes another 4 s. A
document's bands take 768 bytes on disk.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue] - its names are added by the extension
from tokenmill.tasks.shards.publish import Output

from .partitions import NONE, SliceFile, left, numbered, partitioned, tables
from .shingles import Shingles, combined

BANDS, ROWS = 32, 4
PERMUTATIONS = BANDS * ROWS
SEED = 1
"""Fixed, because another seed gives other candidates."""

AT_ONCE = 256
"""Sketches converted at a time: 1 MB fits into the cache, which halves the time."""


def signatures(shingles: Shingles) -> np.ndarray:
    """The sketch of each document, uint32 [documents, 128]; undefined for a document without shingles."""
    offsets = shingles.offsets.astype(np.uint64)
    bounds = [*range(0, len(offsets) - 1, AT_ONCE), len(offsets) - 1]
    rows = [row for start, stop in pairwise(bounds) for row in _sketches(shingles.hashes, offsets[start : stop + 1])]
    return np.frombuffer(b"".join(rows), np.uint32).reshape(-1, PERMUTATIONS)


def _sketches(hashes: np.ndarray, offsets: np.ndarray) -> list[bytes]:
    own = hashes[int(offsets[0]) : int(offsets[-1])]
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(own, offsets - offsets[0], PERMUTATIONS, SEED)
    return [array("I", row).tobytes() for row in matrix.to_rows()]


def band_keys(sketches: np.ndarray) -> np.ndarray:
    """The keys of a sketch's bands, uint64 [documents, 32]; equal if band number and values are equal."""
    wide = sketches.astype(np.uint64).reshape(-1, BANDS, ROWS)
    bands = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), wide.shape[:2])
    return combined([bands, *(wide[:, :, row] for row in range(ROWS))])


BANDS_SCHEMA = pa.schema({"key": pa.uint64(), "number": pa.int64(), "rank": pa.uint64()})
"""A band key, the document and its rank."""

PAIRS = pa.schema({"better": pa.int64(), "worse": pa.int64()})
"""A pair of documents, the better first."""

CROWDED = pa.schema({"bucket": pa.int64(), "number": pa.int64()})
"""A document of a large bucket that is not a leader. Rows are ordered by bucket, the best document first."""

LEADERS = 8
"""The number of best documents in a bucket that all others are compared with first."""

PARTS, PART_SHIFT, SLOT_SHIFTS, SLOTS_PER_KEY = 256, 40, (0, 20), 4
"""Keys are compared in this many parts, by these bits of them; a partition of bands shares the highest bits."""

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
    rows = repeated(np.concatenate([np.empty(0, np.uint64), *keys]))
    ends = np.cumsum([len(each) for each in keys])
    found: list[pa.Table] = []
    for (first, table), some in zip(files, np.split(rows, np.searchsorted(rows, ends[:-1])), strict=False):
        within = pa.array(some - (ends[len(found)] - table.num_rows))
        found.append(left(numbered(table.take(within), first), gone))
    return buckets_of(pa.concat_tables([BANDS_SCHEMA.empty_table(), *found]).combine_chunks())


def repeated(keys: np.ndarray) -> np.ndarray:
    """Rows whose key may occur again, int64, ascending: all that share a key, and a few per cent of the others.

    Most documents are alone in most of their buckets. Sorting all keys takes 80 ns each; spreading them over parts whose tables
    of slots fit into the cache, and looking twice for slots that are shared, takes 35.
    """
    parts = (keys >> np.uint64(PART_SHIFT)).astype(np.uint8)
    order = np.argsort(parts, kind="stable")  # a radix sort
    ends = np.cumsum(np.bincount(parts, minlength=PARTS)).tolist()
    ordered, found = keys[order], np.zeros(len(keys), np.bool_)
    for start, stop in pairwise([0, *ends]):
        some = np.arange(start, stop)
        for shift in SLOT_SHIFTS:
            some = some[_in_shared_slots(ordered[some] >> np.uint64(shift))]
        found[order[some]] = True
    return np.flatnonzero(found)


def _in_shared_slots(keys: np.ndarray) -> np.ndarray:
    """Which keys have the low bits of another key, bool: of each slot, the last key finds itself, and others find it."""
    slots, numbers = SLOTS_PER_KEY << len(keys).bit_length(), np.arange(len(keys), dtype=np.int32)
    places = (keys & np.uint64(slots - 1)).astype(np.int64)
    last, shared = np.empty(slots, np.int32), np.zeros(slots, np.bool_)
    last[places] = numbers
    shared[places[last[places] != numbers]] = True
    return shared[places]


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
