"""The exact encoder: an engine for most documents, the reference for documents on which the two may differ.

A document is encoded by the reference if it contains a suspect, a character that the two libraries treat differently (`sweep`;
between gigatoken 0.10 and tokenizers 0.23 up to 4,826, nearly all new in Unicode 17; none for fastokens 0.3), a character that was
never compared, from unassigned planes or the last two private ones, or a tangle of added tokens (`added`).

Suspects are cached per user, keyed by how a tokenizer normalizes and cuts text, which many tokenizers share, and by the
versions of the libraries. Finding them in a text costs a comparison per byte and a look-up per high character; if many
characters are high, a regular expression finds suspects at about 450 MB/s.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from importlib.metadata import version

import numpy as np
import orjson
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.shards.store import remembered
from tokenmill.tasks.storage import user_cache

from .encoders import Encoder, RenewedEncoder, Tokens, return_freed_memory, utf8_of
from .settings import Backend, Engine
from .sweep import SWEEP_VERSION, SWEPT, suspect_characters
from .vocabulary import Vocabulary

ASCII, SURROGATES = range(0x80), range(0xD800, 0xE000)

OF_THREE_BYTES, OF_FOUR_BYTES = 0xE0, 0xF0
"""The lowest lead bytes of characters of three and four bytes in UTF-8."""

SPARSE = 16
"""If fewer than one byte in this many may begin a suspect, look up characters one by one."""

LIBRARIES = ("gigatoken", "fastokens", "tokenizers", "tiktoken", "sentencepiece")


@dataclass(frozen=True)
class ExactEncoder:
    """Encodes with `fast`, but with `reference` if a text contains one of `suspects`, a character outside the sweep, or a match of
    `tangles`, regular expressions.
    """

    fast: Encoder
    reference: Callable[[], Encoder]
    suspects: Sequence[int]
    tangles: Sequence[str] = field(default=())

    def encode(self, texts: pa.LargeStringArray) -> Tokens:
        try:
            tokens = self.fast.encode(texts)
        except ValueError:  # fastokens gives up on a text for which a regular expression takes too many steps
            if len(texts) == 1:
                return replace(self.reference().encode(texts), by_reference=1)
            middle = len(texts) // 2  # halves find the text in a few calls, and keep the engine for all others
            one, other = self.encode(texts[:middle]), self.encode(texts[middle:])
            offsets = np.concatenate([one.offsets, one.offsets[-1] + other.offsets[1:]])
            return Tokens(np.concatenate([one.ids, other.ids]), offsets, one.by_reference + other.by_reference)
        rows = self._suspicious(texts)
        if self.tangles:
            tangled = compute.MatchSubstringOptions("|".join(self.tangles))
            rows = np.union1d(rows, np.flatnonzero(_matches(texts, tangled)))
        return replaced(tokens, rows, self.reference().encode(texts.take(pa.array(rows)))) if rows.size else tokens

    def _suspicious(self, texts: pa.LargeStringArray) -> np.ndarray:
        """The numbers of the texts that contain a suspect, int64, ascending."""
        if not len(texts):
            return np.empty(0, np.int64)
        bounds, content = utf8_of(texts)
        content = content[bounds[0] : bounds[-1]]
        # Of ordinary text, most bytes are below the first byte of any suspect.
        high = content >= chr(int(self._is_suspect.argmax())).encode()[0]
        if np.count_nonzero(high) > len(content) / SPARSE:  # Arrow's expression is faster than many look-ups
            return np.flatnonzero(_matches(texts, self._any_suspect))
        leads = np.flatnonzero(high)
        places = leads[self._is_suspect[_code_points(content, leads)]]
        return np.unique(np.searchsorted(bounds - bounds[0], places, side="right") - 1)

    @cached_property
    def _any_suspect(self) -> compute.MatchSubstringOptions:
        edges = np.flatnonzero(np.diff(self._is_suspect, prepend=False, append=False)).tolist()
        ranges = zip(edges[::2], edges[1::2], strict=True)
        characters = "".join(f"{chr(first)}-{chr(behind - 1)}" for first, behind in ranges)
        return compute.MatchSubstringOptions(f"[{characters}]")

    @cached_property
    def _is_suspect(self) -> np.ndarray:
        """By code point. Characters outside the sweep are suspect, except ASCII, which the gate tests."""
        table = np.ones(sys.maxunicode + 1, np.bool_)
        for known in (ASCII, SURROGATES, *SWEPT):
            table[known.start : known.stop] = False
        table[np.asarray(self.suspects, np.int64)] = True
        return table


def _matches(texts: pa.LargeStringArray, pattern: compute.MatchSubstringOptions) -> np.ndarray:
    """Whether each text matches a regular expression, bool."""
    return compute.call_function("match_substring_regex", [texts], pattern).to_numpy(zero_copy_only=False)


def _code_points(content: np.ndarray, leads: np.ndarray) -> np.ndarray:
    """The code points, int32, beyond ASCII at the byte offsets `leads` of valid UTF-8 (RFC 3629)."""
    first = content[leads].astype(np.int32)
    # All three following bytes are read for every character; those behind a shorter one aren't used.
    one, two, three = (
        content[np.minimum(leads + step, len(content) - 1)].astype(np.int32) & 0x3F for step in (1, 2, 3)
    )
    of_two = (first & 0x1F) << 6 | one
    of_three = (first & 0x0F) << 12 | one << 6 | two
    of_four = (first & 0x07) << 18 | one << 12 | two << 6 | three
    return np.where(first < OF_THREE_BYTES, of_two, np.where(first < OF_FOUR_BYTES, of_three, of_four))


def replaced(tokens: Tokens, rows: np.ndarray, better: Tokens) -> Tokens:
    """Return `tokens` with the ids of the texts numbered `rows` (ascending) replaced by `better`'s, in order."""
    lengths = tokens.lengths
    lengths[rows] = better.lengths
    pieces: list[np.ndarray] = []
    end = 0
    for place, row in enumerate(rows.tolist()):
        pieces += [tokens.ids[end : tokens.offsets[row]], better.ids[better.offsets[place] : better.offsets[place + 1]]]
        end = tokens.offsets[row + 1]
    ids = np.concatenate([*pieces, tokens.ids[end:]])
    return Tokens(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), by_reference=len(rows))


