"""The Jaccard similarity of pairs of documents, exactly: what they share of the shingles that either has.

Shingles become small numbers, a document's shingles a sorted set of `document << 32 | shingle`, and what two sets share
is what stands twice when both are sorted together under the number of their pair. No loop runs over pairs: 5 µs a pair of
60 shingles each. Sets of Python's take 7, after they are built, and some 100 bytes a shingle instead of 8.
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
"""Shingles of pairs that are sorted at a time, so few that they stay in the cache; a pair that has more is sorted alone."""


@dataclass(frozen=True, slots=True)
class Sets:
    """The sets of shingles of some documents: that of document i is `[starts[i], starts[i + 1])` of the uint64
    `members`, distinct and below 2**32.
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
    """The sets of some documents. Raises ValueError when they hold more than 2**31 different shingles."""
    codes = pa.array(shingles.hashes).dictionary_encode().indices.to_numpy()
    owners = np.repeat(np.arange(len(shingles.counts), dtype=np.uint64), shingles.counts)
    both = distinct(owners << SHIFT | codes.astype(np.uint64))
    sizes = np.bincount((both >> SHIFT).astype(np.int64), minlength=len(shingles.counts))
    return Sets(both & np.uint64(0xFFFFFFFF), np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))


def similarities(sets: Sets, pairs: np.ndarray) -> np.ndarray:
    """The similarity of each pair of documents, float64 [pairs]; `pairs` int64 [pairs, 2] are numbers of sets that are
    not empty.
    """
    parts = [_similarities(sets, pairs[start:stop]) for start, stop in _portions(sets, pairs)]
    return np.concatenate([np.empty(0), *parts])


def alike_to_worse(sets: Sets, threshold: float, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each of the first `count` sets, none of which is empty, the sets after it whose similarity is `threshold` or
    more: their numbers, int64, and the similarity, float64.

    Texts that fill one form differ in little, so that a set is told by its differences from what most of them hold: what
    two sets have in common follows from the differences that they share. 4 ns a pair, and 2 ns a shared difference.
    """
    sizes, differences = sets.sizes, _Differences.of(sets)
    part = threshold / (1 + threshold)  # of both sizes together that two sets must have in common
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
    """How sets differ from the `usual` many members that more than half of them hold: of how many each one `lacks` (int64
    [sets]), and which members it either lacks of these or has beside them: for set i `members[starts[i]:starts[i + 1]]`.
    `owners[first[c]:first[c + 1]]` are the sets that differ in member c.
    """

    usual: int
    lacks: np.ndarray
    members: np.ndarray
    starts: np.ndarray
    owners: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, sets: Sets) -> Self:
        """The differences of some sets; 8 bytes for each and for each member, several times."""
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
        """How many differences each set has in common with one of them, int64 [sets]."""
        mine = self.members[self.starts[one] : self.starts[one + 1]]
        others = self.owners[ranges(self.first[mine], self.first[mine + 1] - self.first[mine])]
        return np.bincount(others, minlength=len(self.lacks))


def _similarities(sets: Sets, pairs: np.ndarray) -> np.ndarray:
    together = np.sort(np.concatenate([_members(sets, pairs[:, side]) for side in (0, 1)]))
    twice = together[1:][together[1:] == together[:-1]]
    shared = np.bincount((twice >> SHIFT).astype(np.int64), minlength=len(pairs))
    return shared / (sets.sizes[pairs].sum(axis=1) - shared)


def _members(sets: Sets, chosen: np.ndarray) -> np.ndarray:
    """The members of the chosen sets, each under the place of its set among the chosen."""
    sizes = sets.sizes[chosen]
    return np.repeat(np.arange(len(chosen), dtype=np.uint64), sizes) << SHIFT | sets.of(chosen).members


def _portions(sets: Sets, pairs: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of pairs with about `ELEMENTS` shingles, and never less than one pair."""
    ends = np.cumsum(sets.sizes[pairs].sum(axis=1))
    start = 0
    while start < len(pairs):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + ELEMENTS, side="right")), start + 1)
        yield start, stop
        start = stop
