"""Text normalization, units (words and the like), and shingles, the runs of units that texts are compared by.

Normal form is Unicode NFC with every run of whitespace replaced by one space. Case and punctuation remain, so exact
duplicates differ at most in composition, indentation and line ends. Contamination checks also lower the case and drop
punctuation.

A unit is one of:

    word        text between blanks
    character   a Han character, Kana or other wide ones: their scripts do not separate words
    letter      a code point of Thai, Lao, Khmer, Burmese, Tibetan, Javanese and other scripts without blanks
    piece       a part of a word of more than 40 characters: minified code, base64, a long URL

The kind is decided per word and per character, not per document, so two versions of a text are cut alike where they agree. A
hash of the last four bytes decides where long words are cut, so an edit moves only the cuts beside it. Blanks beside characters
and letters are ignored.

A shingle is a run of units as a 64-bit hash: prefix sums of unit hashes times powers give the hash of any run, modulo
2**64, mixed by SplitMix64. Natural texts collide with odds of 2**-64; the hash does not resist an attacker. A text
shorter than a run is one shingle.

The loops are in `kernel.c`. All three together run at 100 MB/s per core.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.splitmix import splitmix64

from . import kernel
from .documents import content

COMPOSED = compute.Utf8NormalizeOptions("NFC")
NO_WORD = compute.ReplaceSubstringOptions(r"[^\p{L}\p{M}\p{N}]+", " ")


def normalized(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Texts in normal form; a null becomes the empty text."""
    filled = compute.call_function("coalesce", [texts, pa.scalar("", pa.large_string())])
    characters, bounds = kernel.collapse(*content(_composed(filled)))
    return pa.LargeStringArray.from_buffers(len(bounds) - 1, pa.py_buffer(bounds), pa.py_buffer(characters))


