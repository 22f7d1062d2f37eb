"""Near-duplicates: documents that share most of their runs of five words, verified before any is dropped.

    sign                    a slice of documents  → bands, partitioned by key; shingles; units by kind
    write_candidates        a partition of bands  → candidate pairs; the rest of large buckets
    verify                  a partition of pairs  → pairs whose exact Jaccard similarity reaches the threshold
    certain_drops           all verified pairs    → documents dropped in any case
    compare_large_buckets   the rest              → more verified pairs
    resolve                 all verified pairs    → dropped documents, each with the one kept instead

A pair at a similarity of 0.8 is missed with odds of 5 in 10^8; no document is dropped by chance, because every edge is a pair
that was compared shingle by shingle.

Similarity is not transitive, so a group of connected pairs is not merged into its best document. From the best down, a document
is kept unless one of its near-duplicates is already kept, so every dropped document has a kept near-duplicate.

Large buckets hold forms, logs and shop pages, which share most of their text without being duplicates. Certainly dropped
documents are omitted. A pass over the bucket excludes those that share too few shingles with others to reach the threshold;
the rest are compared one by one. Two bounds apply, and documents beyond them are reported: a bucket is read up to 8 million
shingles, and its best 16,384 candidates are compared with all. A document is linked to at most 16 better ones per bucket; if it
has more, it is reported too.

A million documents of 60 words, a tenth of them exact and a tenth near copies, take 20 s of CPU, 1.3 GB on disk and 1 GB of
memory in each of two processes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.splitmix import splitmix64

from . import kernel
from .documents import NumberedTexts, distinct, edge_table
from .kernel import BANDS, ROWS
from .partitions import NONE, ROWS_PER_SLICE, PartitionedFile, SliceFile, left, numbered, partitioned, tables
from .shingles import (
    KINDS,
    RunLength,
    Sets,
    Shingles,
    alike_to_worse,
    combined,
    ranges,
    sets_of,
    shingles,
    similarities,
    units_of,
)

RUN = RunLength(words=5, letters=2)
"""Five words, characters or pieces, or ten letters: five letters of Thai are about one word, and unrelated long texts
share many such runs."""

THRESHOLD = 0.8

SHINGLED = pa.schema({"number": pa.int64(), "shingles": pa.large_list(pa.uint64())})
"""A document and its shingles, documents ascending."""

MADE_OF = pa.schema([pa.field("number", pa.int64()), *(pa.field(kind, pa.int32()) for kind in KINDS)])
"""A document and its units of each kind, documents ascending."""

VERIFIED = pa.schema({"better": pa.int64(), "worse": pa.int64(), "jaccard": pa.float64()})
"""A pair of documents, the better first, and their similarity."""


def sign(
    bands: PartitionedFile, shingled: PartitionedFile, made: PartitionedFile, documents: NumberedTexts
) -> Counter[str]:
    """Append the signatures of documents with normalized texts to the files of their slice: bands, partitioned by key;
    shingles and units, each in one partition. A document without units has neither bands nor shingles.

    Returns the number of documents by their most frequent unit type.
    """
    mostly = Counter[str]()
    for batch in documents.batches():
        units = units_of(batch.texts)
        made_of, numbers = units.by_kind, pa.array(batch.numbers)
        made.append(pa.Table.from_arrays([numbers, *map(pa.array, made_of.astype(np.int32).T)], schema=MADE_OF))
        found = shingles(units, RUN)
        lists = pa.LargeListArray.from_arrays(pa.array(found.offsets), pa.array(found.hashes))
        shingled.append(pa.Table.from_arrays([numbers, lists], schema=SHINGLED))
        keys, some = band_keys(found), found.counts > 0  # a document without units is like no other
        bands.write(band_table(keys[some], batch.numbers[some], batch.ranks[some]), keys[some].reshape(-1))
        mostly.update(KINDS[kind] for kind in made_of[some].argmax(axis=1).tolist())
    return mostly


def verify(
    candidates: Iterable[str],
    shingled: Iterable[SliceFile],
    partition: int,
    partitions: int,
    threshold: float = THRESHOLD,
) -> pa.Table:
    """Return the pairs of one partition with a similarity of `threshold` or more: a table of `VERIFIED`, ascending.

    `candidates` are the files of all partitions, `shingled` the files of all slices. Memory is 8 bytes per shingle of the
    documents in the pairs.
    """
    pairs = read_candidates(candidates, partition, partitions)
    numbers = distinct(pairs)
    found = np.searchsorted(numbers, pairs)
    sets = sets_of(shingles_of(shingled, numbers))
    sizes = sets.sizes[found]
    possible = sizes.min(axis=1) >= threshold * sizes.max(axis=1)  # without a look at the members
    pairs, jaccard = pairs[possible], similarities(sets, found[possible])
    alike = jaccard >= threshold
    columns = [pairs[alike, 0], pairs[alike, 1], jaccard[alike]]
    return pa.Table.from_arrays([pa.array(column) for column in columns], schema=VERIFIED)


def certain_drops(verified: Iterable[pa.Table], crowded: np.ndarray) -> np.ndarray:
    """Return the documents that are dropped in any case, int64, ascending, given the verified pairs so far and the documents not yet
    compared with all better ones of their buckets.

    A document compared with all better ones is kept if none of them is similar, or if those that are similar are
    certainly dropped. All near-duplicates of a kept document are certainly dropped.
    """
    numbers, pairs, _ = _graph(verified)
    return numbers[_dropped(pairs, len(numbers), sure=~np.isin(numbers, crowded))]


def resolve(verified: Iterable[pa.Table]) -> pa.Table:
    """Return the near-duplicates, given all verified pairs in any order: a table of `EDGES`, ascending.

    `kept` is the most similar of the kept documents.
    """
    numbers, pairs, similarity = _graph(verified)
    dropped = _dropped(pairs, len(numbers), sure=np.ones(len(numbers), np.bool_))
    witness = ~dropped[pairs[:, 0]] & dropped[pairs[:, 1]]  # pairs of a kept document and one dropped for it
    better, worse, jaccard = pairs[witness, 0], pairs[witness, 1], similarity[witness]
    order = np.lexsort((better, -jaccard, worse))  # of several kept ones, the most similar, then the first
    dropped, first = np.unique(worse[order], return_index=True)
    chosen = order[first]
    group = numbers[_components(pairs, len(numbers))[dropped]]
    return edge_table(numbers[dropped], numbers[better[chosen]], jaccard[chosen], group)


def shingles_of(files: Iterable[SliceFile], wanted: np.ndarray) -> Shingles:
    """Return the shingles of the documents `wanted` (int64, ascending), in their order. Raises RunError if some are missing."""
    found = [
        pa.Table.from_arrays([pa.array(numbers), lists.take(pa.array(rows))], schema=SHINGLED)
        for file in files
        for numbers, rows, lists in _rows_in(file, wanted)
    ]
    table = pa.concat_tables([SHINGLED.empty_table(), *found]).sort_by("number").combine_chunks()
    if table.num_rows != len(wanted):
        raise RunError(
            f"the shingles of {len(wanted)} documents are needed, but only {table.num_rows} were found; "
            "rerun the same command with force=true"
        )
    lists = table["shingles"].combine_chunks()
    lengths = lists.value_lengths().to_numpy()
    return Shingles(lists.flatten().to_numpy(), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def sizes_of(files: Iterable[SliceFile], wanted: np.ndarray) -> np.ndarray:
    """Return the number of shingles of the documents `wanted` (int64, ascending), int64."""
    sizes = np.zeros(len(wanted), np.int64)
    for file in files:
        for numbers, rows, lists in _rows_in(file, wanted):
            lengths = compute.call_function("list_value_length", [lists]).to_numpy()
            sizes[np.searchsorted(wanted, numbers)] = lengths[rows]
    return sizes


def _rows_in(file: SliceFile, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, pa.ChunkedArray]]:
    """The documents `wanted` in a file: numbers, and rows in lists of shingles. Files without any are not opened."""
    start, stop = np.searchsorted(wanted, [file.first, file.first + ROWS_PER_SLICE])
    if start == stop:  # most files, as a partition has pairs of few slices
        return
    for table in tables(file.uri, 0, 1):
        there = table["number"].to_numpy() + file.first
        # Both ascend, so that a batch takes one stretch of the wanted documents.
        here = wanted[np.searchsorted(wanted, there[:1])[0] : np.searchsorted(wanted, there[-1:], side="right")[0]]
        rows = np.searchsorted(there, here)
        found = there[rows] == here
        yield here[found], rows[found], table["shingles"]


def _graph(verified: Iterable[pa.Table]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The documents in verified pairs, int64, ascending; the pairs as indices into them, int64 [pairs, 2], the better first;
    and their similarities, float64 [pairs].
    """
    table = pa.concat_tables([VERIFIED.empty_table(), *verified])
    both = np.stack([table["better"].to_numpy(), table["worse"].to_numpy()], axis=1)
    numbers, pairs = np.unique(both, return_inverse=True)  # numbers are sparse, indices are not
    return numbers, pairs.reshape(-1, 2), table["jaccard"].to_numpy()


