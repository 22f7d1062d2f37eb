"""Near-duplicates: documents that share most of their runs of five words, verified before any is dropped.

    sign              a slice of documents  ─► its bands, cut by key; its shingles
    write_candidates  a partition of bands  ─► pairs, cut by what they are        (in candidates.py)
    verify            a partition of pairs  ─► those whose exact Jaccard similarity reaches the threshold
    resolve           all verified pairs    ─► which document goes, and for which one that stays

The first three can be mapped in any order; the last holds 24 bytes a verified pair. Who is a candidate is a matter of
chance, but a chance of 5 in 10^8 to miss a pair at 0.8; who is dropped is not: every edge is a pair that was compared
shingle by shingle.

Pairs form groups, but likeness does not carry over: in a chain of ten versions the first and the last may share
nothing. So a group is not merged into its best document. From the best down, a document stays unless one that
stays already is its near-duplicate, and no document is lost without a witness. A group in which all are alike keeps
one either way.

A million documents of 60 words, a tenth of them exact and a tenth near copies, take 59 s of CPU from JSON Lines to
decisions, 1.3 GB on disk, and 1 GB of memory in each of two processes.

Exact duplicates should be gone before: they would fill buckets and say nothing new.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from tasks.dedup.candidates import band_table, read_candidates
from tasks.dedup.distinct import distinct
from tasks.dedup.documents import Documents
from tasks.dedup.edges import edge_table
from tasks.dedup.jaccard import sets_of, similarities
from tasks.dedup.minhash import band_keys, signatures
from tasks.dedup.partitions import ROWS_PER_SLICE, PartitionedFile, SliceFile, tables
from tasks.dedup.shingles import Shingles, shingles
from tasks.errors import RunError

WORDS = 5
THRESHOLD = 0.8

SHINGLED = pa.schema([pa.field("number", pa.int64()), pa.field("shingles", pa.large_list(pa.uint64()))])
"""A document and its shingles, documents in ascending order."""

VERIFIED = pa.schema([pa.field("better", pa.int64()), pa.field("worse", pa.int64()), pa.field("jaccard", pa.float64())])
"""A pair of documents, the one that would stay and the one that would go, and how alike they are."""


def sign(bands: PartitionedFile, shingled: PartitionedFile, documents: Documents) -> None:
    """Append the bands and the shingles of some documents, whose texts are in normal form, to files of `BANDS_SCHEMA`
    and, in one partition, of `SHINGLED`. A document without words has none.
    """
    for batch in documents.batches():
        found = shingles(batch.texts, WORDS)
        lists = pa.LargeListArray.from_arrays(pa.array(found.offsets), pa.array(found.hashes))
        shingled.append(pa.Table.from_arrays([pa.array(batch.numbers), lists], schema=SHINGLED))
        keys, some = band_keys(signatures(found)), found.counts > 0
        bands.write(band_table(keys[some], batch.numbers[some], batch.ranks[some]), keys[some].reshape(-1))


def verify(
    candidates: Iterable[str],
    shingled: Iterable[SliceFile],
    partition: int,
    partitions: int,
    threshold: float = THRESHOLD,
) -> pa.Table:
    """The pairs of one partition whose similarity is `threshold` or more: a table of `VERIFIED`, ascending.

    `candidates` and `shingled` are the files of all partitions and of all slices. In memory are the shingles of the
    documents in question, 8 bytes each.
    """
    pairs = read_candidates(candidates, partition, partitions)
    numbers = distinct(pairs)
    found = np.searchsorted(numbers, pairs)
    sets = sets_of(_shingles_of(shingled, numbers))
    sizes = sets.sizes[found]
    possible = sizes.min(axis=1) >= threshold * sizes.max(axis=1)
    pairs, jaccard = pairs[possible], similarities(sets, found[possible])
    alike = jaccard >= threshold
    columns = [pairs[alike, 0], pairs[alike, 1], jaccard[alike]]
    return pa.Table.from_arrays([pa.array(column) for column in columns], schema=VERIFIED)


def resolve(verified: Iterable[pa.Table]) -> pa.Table:
    """The near-duplicates, given the verified pairs of all partitions in any order: a table of `EDGES`, ascending.

    Where several that stay are near-duplicates of one that goes, `kept` is the one most like it.
    """
    table = pa.concat_tables([VERIFIED.empty_table(), *verified])
    both = np.stack([table["better"].to_numpy(), table["worse"].to_numpy()], axis=1)
    numbers, pairs = np.unique(both, return_inverse=True)
    pairs, jaccard = pairs.reshape(-1, 2), table["jaccard"].to_numpy()
    stays = _staying(pairs, len(numbers))
    witness = stays[pairs[:, 0]] & ~stays[pairs[:, 1]]
    better, worse, jaccard = pairs[witness, 0], pairs[witness, 1], jaccard[witness]
    order = np.lexsort((better, -jaccard, worse))
    dropped, first = np.unique(worse[order], return_index=True)
    chosen = order[first]
    group = numbers[_components(pairs, len(numbers))[dropped]]
    return edge_table(numbers[dropped], numbers[better[chosen]], jaccard[chosen], group)


def _shingles_of(files: Iterable[SliceFile], wanted: np.ndarray) -> Shingles:
    """The shingles of the documents `wanted` (ascending), in their order."""
    found = [table for file in files for table in _of_slice(file, wanted)]
    table = pa.concat_tables([SHINGLED.empty_table(), *found]).sort_by("number").combine_chunks()
    if table.num_rows != len(wanted):
        raise RunError(
            f"the shingles of {len(wanted)} documents are needed but those of {table.num_rows} were found; "
            "verify with the files of all slices that the candidates come from"
        )
    lists = table["shingles"].combine_chunks()
    lengths = lists.value_lengths().to_numpy()
    return Shingles(lists.flatten().to_numpy(), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def _of_slice(file: SliceFile, wanted: np.ndarray) -> Iterator[pa.Table]:
    """The rows of those of the documents `wanted` that one file holds; a file that can hold none is not opened."""
    start, stop = np.searchsorted(wanted, [file.first, file.first + ROWS_PER_SLICE])
    if start == stop:
        return
    for table in tables(file.uri, 0, 1):
        there = table["number"].to_numpy() + file.first
        here = wanted[np.searchsorted(wanted, there[:1])[0] : np.searchsorted(wanted, there[-1:], side="right")[0]]
        rows = np.searchsorted(there, here)
        chosen = pa.array(rows[there[rows] == here])
        numbers = pa.array(there).take(chosen)
        yield pa.Table.from_arrays([numbers, table["shingles"].take(chosen)], schema=SHINGLED)


def _staying(pairs: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` documents stay, from the best down: those that no better one which stays is like.

    Whoever no undecided better one is like stays; all that it is like go; and so on. A round takes microseconds and
    there are few, except for a chain of versions, each like the next alone, which takes one for every two.
    """
    stays = np.ones(count, np.bool_)
    while len(pairs):
        outranked = np.zeros(count, np.bool_)
        outranked[pairs[:, 1]] = True
        stays[pairs[~outranked[pairs[:, 0]], 1]] = False
        pairs = pairs[stays[pairs].all(axis=1)]
    return stays


def _components(pairs: np.ndarray, count: int) -> np.ndarray:
    """The lowest number in the component of each of `count` documents: union-find, all pairs at a time."""
    roots = np.arange(count)
    while True:
        joined = roots[pairs]
        low, high = joined.min(axis=1), joined.max(axis=1)
        if np.array_equal(low, high):
            return roots
        np.minimum.at(roots, high, low)
        while not np.array_equal(roots, roots[roots]):
            roots = roots[roots]
