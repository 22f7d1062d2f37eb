"""What quality rules compare, counted for many texts at a time by `kernel.c`.

Words follow spaCy's rules for English, which datatrove's filters use; `english.json` has these rules as data (classes of
characters, special cases, units), so that the words of a text do not depend on installed versions. Counting everything takes
about 60 ns per byte, half of it for repeated runs of words. Other threads run meanwhile.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.ctypeslib import ndpointer
from tokenmill.tasks.dedup.documents import content
from tokenmill.tasks.runtime import load

CLASSES = (
    *("space", "line_break", "alpha", "lower", "upper", "quote", "prefix", "suffix", "icon", "before_dot", "host"),
    *("scheme", "digit", "letter", "symbol", "punctuation", "sentence_end", "line_end"),
)
"""Classes of characters; class n is bit n."""

COUNTS = (
    *("characters", "words", "plain_words", "plain_characters", "hashes", "ellipses", "lines", "bullet_lines"),
    *("ellipsis_lines", "alphabetic_words", "stop_words", "paragraphs", "repeated_paragraphs"),
    *("repeated_paragraph_characters", "blocks", "repeated_blocks", "repeated_block_characters", "new_lines"),
    *("filled_lines", "ended_lines", "short_lines", "repeated_line_characters", "sentences", "lorem_ipsum"),
    *("curly_bracket", "long_word", "no_terminal_punctuation", "too_few_words", "javascript", "policy"),
)
"""The counts of a text, in the order of `kernel.c`."""

FAMILIES = {"gopher_quality": 1, "gopher_repetition": 2, "c4": 4, "fineweb": 8}

CODE_POINTS = 0x110000

_FOLDER = Path(__file__).parent


_KERNEL = load(__file__)
_BYTE, _NUMBER, _HALF = (ndpointer(kind, ndim=1, flags="C_CONTIGUOUS") for kind in (np.uint8, np.int64, np.uint32))
_COUNT = ctypes.c_int64
_KERNEL.measure.argtypes = [
    *(_BYTE, _NUMBER, _COUNT, _HALF, _HALF, _NUMBER, _NUMBER, _NUMBER, _NUMBER),
    *(_COUNT, _NUMBER, _NUMBER, _COUNT, _COUNT, _NUMBER, _BYTE, _NUMBER),
]
_KERNEL.measure.restype = _COUNT


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to count, as choices of `settings.Rules`.

    `families` are names from FAMILIES; `limits` the line limits, in the order of `kernel.c`; `top` and `repeated` are the sizes of
    runs of words, ascending.
    """

    families: Sequence[str]
    limits: Sequence[int]
    top: Sequence[int]
    repeated: Sequence[int]
    stop_words: Sequence[str]
    phrases: Sequence[str]
    line_ends: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Counts of n texts, int64 [n] each, by name (`top_2`, `repeated_5` and so on for runs of words), and the lines to keep."""

    counts: Mapping[str, np.ndarray]
    cleaned: pa.LargeStringArray


def measure(texts: pa.LargeStringArray, wanted: Wanted) -> Measured:
    """Count what rules compare in each text. Raises MemoryError."""
    characters, bounds = content(texts)
    tables = _tables(tuple(wanted.stop_words), tuple(wanted.phrases), wanted.line_ends)
    sizes = np.array([*wanted.top, *wanted.repeated], np.int64)
    found = np.empty((len(texts), len(COUNTS) + len(sizes)), np.int64)
    cleaned, cleaned_bounds = np.empty(len(characters) + 1, np.uint8), np.empty(len(bounds), np.int64)
    families = sum(FAMILIES[name] for name in wanted.families)
    failed = _KERNEL.measure(
        *(characters, bounds, len(texts), *tables, families, np.array(wanted.limits, np.int64)),
        *(sizes, len(wanted.top), len(sizes), found.reshape(-1), cleaned, cleaned_bounds),
    )
    if failed:
        raise MemoryError(f"no memory for the words of {len(texts)} texts with {len(characters):,} bytes")
    names = [*COUNTS, *(f"top_{size}" for size in wanted.top), *(f"repeated_{size}" for size in wanted.repeated)]
    kept = pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(cleaned_bounds), pa.py_buffer(cleaned))
    return Measured(dict(zip(names, found.T, strict=True)), kept)


@cache
def _english() -> Mapping[str, Any]:
    return orjson.loads((_FOLDER / "english.json").read_bytes())


def default_line_ends() -> str:
    """Return the characters that end a sentence in any script."""
    return _english()["line_ends"]


@cache
def _tables(stop_words: Sequence[str], phrases: Sequence[str], line_ends: str) -> Sequence[np.ndarray]:
    """The arguments of `measure` that texts do not change: classes of characters; strings, and the bounds of each and of each set
    of them; the sizes of the pieces of special cases, and the bounds of each case.
    """
    english = _english()
    pieces: list[list[str]] = english["specials"]
    sets = [["".join(parts) for parts in pieces], english["units"], stop_words, phrases]
    strings = list(chain.from_iterable(sets))  # one after the other, as C takes them
    ranges = {**english["classes"], "line_end": [(ord(char), ord(char)) for char in line_ends]}
    classes = np.zeros(2 * CODE_POINTS, np.uint32)  # twice as many, so that no damaged text can lead outside
    for bit, name in enumerate(CLASSES):
        for first, last in ranges[name]:
            classes[first : last + 1] |= np.uint32(1 << bit)
    return (
        classes,
        np.frombuffer("".join(strings).encode("utf-32-le"), np.uint32),
        _bounds([len(string) for string in strings]),
        _bounds([len(each) for each in sets]),
        np.array([len(part) for parts in pieces for part in parts], np.int64),
        _bounds([len(parts) for parts in pieces]),
    )


def _bounds(lengths: Sequence[int]) -> np.ndarray:
    return np.array([0, *accumulate(lengths)], np.int64)
