"""Exact Jaccard similarity of pairs of documents: the share of their shingles that both have.

Shingles become 32-bit codes, and a document's shingles a sorted set of `document << 32 | code`. Sorting both sets of a pair
under the pair's number puts shared shingles side by side, so no Python loop runs over pairs. Both sides are sorted already, and a stable sort
merges them: 1 µs per pair of 60 shingles each, 8 bytes per shingle (Python sets: 7 µs, 100 bytes).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from .documents import distinct
from .shingles import Shingles, ranges

SHIFT = np.uint64(32)
ELEMENTS = 1 << 16
"""Shingles of pairs sorted at a time, so that they fit into the cache; a larger pair is sorted alone."""


@dataclass(frozen=True, slots=True)
class Sets:
    """The shingle sets of some documents: that of document i is `[starts[i], starts[i + 1])` of the uint64 `members`,
    distinct and below 2**32.
    """

    members: np.ndarray
    starts: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Members per set, int64."""
        return np.diff(self.starts)

    def of(self, chosen: np.ndarray) -> Self:
        """The sets of some documents (int64 [n]), in their order."""
        sizes = self.sizes[chosen]
        members = self.members[ranges(self.starts[chosen], sizes)]
        return type(self)(members, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))


def sets_of(shingles: Shingles) -> Sets:
    """The sets of some documents. Raises ValueError if they hold more than 2**31 different shingles."""
    codes = pa.array(shingles.hashes).dictionary_encode().indices.to_numpy()
    owners = np.repeat(np.arange(len(shingles.counts), dtype=np.uint64), shingles.counts)
    both = distinct(owners << SHIFT | codes.astype(np.uint64))
    sizes = np.bincount((both >> SHIFT).astype(np.int64), minlength=len(shingles.counts))
    return Sets(both & np.uint64(0xFFFFFFFF), np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))


def similarities(sets: Sets, pairs: np.ndarray) -> np.ndarray:
    """The similarity of each pair, float64 [pairs]; `pairs` int64 [pairs, 2] are indices of sets that are not empty."""
    parts = [_similarities(sets, pairs[start:stop]) for start, stop in _chunks(sets, pairs)]
    return np.concatenate([np.empty(0), *parts])


def alike_to_worse(sets: Sets, threshold: float, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each of the first `count` sets, none empty, yield the indices (int64) of later sets with a similarity of `threshold`
    or more, and the similarities (float64).

    Texts from one template differ little, so sets are compared by how they differ from the majority: 4 ns
    per pair and 2 ns per shared difference.
    """
    sizes, differences = sets.sizes, _Differences.of(sets)
    part = threshold / (1 + threshold)  # share of the summed sizes that two sets must have in common
    wanted = part * sizes + differences.lacks - differences.usual / 2
    for one in range(min(count, len(sizes) - 1)):
        same = differences.shared_with(one)[one + 1 :]
        worse = one + 1 + np.flatnonzero(same > wanted[one + 1 :] + (wanted[one] - 0.5))  # counts; half for rounding
        lacks = differences.lacks[one] + differences.lacks[worse]
        common = differences.usual - lacks + same[worse - one - 1]
        similarity = common / (sizes[one] + sizes[worse] - common)
        alike = similarity >= threshold
        yield worse[alike], similarity[alike]


@dataclass(frozen=True, slots=True)
class _Differences:
    """How sets differ from the `usual` members that more than half of them hold: `lacks` (int64 [sets]) counts those that each
    set lacks; `members[starts[i]:starts[i + 1]]` are the members that set i lacks or has in addition; `owners[first[c]:first[c
    + 1]]` are the sets that differ in member c.
    """

    usual: int
    lacks: np.ndarray
    members: np.ndarray
    starts: np.ndarray
    owners: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, sets: Sets) -> Self:
        """The differences of some sets; memory is a few times 8 bytes per difference and member."""
        _, members, counts = np.unique(sets.members, return_inverse=True, return_counts=True)
        owners = np.repeat(np.arange(len(sets.sizes)), sets.sizes)
        usual = np.flatnonzero(2 * counts > len(sets.sizes))
        place = np.full(len(counts), -1)
        place[usual] = np.arange(len(usual))
        column = place[members]
        holds = np.zeros((len(sets.sizes), len(usual)), np.bool_)
        holds[owners[column >= 0], column[column >= 0]] = True
        lacking, lacked = np.nonzero(~holds)
        owners = np.concatenate([owners[column < 0], lacking])
        members = np.concatenate([members[column < 0], usual[lacked]])
        by_set, by_member = np.argsort(owners, kind="stable"), np.lexsort((owners, members))
        return cls(
            len(usual),
            np.bincount(lacking, minlength=len(sets.sizes)),
            members[by_set],
            np.searchsorted(owners[by_set], np.arange(len(sets.sizes) + 1)),
            owners[by_member],
            np.searchsorted(members[by_member], np.arange(len(counts) + 1)),
        )

    def shared_with(self, one: int) -> np.ndarray:
        """The number of differences each set shares with one of them, int64 [sets]."""
        mine = self.members[self.starts[one] : self.starts[one + 1]]
        others = self.owners[ranges(self.first[mine], self.first[mine + 1] - self.first[mine])]
        return np.bincount(others, minlength=len(self.lacks))


def _similarities(sets: Sets, pairs: np.ndarray) -> np.ndarray:
    together = np.sort(np.concatenate([_members(sets, pairs[:, side]) for side in (0, 1)]), kind="stable")
    twice = together[1:][together[1:] == together[:-1]]
    shared = np.bincount((twice >> SHIFT).astype(np.int64), minlength=len(pairs))
    return shared / (sets.sizes[pairs].sum(axis=1) - shared)


def _members(sets: Sets, chosen: np.ndarray) -> np.ndarray:
    """The members of the chosen sets, each under its set's position among the chosen."""
    sizes = sets.sizes[chosen]
    return np.repeat(np.arange(len(chosen), dtype=np.uint64), sizes) << SHIFT | sets.of(chosen).members


def _chunks(sets: Sets, pairs: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of pairs with about `ELEMENTS` shingles, at least one pair each."""
    ends = np.cumsum(sets.sizes[pairs].sum(axis=1))
    start = 0
    while start < len(pairs):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + ELEMENTS, side="right")), start + 1)
        yield start, stop
        start = stop