def _dropped(pairs: np.ndarray, count: int, sure: np.ndarray) -> np.ndarray:
    """Which of `count` documents are dropped: from the best down, those similar to a better one that is kept. Only
    documents that are `sure` (bool) are kept; others are undecided.

    In each round, a document is kept unless it is similar to an undecided better one, and all documents similar to a kept one
    are dropped. A round takes microseconds; a chain of versions, each similar only to the next, takes one per two versions.
    """
    dropped = np.zeros(count, np.bool_)
    while len(pairs):
        outranked = np.zeros(count, np.bool_)
        outranked[pairs[:, 1]] = True
        kept = sure & ~outranked  # nothing that is left could drop them
        found = pairs[kept[pairs[:, 0]], 1]
        if not found.size:  # only undecided documents are left
            break
        dropped[found] = True
        pairs = pairs[~dropped[pairs].any(axis=1)]  # a dropped document drops no other
    return dropped


def _components(pairs: np.ndarray, count: int) -> np.ndarray:
    """The lowest index in the component of each of `count` documents, by union-find on all pairs at a time."""
    roots = np.arange(count)
    while True:
        joined = roots[pairs]
        low, high = joined.min(axis=1), joined.max(axis=1)
        if np.array_equal(low, high):
            return roots
        np.minimum.at(roots, high, low)  # several pairs may have one root: the lowest wins
        while not np.array_equal(roots, roots[roots]):  # until each document names its root
            roots = roots[roots]


