"""Shingles: a text as the set of its runs of units, each a hash of 64 bits.

A run is as long as a number of words, and what a character, a letter or a piece counts for is the run's to say. All is
arithmetic on whole arrays: sums of units' hashes times a power for their place, of which the difference of two is the hash
of the run between, modulo 2**64, mixed by SplitMix64. Two different shingles of natural text share a hash with odds of
about 2**-64, so sets of hashes stand for the sets of shingles. Somebody who wants two long runs to collide can make such
runs; documents are not attackers.

A text that is shorter than a run is one shingle, a text without units has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from tokenmill.tasks.pack.algorithms import splitmix64

from .units import Units

FACTORS = splitmix64(np.arange(256, 512, dtype=np.uint64)) | np.uint64(1)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(int(GOLDEN), -1, 1 << 64))

PARTS = 4
"""What a word is divided into, for units that count for less."""


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a run: `words` words, or as much of other units, of which so many count for a word (1, 2 or 4)."""

    words: int
    characters: int = 1
    letters: int = 1
    pieces: int = 1

    @property
    def parts(self) -> int:
        """The length in parts of a word."""
        return self.words * PARTS

    def weights(self, units: Units) -> np.ndarray:
        """What each unit counts for, in parts of a word, int64."""
        return (PARTS // np.array([1, self.characters, self.letters, self.pieces]))[units.kinds]


@dataclass(frozen=True, slots=True)
class Shingles:
    """Shingles of some texts, in reading order and as often as they occur: those of text i are the uint64
    `hashes[offsets[i]:offsets[i + 1]]`.
    """

    hashes: np.ndarray
    offsets: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Shingles per text, int64."""
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of units: run j begins at unit `starts[j]` and ends before unit `ends[j]` (int64); those of text i are
    `[offsets[i], offsets[i + 1])`, one for each unit that enough follow. `whole` (bool) is false for a text that is
    shorter than a run and stands as one nevertheless.
    """

    starts: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray
    whole: np.ndarray


@dataclass(frozen=True, slots=True)
class Sums:
    """What hashes of runs are made of: `sums` uint64 [units + 1] of the units' hashes, each times the power for its
    place, and `shifts` uint64 [units + 1], which take the place out again.
    """

    sums: np.ndarray
    shifts: np.ndarray

    @classmethod
    def of(cls, units: Units) -> Self:
        """The sums of some units."""
        count = len(units.hashes) + 1
        return cls(_led(0, np.cumsum(units.hashes * _powers(GOLDEN, count)[:-1])), _powers(INVERSE, count))

    def hashes(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The hashes of runs, uint64: they depend on the units of a run and their order alone."""
        return splitmix64((self.sums[ends] - self.sums[starts]) * self.shifts[starts])


def shingles(units: Units, length: Length) -> Shingles:
    """The shingles of texts, given their units."""
    runs = runs_of(units, length)
    return Shingles(Sums.of(units).hashes(runs.starts, runs.ends), runs.offsets)


def runs_of(units: Units, length: Length) -> Runs:
    """The runs of texts: from each unit on, the fewest units that are as long as asked."""
    counts = np.diff(units.bounds)
    ends = _ends(units, length)
    stops = np.repeat(units.bounds[1:], counts)
    whole = ends <= stops
    first = units.bounds[:-1][counts > 0]
    short = first[~whole[first]]
    ends[short] = stops[short]
    chosen = whole.copy()
    chosen[short] = True
    starts = np.flatnonzero(chosen)
    return Runs(starts, ends[starts], np.searchsorted(starts, units.bounds), whole[starts])


def combined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One hash of several uint64 arrays of one shape, element by element; it depends on their order."""
    total = np.zeros_like(parts[0])
    for factor, part in zip(FACTORS, parts, strict=False):
        total += part * factor
    return splitmix64(total)


def _ends(units: Units, length: Length) -> np.ndarray:
    """Where the run that begins at each unit ends, int64, if its text were long enough."""
    weights, places = length.weights(units), np.arange(len(units.kinds))
    if not weights.size or weights.min() == weights.max():
        return places + length.parts // weights
    last = np.cumsum(weights) - weights + length.parts - 1
    return np.append(np.repeat(places, weights), len(places)).take(last, mode="clip") + 1


def _powers(base: np.uint64, count: int) -> np.ndarray:
    """The powers 0, 1, ... of a number modulo 2**64, uint64 [count]."""
    return _led(1, np.multiply.accumulate(np.full(count - 1, base, np.uint64)))


def _led(first: int, rest: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full(1, first, rest.dtype), rest])
