"""Units: what a text is cut into before it is compared.

    word        what stands between blanks
    character   a Han character, a Kana or another wide one: their scripts part no words
    letter      a code point of Thai, Lao, Khmer, Burmese, Tibetan, Javanese and other scripts that part no words either
    piece       a part of a word of more than 40 characters: minified code, base64, a long URL

The unit is decided where it stands: each word and each character for itself, not the document as a whole. So an English
name in a Chinese text is one word, and two versions of a text are cut alike wherever they agree; a decision for a whole
document would tear near-duplicates apart that fall on two sides of it. How many units of each kind a document has is
recorded with its signatures.

A long word is cut where its own bytes say so, after one window of four bytes in four, so that pieces have some four
characters and an edit moves no more than the cuts beside it. What stands in no table here, such as a script that Unicode
will add, is cut into pieces if it has no blanks.

Blanks beside characters and letters mean nothing, and so do line breaks within a Chinese or a Thai text.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from tokenmill.tasks.pack.algorithms import splitmix64

from .documents import content

KINDS = ("words", "characters", "letters", "pieces")
WORD, CHARACTER, LETTER, PIECE = range(len(KINDS))

WIDE = (
    (0x3005, 0x302D), (0x3031, 0x312F), (0x3192, 0x3229), (0x3251, 0xA4CF), (0xF900, 0xFAD9), (0xFF10, 0xFF9F),
    (0x16FE0, 0x1B2FB), (0x20000, 0x3FFFF),
)  # fmt: skip
"""Code points of characters, both ends included: letters, marks and numbers whose East_Asian_Width (UAX #11) is wide, full
or half, but for Hangul, which has blanks. Ranges reach over unassigned code points, symbols and punctuation."""

WITHOUT_BLANKS = (
    (0x0E01, 0x109F), (0x1780, 0x17F9), (0x1950, 0x19FF), (0x1A20, 0x1AAD), (0x1B00, 0x1B7F), (0x1BC0, 0x1BFF),
    (0xA980, 0xAADF), (0x11000, 0x1107F), (0x11300, 0x113E2), (0x116D0, 0x11746), (0x11900, 0x11959),
    (0x11EE0, 0x11F5A), (0x16100, 0x16139),
)  # fmt: skip
"""Code points of letters: those of every script with letters of the Line_Break classes SA, AK or AS (UAX #14), in which
lines break where there is no blank, and of Tibetan. They are listed here, and not looked up, so that another version of a
Unicode library changes no signature."""

TABLE = np.zeros(0x40000, np.uint8)
for _kind, _ranges in ((CHARACTER, WIDE), (LETTER, WITHOUT_BLANKS)):
    for _first, _last in _ranges:
        TABLE[_first : _last + 1] = _kind

SPACE = ord(" ")
THREE_BYTES, FOUR_BYTES = 0xE0, 0xF0
"""The least first bytes of code points that take so many in UTF-8. Every script without blanks takes three or four."""

CONTINUES = 0x80
"""The two highest bits of a byte that begins no character."""

LONGEST_WORD = 40
"""Characters. A UUID or a SHA-1 in a text remains one word."""

WINDOW = 4
"""Bytes before a cut that decide about it."""

EIGHT = 8
MASKS = np.array([(1 << 8 * count) - 1 for count in range(EIGHT + 1)], np.uint64)
"""What leaves so many bytes of eight, the first ones."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of some texts: those of text i are `[bounds[i], bounds[i + 1])` (int64 [texts + 1]) of `hashes`
    (uint64), `kinds` (uint8) and `starts` (int64), the byte at which each begins.
    """

    hashes: np.ndarray
    kinds: np.ndarray
    starts: np.ndarray
    bounds: np.ndarray

    @property
    def by_kind(self) -> np.ndarray:
        """How many units of each kind a text has, int64 [texts, 4], as `KINDS`."""
        counts = np.diff(self.bounds)
        other = np.flatnonzero(self.kinds)
        texts = np.searchsorted(self.bounds, other, side="right") - 1
        found = np.bincount(texts * len(KINDS) + self.kinds[other], minlength=len(counts) * len(KINDS))
        found = found.reshape(-1, len(KINDS))
        found[:, WORD] = counts - found.sum(axis=1)
        return found


def units_of(texts: pa.LargeStringArray) -> Units:
    """The units of texts whose words are parted by one blank, as `normalized` makes them."""
    characters, bounds = content(texts)
    begins = np.zeros(len(characters) + 1, np.bool_)
    blanks = np.flatnonzero(characters == SPACE)
    begins[blanks + 1] = True
    begins[bounds[:-1]] = True
    places, kinds = _without_blanks(characters, begins)
    begins[blanks] = False  # after a character that has a blank behind it
    begins[len(characters) :] = False  # where empty texts at the end begin
    starts, kinds = _cut_long(characters, begins, places, kinds)
    return Units(_hashes(characters, starts), kinds, starts, np.searchsorted(starts, bounds))


def _hashes(characters: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The hash of each unit without the blank after it, uint64: its bytes, eight at a time, and their number."""
    ends = np.append(starts[1:], len(characters))[: len(starts)]
    lengths = ends - starts
    lengths -= characters[ends - 1] == SPACE
    padded = np.append(characters, np.zeros(EIGHT, np.uint8))
    eights = np.ndarray((len(characters) + 1,), "<u8", padded, strides=(1,))  # those that begin at each byte
    hashes = splitmix64(eights[starts] & MASKS[np.minimum(lengths, EIGHT)]) + lengths.astype(np.uint64)
    long = np.flatnonzero(lengths > EIGHT)
    if long.size:
        more = lengths[long] - 1 >> 3
        owners = np.repeat(np.arange(len(long)), more)
        done = EIGHT + EIGHT * ranges(np.zeros(len(long), np.int64), more)
        rest = eights[starts[long][owners] + done] & MASKS[np.minimum(lengths[long][owners] - done, EIGHT)]
        hashes[long] += np.add.reduceat(splitmix64(rest ^ splitmix64(done.astype(np.uint64))), np.cumsum(more) - more)
    return splitmix64(hashes)


def _without_blanks(characters: np.ndarray, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where characters and letters stand, and which of the two each is; `begins` learns that units begin with them and
    after them.
    """
    leads = np.flatnonzero(characters >= THREE_BYTES)
    first, *rest = (characters.take(leads + place, mode="clip").astype(np.int32) for place in range(4))
    second, third, fourth = (each & 0x3F for each in rest)
    long = first >= FOUR_BYTES
    codes = (first & 0xF) << 12 | second << 6 | third
    codes = np.where(long, (first & 0x7) << 18 | second << 12 | third << 6 | fourth, codes)
    kinds = TABLE.take(codes, mode="clip")
    kinds[codes >= len(TABLE)] = WORD
    places = leads[kinds > 0]
    begins[places] = True
    begins[places + np.where(long[kinds > 0], 4, 3)] = True
    return places, kinds[kinds > 0]


def _cut_long(
    characters: np.ndarray, begins: np.ndarray, places: np.ndarray, kinds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where units begin once long words are cut, and of which kind each is."""
    starts = np.flatnonzero(begins)
    of_unit = np.zeros(len(starts), np.uint8)
    of_unit[np.searchsorted(starts, places)] = kinds
    lengths = np.diff(starts, append=len(characters))
    long = np.flatnonzero((lengths > LONGEST_WORD) & (of_unit == WORD))
    long = long[_characters_in(characters, starts[long], lengths[long]) > LONGEST_WORD]
    if not long.size:
        return starts, of_unit
    of_unit[long] = PIECE
    cuts = _cuts(characters, starts[long], lengths[long])
    after = np.searchsorted(starts, cuts)
    return np.insert(starts, after, cuts), np.insert(of_unit, after, PIECE)


def _characters_in(characters: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """How many characters words have, given their bytes with the blank behind them."""
    begin = _begins_character(characters[ranges(starts, lengths)])
    return np.add.reduceat(begin, np.cumsum(lengths) - lengths, dtype=np.int64) if lengths.size else lengths


def _cuts(characters: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Where pieces of long words begin but for the first of each, ascending."""
    inside = ranges(starts + WINDOW, lengths - WINDOW)
    inside = inside[_begins_character(characters[inside])]
    window = np.zeros(len(inside), np.uint32)
    for place in range(1, WINDOW + 1):
        window = window << np.uint32(8) | characters[inside - place]
    return inside[window * np.uint32(0x9E3779B1) >> np.uint32(30) == 0]


def _begins_character(some: np.ndarray) -> np.ndarray:
    """Which bytes begin a character that is no blank."""
    return (some & 0xC0 != CONTINUES) & (some != SPACE)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers of some ranges, one range after the other, int64."""
    return np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
