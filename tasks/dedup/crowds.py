"""Crowds: what is left of large buckets once their leaders were compared with all, compared with each other.

Forms, logs and pages of one shop share most of their text and are not alike for that: thousands of them lie in one
bucket, and which two are near-duplicates only a comparison tells. Those that surely go, because they are like one that
surely stays, are nobody's witnesses and need none. Of the others, a document that shares too many runs with nobody to
reach the threshold is left out in a pass over the bucket; texts that fill the same form with words of their own end here.
The rest are compared one by one with all that are worse, 2 ns a shingle: 0.2 s for a thousand of 400 words.

Two things are bounded, and who meets a bound is named: a bucket is looked at as far as its best documents have 4 million
shingles together (25 MB of text), and of those that may be alike the best 16,384 are compared with all. So a partition
costs memory for 4 million shingles, some 400 MB, and a document at most 16,384 comparisons a band. A document is noted as
like 16 better ones of a bucket at most; it would have to lose all of them to stay by mistake, and is named too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from .distinct import distinct
from .jaccard import Sets, alike_to_worse, sets_of
from .near import THRESHOLD, VERIFIED, shingles_of, sizes_of
from .partitions import NONE, SliceFile

SHINGLES_AT_ONCE = 1 << 23
"""Shingles of a bucket that are looked at, and of several buckets that are in memory together."""

WITNESSES = 16
"""Better ones of a bucket that a document is noted to be like."""

COMPARED = 16_384
"""The best documents of a bucket, of those that may be alike, with whom all others are compared."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What was found: a table of `VERIFIED`, and the documents (`unseen`, int64) that were not compared with all that are
    left of their buckets.
    """

    verified: pa.Table
    unseen: np.ndarray


def compare_crowds(
    crowded: pa.Table, gone: np.ndarray, shingled: Sequence[SliceFile], threshold: float = THRESHOLD
) -> Compared:
    """Compare the documents of a table of `CROWDED` but those that are `gone` (int64), bucket by bucket; `shingled` are
    the files of all slices.
    """
    table = crowded.filter(pa.array(~np.isin(crowded["number"].to_numpy(), gone)))
    numbers, buckets = table["number"].to_numpy(), table["bucket"].to_numpy()
    documents = distinct(numbers)
    sizes = sizes_of(shingled, documents)[np.searchsorted(documents, numbers)]
    fits = _sums_within(buckets, sizes) <= SHINGLES_AT_ONCE
    found = [Compared(VERIFIED.empty_table(), numbers[~fits])]
    for some, bounds in _portions(numbers[fits], buckets[fits], sizes[fits]):
        documents = distinct(some)
        sets = sets_of(shingles_of(shingled, documents))
        places = np.searchsorted(documents, some)
        found += [_compared(sets, places[start:stop], some[start:stop], threshold) for start, stop in pairwise(bounds)]
    verified = pa.concat_tables([each.verified for each in found]).combine_chunks()
    return Compared(verified, distinct(np.concatenate([each.unseen for each in found])))


def _sums_within(buckets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The sum of the sizes of each document and all before it in its bucket."""
    sums = np.cumsum(sizes)
    first = np.searchsorted(buckets, buckets)
    return sums - sums[first] + sizes[first]


def _portions(numbers: np.ndarray, buckets: np.ndarray, sizes: np.ndarray) -> Iterator[tuple[np.ndarray, list[int]]]:
    """The documents of some buckets, with about `SHINGLES_AT_ONCE` shingles and never less than one bucket, and where the
    buckets begin and the last one ends.
    """
    bounds = np.flatnonzero(np.append(buckets[1:] != buckets[:-1], np.ones(1, np.bool_))) + 1
    bounds = np.append(0, bounds) if len(buckets) else bounds[:0]
    sums = np.append(0, np.cumsum(sizes))[bounds]
    start = 0
    while start < len(bounds) - 1:
        stop = max(int(np.searchsorted(sums, sums[start] + SHINGLES_AT_ONCE, side="right")) - 1, start + 1)
        yield numbers[bounds[start] : bounds[stop]], (bounds[start : stop + 1] - bounds[start]).tolist()
        start = stop


def _compared(sets: Sets, places: np.ndarray, numbers: np.ndarray, threshold: float) -> Compared:
    """Compare the documents of one bucket, the best first, whose sets are at `places`."""
    who = _possible(sets.of(places), threshold)
    noted = np.zeros(len(who), np.int64)
    better, worse, jaccard = [NONE], [NONE], [np.empty(0)]
    for one, (found, similarity) in enumerate(alike_to_worse(sets.of(places[who]), threshold, COMPARED)):
        noted[found] += 1
        few = noted[found] <= WITNESSES
        better.append(np.full(np.count_nonzero(few), one))
        worse.append(found[few])
        jaccard.append(similarity[few])
    columns = [numbers[who[np.concatenate(each)]] for each in (better, worse)]
    verified = pa.Table.from_arrays([*map(pa.array, columns), pa.array(np.concatenate(jaccard))], schema=VERIFIED)
    unseen = noted > WITNESSES
    unseen[COMPARED + 1 :] = True
    return Compared(verified, numbers[who[unseen]])


def _possible(crowd: Sets, threshold: float) -> np.ndarray:
    """Those of a bucket who share enough of their shingles with others to reach the threshold with one of them.

    Two sets of a and b shingles reach it with threshold / (1 + threshold) * (a + b) in common, and none that is smaller
    than threshold * a can. The smallest other set that can is looked up.
    """
    _, codes, counts = np.unique(crowd.members, return_inverse=True, return_counts=True)
    shared = np.add.reduceat(counts[codes] > 1, crowd.starts[:-1], dtype=np.int64)
    ascending = np.sort(crowd.sizes)
    smallest = ascending[np.searchsorted(ascending, np.floor(threshold * crowd.sizes))]
    return np.flatnonzero(shared >= np.floor(threshold / (1 + threshold) * (crowd.sizes + smallest)))
