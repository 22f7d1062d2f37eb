"""The exact encoder: gigatoken for what it was seen to encode like the reference, the reference for the rest.

Tokenizers split and normalize text by Unicode tables, and two libraries rarely ship the same year's. For the letters
and marks of recent Unicode versions gigatoken then gives other ids than the reference (4,787 code points for DeepSeek's
tokenizer, 157 for Qwen's, none for o200k). So every code point of the planes in use is encoded both ways once, in
strings that provoke splitting and reordering, and documents that hold one on which the two differ, some in a million,
go to the reference.

The sweep costs two or three seconds, once per tokenizer and machine: its result is kept in the user's cache, keyed by the
tokenizer's content and the versions of the libraries. Looking for the characters costs a comparison per byte, and
decoding those that are high enough.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version

import numpy as np
import orjson
import pyarrow as pa

from tasks.shards.remembered import remembered
from tasks.storage import user_cache
from tasks.tokenize.encoders import Encoder, Tokens
from tasks.tokenize.vocabulary import Vocabulary

PATTERNS = (" {0}{0}b", "{0}a", "e{0}\u0334")
"""A letter or not, after a space or at the start of a line; and a mark that has to change places with an overlay (the
lowest combining class there is) if both libraries know it as a mark."""

CODE_POINTS = (range(0x80, 0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE0200))
"""Everything that is or may soon be assigned, apart from surrogates and private planes."""

OF_THREE_BYTES, OF_FOUR_BYTES = 0xE0, 0xF0
"""The lowest lead bytes of characters of three and four bytes in UTF-8."""

GROUP = 256
"""Characters per string: the encoders are compared string by string, and only strings that differ are divided."""

Ranges = list[tuple[int, int]]

LIBRARIES = ("gigatoken", "tokenizers", "tiktoken", "sentencepiece")


@dataclass(frozen=True)
class ExactEncoder:
    """Encodes with `fast`, except texts with a character of `suspects` (ascending), which `reference` encodes."""

    fast: Encoder
    reference: Callable[[], Encoder]
    suspects: Sequence[int]

    def encode(self, texts: pa.LargeStringArray) -> Tokens:
        """See Encoder."""
        tokens = self.fast.encode(texts)
        rows = self._suspicious(texts)
        return _replaced(tokens, rows, self.reference().encode(texts.take(pa.array(rows)))) if rows.size else tokens

    def _suspicious(self, texts: pa.LargeStringArray) -> np.ndarray:
        """The numbers of the texts that hold a suspect, int64, ascending."""
        _, offsets, characters = texts.buffers()
        if not self.suspects or characters is None:
            return np.empty(0, np.int64)
        bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        content = np.frombuffer(characters, np.uint8)[bounds[0] : bounds[-1]]
        leads = np.flatnonzero(content >= self._lowest_lead_byte)
        places = leads[self._is_suspect[_code_points(content, leads)]]
        return np.unique(np.searchsorted(bounds - bounds[0], places, side="right") - 1)

    @cached_property
    def _lowest_lead_byte(self) -> int:
        return chr(self.suspects[0]).encode()[0]

    @cached_property
    def _is_suspect(self) -> np.ndarray:
        table = np.zeros(sys.maxunicode + 1, np.bool_)
        table[np.asarray(self.suspects, np.int64)] = True
        return table


def _code_points(content: np.ndarray, leads: np.ndarray) -> np.ndarray:
    """The code points, int32, that begin at the byte offsets `leads` of valid UTF-8, beyond ASCII (RFC 3629)."""
    first = content[leads].astype(np.int32)
    one, two, three = (
        content[np.minimum(leads + step, len(content) - 1)].astype(np.int32) & 0x3F for step in (1, 2, 3)
    )
    of_two = (first & 0x1F) << 6 | one
    of_three = (first & 0x0F) << 12 | one << 6 | two
    of_four = (first & 0x07) << 18 | one << 12 | two << 6 | three
    return np.where(first < OF_THREE_BYTES, of_two, np.where(first < OF_FOUR_BYTES, of_three, of_four))


def _ranges(numbers: Iterable[int]) -> Ranges:
    """Ascending numbers as inclusive ranges."""
    ranges: Ranges = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def _replaced(tokens: Tokens, rows: np.ndarray, better: Tokens) -> Tokens:
    """`tokens` with the ids of the texts numbered `rows` (ascending) replaced by those of `better`, in order."""
    lengths = tokens.lengths
    lengths[rows] = better.lengths
    pieces: list[np.ndarray] = []
    end = 0
    for place, row in enumerate(rows.tolist()):
        pieces += [tokens.ids[end : tokens.offsets[row]], better.ids[better.offsets[place] : better.offsets[place + 1]]]
        end = tokens.offsets[row + 1]
    ids = np.concatenate([*pieces, tokens.ids[end:]])
    return Tokens(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), by_reference=len(rows))


@lru_cache(maxsize=8)
def exact_encoder(vocabulary: Vocabulary, *, literal: bool) -> ExactEncoder:
    """The exact encoder of a vocabulary, made once. Raises ValueError when gigatoken does not support its kind."""
    fast = vocabulary.fast(literal)
    return ExactEncoder(fast, lambda: vocabulary.reference(literal), _remembered_suspects(vocabulary, literal=literal))


def _remembered_suspects(vocabulary: Vocabulary, *, literal: bool) -> list[int]:
    question = [vocabulary.fingerprint, literal, PATTERNS, [version(library) for library in LIBRARIES]]
    name = hashlib.sha256(orjson.dumps(question)).hexdigest()[:32]
    place = user_cache("characters", f"{name}.json")
    ranges = remembered(
        place, Ranges, lambda: _ranges(suspects(vocabulary.fast(literal), vocabulary.reference(literal)))
    )
    return [number for first, last in ranges for number in range(first, last + 1)]


def suspects(fast: Encoder, reference: Encoder) -> list[int]:
    """The code points that the two encoders treat differently in one of PATTERNS, ascending."""
    return sorted({number for pattern in PATTERNS for number in _differing(pattern, fast, reference)})


def _differing(pattern: str, fast: Encoder, reference: Encoder) -> Iterator[int]:
    numbers = [number for planes in CODE_POINTS for number in planes]
    groups = [numbers[start : start + GROUP] for start in range(0, len(numbers), GROUP)]
    while groups:
        different = _different_groups(pattern, groups, fast, reference)
        yield from (group[0] for group in different if len(group) == 1)
        groups = [part for group in different if len(group) > 1 for part in _quarters(group)]


def _quarters(group: Sequence[int]) -> list[Sequence[int]]:
    size = max(1, len(group) // 4)
    return [group[start : start + size] for start in range(0, len(group), size)]


def _different_groups(
    pattern: str, groups: Sequence[Sequence[int]], fast: Encoder, reference: Encoder
) -> list[Sequence[int]]:
    texts = pa.array(["\n".join(pattern.format(chr(each)) for each in group) for group in groups], pa.large_string())
    one, other = fast.encode(texts), reference.encode(texts)
    pairs = zip(groups, _documents(one), _documents(other), strict=True)
    return [group for group, left, right in pairs if not np.array_equal(left, right)]


def _documents(tokens: Tokens) -> list[np.ndarray]:
    return np.split(tokens.ids, tokens.offsets[1:-1])