SHINGLES_AT_ONCE = 1 << 23
"""The maximum number of shingles compared in a bucket, and held in memory for several buckets."""

MAX_LINKS = 16
"""The maximum number of better documents in a bucket that a document is linked to."""

SMALL_BUCKET, PAIRS_AT_ONCE = 512, 1 << 20
"""Buckets of up to this size are compared pair by pair, this many pairs at a time."""

COMPARED = 16_384
"""The number of best candidates in a bucket that all others are compared with."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A table of `VERIFIED`, and the documents (`unseen`, int64) that were not compared with all of their buckets."""

    verified: pa.Table
    unseen: np.ndarray


def compare_large_buckets(
    crowded: pa.Table, gone: np.ndarray, shingled: Sequence[SliceFile], threshold: float = THRESHOLD
) -> Compared:
    """Compare the documents of a table of `CROWDED`, without those `gone` (int64), bucket by bucket.

    `shingled` are the files of all slices.
    """
    table = crowded.filter(pa.array(~np.isin(crowded["number"].to_numpy(), gone)))
    numbers, buckets = table["number"].to_numpy(), table["bucket"].to_numpy()
    documents = distinct(numbers)
    sizes = sizes_of(shingled, documents)[np.searchsorted(documents, numbers)]
    sums, first = np.cumsum(sizes), np.searchsorted(buckets, buckets)
    # A bucket is compared as far as it fits into memory, from its best document down.
    fits = sums - sums[first] + sizes[first] <= SHINGLES_AT_ONCE
    found = [Compared(VERIFIED.empty_table(), numbers[~fits])]
    for some, bounds in _chunks(numbers[fits], buckets[fits], sizes[fits]):
        documents = distinct(some)
        sets = sets_of(shingles_of(shingled, documents))
        found.append(_compared(sets, np.searchsorted(documents, some), some, np.array(bounds), threshold))
    verified = pa.concat_tables([each.verified for each in found]).combine_chunks()
    return Compared(verified, distinct(np.concatenate([each.unseen for each in found])))