def _composed(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Texts in Unicode NFC, except those that it would not change."""
    characters, bounds = content(texts)
    places = np.flatnonzero(characters >= COMPOSABLE)  # ASCII and Latin-1 are composed already
    second = characters.take(places + 1, mode="clip").astype(np.int32)
    places = places[~STABLE[characters[places].astype(np.int32) << 8 | second]]
    if not places.size:  # most batches of English
        return texts
    changing = np.zeros(len(texts), np.bool_)
    changing[np.searchsorted(bounds, places, side="right") - 1] = True
    mask = pa.array(changing)
    composed = compute.call_function("utf8_normalize", [texts.filter(mask)], COMPOSED)
    return compute.call_function("replace_with_mask", [texts, mask, composed])


def normalized_words(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Texts in normal form, lower case, and without anything but letters, marks and numbers."""
    lowered = compute.call_function("utf8_lower", [normalized(texts)])
    return normalized(compute.call_function("replace_substring_regex", [lowered], NO_WORD))


KINDS = ("words", "characters", "letters", "pieces")
WORD, CHARACTER, LETTER, PIECE = range(len(KINDS))

WIDE = (
    (0x3005, 0x302D), (0x3031, 0x312F), (0x3192, 0x3229), (0x3251, 0xA4CF), (0xF900, 0xFAD9), (0xFF10, 0xFF9F),
    (0x16FE0, 0x1B2FB), (0x20000, 0x3FFFF),
)  # fmt: skip
"""Code points of characters, both ends included: letters, marks and numbers whose East_Asian_Width (UAX #11) is wide,
full or half, without Hangul, which has blanks. Ranges span unassigned code points, symbols and punctuation."""

WITHOUT_BLANKS = (
    (0x0E01, 0x109F), (0x1780, 0x17F9), (0x1950, 0x19FF), (0x1A20, 0x1AAD), (0x1B00, 0x1B7F), (0x1BC0, 0x1BFF),
    (0xA980, 0xAADF), (0x11000, 0x1107F), (0x11300, 0x113E2), (0x116D0, 0x11746), (0x11900, 0x11959),
    (0x11EE0, 0x11F5A), (0x16100, 0x16139),
)  # fmt: skip
"""Code points of letters: every script with letters of the Line_Break classes SA, AK or AS (UAX #14), and Tibetan. They
are listed here so that a new version of a Unicode library changes no signature."""

TABLE = np.zeros(0x40000, np.uint8)
for _kind, _ranges in ((CHARACTER, WIDE), (LETTER, WITHOUT_BLANKS)):
    for _first, _last in _ranges:
        TABLE[_first : _last + 1] = _kind

COMPOSABLE = 0xCC
"""The first byte of U+0300 in UTF-8. NFC composes and reorders no characters before it."""

STABLE = np.zeros(1 << 16, np.bool_)
for _first, _last in (
    (0xD000, 0xD1FF), (0xD790, 0xD7AA), (0xD8A0, 0xD98A), (0xE280, 0xE281), (0xE285, 0xE28B), (0xE28D, 0xE2AA),
    (0xE381, 0xE381), (0xE383, 0xE9FF), (0xEFBC, 0xEFBD), (0xF09F, 0xF09F),
):  # fmt: skip
    STABLE[_first : _last + 1] = True
"""By the first two bytes in UTF-8, frequent characters after COMPOSABLE that NFC neither changes nor moves, and composes only
with characters that are not listed: Cyrillic, letters of Hebrew and Arabic, punctuation such as quotes and dashes (of its
blanks, which all become one, NFC changes two), arrows and signs of mathematics, Kana, Han, full-width forms and emoji. Arrow
composes at 45 MB/s, so it is not asked where only these occur."""


@dataclass(frozen=True, slots=True)
class Units:
    """Units of some texts: `[bounds[i], bounds[i + 1])` (int64 [texts + 1]) of `hashes` (uint64) belong to text i,
    `kinds` (uint8) and `starts` (int64), the byte at which each begins.
    """

    hashes: np.ndarray
    kinds: np.ndarray
    starts: np.ndarray
    bounds: np.ndarray

    @property
    def by_kind(self) -> np.ndarray:
        """Units of each kind per text, int64 [texts, 4], in the order of `KINDS`."""
        counts = np.diff(self.bounds)
        other = np.flatnonzero(self.kinds)  # words, the kind 0, are the rest
        texts = np.searchsorted(self.bounds, other, side="right") - 1
        found = np.bincount(texts * len(KINDS) + self.kinds[other], minlength=len(counts) * len(KINDS))
        found = found.reshape(-1, len(KINDS))
        found[:, WORD] = counts - found.sum(axis=1)
        return found


def units_of(texts: pa.LargeStringArray) -> Units:
    """Return the units of texts in normal form."""
    return Units(*kernel.units(*content(texts), TABLE))


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the numbers of several ranges, one after the other, int64."""
    return np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


FACTORS = splitmix64(np.arange(256, 512, dtype=np.uint64)) | np.uint64(1)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(int(GOLDEN), -1, 1 << 64))

PARTS = 4
"""Units are weighed in these fractions of a word."""


@dataclass(frozen=True, slots=True)
class RunLength:
    """The length of a run in words.

    `characters`, `letters` and `pieces` are the numbers that weigh as much as a word (1, 2 or 4).
    """

    words: int
    characters: int = 1
    letters: int = 1
    pieces: int = 1

    @property
    def parts(self) -> int:
        """The length in parts of a word."""
        return self.words * PARTS

    @property
    def by_kind(self) -> np.ndarray:
        """The weights of units by kind in parts of a word, int64 [4]."""
        return PARTS // np.array([1, self.characters, self.letters, self.pieces])

    def weights(self, units: Units) -> np.ndarray:
        """Return the weight of each unit in parts of a word, int64."""
        return self.by_kind[units.kinds]


@dataclass(frozen=True, slots=True)
class Shingles:
    """Shingles of some texts, in reading order with repetitions: text i has the uint64
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
    """Runs of units: run j is the units `[starts[j], ends[j])` (int64); text i has the runs `[offsets[i], offsets[i +
    1])`. `whole` (bool) is false for a text that is shorter than a run.
    """

    starts: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray
    whole: np.ndarray


@dataclass(frozen=True, slots=True)
class Sums:
    """Prefix sums from which hashes of runs are computed.

    `sums` uint64 [units + 1] sum unit hashes times powers; `shifts` uint64 [units + 1] remove the position.
    """

    sums: np.ndarray
    shifts: np.ndarray

    @classmethod
    def of(cls, units: Units) -> Self:
        """Return the sums of some units."""
        count = len(units.hashes) + 1
        return cls(_prefixed(0, np.cumsum(units.hashes * _powers(GOLDEN, count)[:-1])), _powers(INVERSE, count))

    def hashes(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Hashes of runs, uint64; they depend only on the units of a run and their order."""
        return splitmix64((self.sums[ends] - self.sums[starts]) * self.shifts[starts])


def shingles(units: Units, length: RunLength) -> Shingles:
    """Return the shingles of texts, given their units."""
    return Shingles(*kernel.shingles(units.hashes, units.kinds, units.bounds, length.by_kind, length.parts))


def runs_of(units: Units, length: RunLength) -> Runs:
    """Return the runs of texts: from each unit, the fewest units that reach the length."""
    counts = np.diff(units.bounds)
    weights, places = length.weights(units), np.arange(len(units.kinds))
    if not weights.size or weights.min() == weights.max():  # all units weigh the same, as in most texts
        ends = places + length.parts // weights
    else:
        last = np.cumsum(weights) - weights + length.parts - 1
        ends = np.append(np.repeat(places, weights), len(places)).take(last, mode="clip") + 1
    stops = np.repeat(units.bounds[1:], counts)  # a run doesn't go on into the next text
    whole = ends <= stops
    first = units.bounds[:-1][counts > 0]
    short = first[~whole[first]]
    ends[short] = stops[short]  # a text that is shorter than a run is one run
    chosen = whole.copy()
    chosen[short] = True
    starts = np.flatnonzero(chosen)
    return Runs(starts, ends[starts], np.searchsorted(starts, units.bounds), whole[starts])


def combined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Hash several uint64 arrays of one shape element by element; the order of the arrays matters."""
    total = np.zeros_like(parts[0])
    for factor, part in zip(FACTORS, parts, strict=False):  # factors differ, so that the order counts
        total += part * factor
    return splitmix64(total)


def _powers(base: np.uint64, count: int) -> np.ndarray:
    """The powers 0, 1, ... of a number modulo 2**64, uint64 [count]."""
    return _prefixed(1, np.multiply.accumulate(np.full(count - 1, base, np.uint64)))


def _prefixed(first: int, rest: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full(1, first, rest.dtype), rest])


@dataclass(frozen=True, slots=True)
class Sets:
    """The shingle sets of some documents: document i has `[starts[i], starts[i + 1])` of the uint64 `members`,
    distinct and ascending.
    """

    members: np.ndarray
    starts: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Members per set, int64."""
        return np.diff(self.starts)

    def of(self, chosen: np.ndarray) -> Self:
        """Return the sets of some documents (int64 [n]), in their order."""
        sizes = self.sizes[chosen]
        members = self.members[ranges(self.starts[chosen], sizes)]
        return type(self)(members, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))


def sets_of(shingles: Shingles) -> Sets:
    """Return the sets of some documents."""
    return Sets(*kernel.distinct(shingles.hashes, shingles.offsets))


def similarities(sets: Sets, pairs: np.ndarray) -> np.ndarray:
    """Return the similarity of each pair, float64 [pairs]; `pairs` int64 [pairs, 2] are indices of sets that are not empty."""
    shared = kernel.common(sets.members, sets.starts, pairs)  # members ascend, so that two sets are merged
    return shared / (sets.sizes[pairs].sum(axis=1) - shared)


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
        """Return the differences of some sets; memory is a few times 8 bytes per difference and member."""
        # Members are numbered, so that arrays can be indexed by them.
        _, members, counts = np.unique(sets.members, return_inverse=True, return_counts=True)
        owners = np.repeat(np.arange(len(sets.sizes)), sets.sizes)
        usual = np.flatnonzero(2 * counts > len(sets.sizes))
        place = np.full(len(counts), -1)
        place[usual] = np.arange(len(usual))
        column = place[members]  # -1 for a member that few sets hold
        holds = np.zeros((len(sets.sizes), len(usual)), np.bool_)
        holds[owners[column >= 0], column[column >= 0]] = True
        lacking, lacked = np.nonzero(~holds)  # what a set lacks of the usual members is a difference, too
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
        """Return the number of differences each set shares with one of them, int64 [sets]."""
        # Few sets differ in a member, so this is far less than all pairs of members.
        mine = self.members[self.starts[one] : self.starts[one + 1]]
        others = self.owners[ranges(self.first[mine], self.first[mine + 1] - self.first[mine])]
        return np.bincount(others, minlength=len(self.lacks))