def encoder_of(vocabulary: Vocabulary, backend: Backend, *, literal: bool) -> Encoder:
    """Return the encoder of a vocabulary that the gate chose. Raises ValueError as `exact_encoder` does."""
    if backend == "reference":
        return vocabulary.reference(literal)
    return exact_encoder(vocabulary, backend, literal=literal)


@lru_cache(maxsize=8)
def exact_encoder(vocabulary: Vocabulary, engine: Engine, *, literal: bool) -> ExactEncoder:
    """Return the exact encoder of a vocabulary by an engine, built once.

    Raises ValueError if the engine does not support the vocabulary, or differs in ways not explained by single characters.
    """
    fast = RenewedEncoder(partial(vocabulary.fast, engine, literal))
    tangles = vocabulary.added.tangles(literal=literal)
    return ExactEncoder(fast, lambda: vocabulary.reference(literal), _suspects_of(vocabulary, engine), tangles)


def forget_encoders() -> None:
    """Free all encoders of this process, about 100 to 500 MB each. The next one is loaded again, which takes a second."""
    exact_encoder.cache_clear()
    return_freed_memory()


def _suspects_of(vocabulary: Vocabulary, engine: Engine) -> list[int]:
    """The suspects, cached per user for all tokenizers with the same splitting."""
    splitting = vocabulary.splitting(engine)
    cutting = splitting.key if splitting else vocabulary.fingerprint
    key = [engine, cutting, *vocabulary.added.stripping(), SWEEP_VERSION, [version(library) for library in LIBRARIES]]
    name = hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]
    return remembered(
        user_cache("characters", f"{name}.json"), list[int], lambda: suspect_characters(vocabulary, engine)
    )