def _chunks(numbers: np.ndarray, buckets: np.ndarray, sizes: np.ndarray) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Documents of consecutive buckets, about `SHINGLES_AT_ONCE` shingles and at least one bucket, and the buckets' bounds."""
    bounds = np.flatnonzero(np.append(buckets[1:] != buckets[:-1], np.ones(1, np.bool_))) + 1
    bounds = np.append(0, bounds) if len(buckets) else bounds[:0]
    sums = np.append(0, np.cumsum(sizes))[bounds]
    start = 0
    while start < len(bounds) - 1:
        # At least one bucket, even if it is larger than what is compared at once.
        stop = max(int(np.searchsorted(sums, sums[start] + SHINGLES_AT_ONCE, side="right")) - 1, start + 1)
        yield numbers[bounds[start] : bounds[stop]], (bounds[start : stop + 1] - bounds[start]).tolist()
        start = stop


def _compared(sets: Sets, places: np.ndarray, numbers: np.ndarray, bounds: np.ndarray, threshold: float) -> Compared:
    """Compare the rows in several buckets, `[bounds[i], bounds[i + 1])`, the best first, with their sets at `places`."""
    sizes = np.diff(bounds)
    small = sizes <= min(SMALL_BUCKET, COMPARED + 1)  # the others by their differences, one by one
    starts, few = bounds[:-1][small], sizes[small]
    cuts = np.flatnonzero(np.diff(np.cumsum(few * (few - 1) // 2) // PAIRS_AT_ONCE)) + 1
    some = zip(np.split(starts, cuts), np.split(few, cuts), strict=True)
    found = [_links_of_small(sets, places, *each, threshold) for each in some]
    for start, size in zip(bounds[:-1][~small].tolist(), sizes[~small].tolist(), strict=True):
        found.append(_links_of_large(sets, places[start : start + size], start, threshold))
    better, worse, jaccard, unseen = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.lexsort((worse, better))  # the same bytes for any number of buckets at once
    columns = [numbers[better[order]], numbers[worse[order]], jaccard[order]]
    return Compared(pa.Table.from_arrays([pa.array(each) for each in columns], schema=VERIFIED), numbers[unseen])


Links = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Similar rows in buckets: the better and the worse ones (int64) with their similarity (float64), and the rows (int64) that were
not compared with all of their bucket.
"""


def _links_of_small(sets: Sets, places: np.ndarray, starts: np.ndarray, sizes: np.ndarray, threshold: float) -> Links:
    """Compare all pairs of small buckets. The bands of similar documents share buckets, so each pair is compared once for all."""
    rows = ranges(starts, sizes)
    after = np.repeat(starts + sizes, sizes) - rows - 1
    better, worse = np.repeat(rows, after), ranges(rows + 1, after)
    # Sets of very different sizes cannot be similar: most pairs are ruled out without a look at members.
    both = sets.sizes[places]
    possible = np.minimum(both[better], both[worse]) / np.maximum(both[better], both[worse]) >= threshold
    better, worse = better[possible], worse[possible]
    jaccard = similarities(sets, np.stack([places[better], places[worse]], axis=1))
    alike = np.flatnonzero(jaccard >= threshold)
    alike = alike[np.argsort(worse[alike], kind="stable")]
    first = np.searchsorted(worse[alike], worse[alike])
    few = np.arange(len(alike)) - first < MAX_LINKS  # the best of those that a document is linked to
    return better[alike[few]], worse[alike[few]], jaccard[alike[few]], worse[alike[~few]]


def _links_of_large(sets: Sets, places: np.ndarray, start: int, threshold: float) -> Links:
    """Compare the rows in one large bucket, which begins at row `start`."""
    members = _possible(sets.of(places), threshold)
    links = np.zeros(len(members), np.int64)
    better, worse, jaccard = [NONE], [NONE], [np.empty(0)]
    for one, (found, similarity) in enumerate(alike_to_worse(sets.of(places[members]), threshold, COMPARED)):
        links[found] += 1
        few = links[found] <= MAX_LINKS
        better.append(np.full(np.count_nonzero(few), one))
        worse.append(found[few])
        jaccard.append(similarity[few])
    unseen = links > MAX_LINKS  # the rest of their links might have dropped them
    unseen[COMPARED + 1 :] = True  # those after the best candidates weren't compared with each other
    rows = start + members
    return rows[np.concatenate(better)], rows[np.concatenate(worse)], np.concatenate(jaccard), rows[unseen]


def _possible(crowd: Sets, threshold: float) -> np.ndarray:
    """The documents of a bucket that share enough shingles with others to reach the threshold with one of them.

    Sets of a and b shingles reach it if they share threshold / (1 + threshold) * (a + b), which requires b >= threshold * a.
    The smallest such b is looked up.
    """
    _, codes, counts = np.unique(crowd.members, return_inverse=True, return_counts=True)
    # A shingle that no other document of the bucket has cannot be shared.
    shared = np.add.reduceat(counts[codes] > 1, crowd.starts[:-1], dtype=np.int64)
    ascending = np.sort(crowd.sizes)
    smallest = ascending[np.searchsorted(ascending, np.floor(threshold * crowd.sizes))]
    return np.flatnonzero(shared >= np.floor(threshold / (1 + threshold) * (crowd.sizes + smallest)))


_CONSTANTS = splitmix64(np.arange(2 * BANDS * ROWS, dtype=np.uint64)).astype(np.uint32).reshape(2, -1)
MASKS, FACTORS = _CONSTANTS[0], _CONSTANTS[1] | np.uint32(1)
"""The constants of the random functions. Fixed, because others give other candidates."""


def band_keys(shingles: Shingles) -> np.ndarray:
    """Return the keys of the bands in each document, uint64 [documents, 32]; equal if band number and minima are equal. They mean
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

CANDIDATES_AT_ONCE = 1 << 22
"""Pairs in memory, 16 bytes each and twice that during sorting."""


def band_table(keys: np.ndarray, numbers: np.ndarray, ranks: np.ndarray) -> pa.Table:
    """Return a table of `BANDS_SCHEMA` from band keys, uint64 [documents, bands]."""
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
        # A single document behind the leaders has been compared with all the others.
        behind = behind[np.bincount(self.buckets)[self.buckets[behind]] > LEADERS + 1]
        columns = [pa.array(each[behind]) for each in (self.buckets, self.numbers)]
        return pa.Table.from_arrays(columns, schema=CROWDED)


def read_buckets(bands: Iterable[SliceFile], partition: int, partitions: int, gone: np.ndarray = NONE) -> Buckets:
    """Return the buckets of one partition, without the documents `gone` (int64, ascending)."""
    files = [
        (file.first, table) for file in bands for table in tables(file.uri, partition, partitions) if table.num_rows
    ]
    keys = [table["key"].to_numpy() for _, table in files]
    rows = np.flatnonzero(kernel.repeated(np.concatenate([np.empty(0, np.uint64), *keys])))
    ends = np.cumsum([len(each) for each in keys])
    found: list[pa.Table] = []
    # Of all keys, only those that may occur twice are copied out of the mapped files.
    for (first, table), some in zip(files, np.split(rows, np.searchsorted(rows, ends[:-1])), strict=False):
        within = pa.array(some - (ends[len(found)] - table.num_rows))
        found.append(left(numbered(table.take(within), first), gone))
    return buckets_of(pa.concat_tables([BANDS_SCHEMA.empty_table(), *found]).combine_chunks())


def write_candidates(buckets: Buckets, uri: str, partitions: int) -> Output:
    """Write the pairs of leaders and other documents, partitioned by pair. Errors as in `publish`."""
    with partitioned(uri, PAIRS, partitions) as file:
        for pairs in candidate_pairs(buckets):
            better, worse = pairs[:, 0], pairs[:, 1]
            # By the pair, so that one that many bands share is verified once.
            key = combined([better.astype(np.uint64), worse.astype(np.uint64)])
            file.write(pa.Table.from_arrays([pa.array(better), pa.array(worse)], schema=PAIRS), key)
    return file.output


def read_candidates(uris: Iterable[str], partition: int, partitions: int) -> np.ndarray:
    """Return the distinct pairs of one partition, int64 [pairs, 2], ascending, the better document of each first.

    Similar documents share many bands, so a pair occurs often; deduplicating while reading keeps at most twice the
    distinct pairs in memory.
    """
    found, waiting, size = np.empty((0, 2), np.int64), list[np.ndarray](), 0
    for table in (table for uri in uris for table in tables(uri, partition, partitions)):
        waiting.append(np.stack([table["better"].to_numpy(), table["worse"].to_numpy()], axis=1))
        size += table.num_rows
        if size > max(CANDIDATES_AT_ONCE, len(found)):  # as much as is held already, so that sorting stays linear
            found, waiting, size = _distinct(np.concatenate([found, *waiting])), [], 0
    return _distinct(np.concatenate([found, *waiting]))


def candidate_pairs(buckets: Buckets) -> Iterator[np.ndarray]:
    """Yield the pairs of leaders and other documents, int64 [pairs, 2], the better first; pairs may repeat."""
    numbers, places = buckets.numbers, buckets.places
    leaders = np.minimum(places, LEADERS)
    ends = np.cumsum(leaders)
    start = 0
    while start < len(numbers):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + CANDIDATES_AT_ONCE, side="right")), start + 1)
        counts = leaders[start:stop]
        worse = np.repeat(np.arange(start, stop), counts)
        leader = np.arange(len(worse)) - np.repeat(ends[start:stop] - counts - before, counts)
        yield _distinct(np.stack([numbers[worse - places[worse] + leader], numbers[worse]], axis=1))
        start = stop


def buckets_of(bands: pa.Table) -> Buckets:
    """Return the buckets of a table of `BANDS_SCHEMA` that holds whole buckets."""
    key, number, rank = (bands[name].to_numpy() for name in BANDS_SCHEMA.names)
    order = np.lexsort((number, ~rank, key))
    starts = np.flatnonzero(np.diff(key[order], prepend=~key[order[:1]]))  # ~ differs from the first key
    sizes = np.diff(starts, append=len(order))
    kept = order[np.repeat(sizes > 1, sizes)]  # a bucket of one has no pair
    sizes = sizes[sizes > 1]
    places = np.arange(len(kept)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return Buckets(np.repeat(np.arange(len(sizes)), sizes), number[kept], places)


def _distinct(pairs: np.ndarray) -> np.ndarray:
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    new = np.ones(len(pairs), np.bool_)
    new[1:] = np.any(pairs[1:] != pairs[:-1], axis=1)
    return pairs[new]
