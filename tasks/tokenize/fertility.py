"""How well a vocabulary fits texts: fertility, byte fallback, long tokens, control strings in text, speed.

Fertility is the number of tokens per byte, character or word; words are separated by whitespace, so the number for languages
without spaces means little. A token that isn't a whole character means that the vocabulary doesn't know how its text is
spelled: a `<0x..>` piece of SentencePiece, or bytes of a byte-level BPE that aren't UTF-8. Which ids these are, and which represent
for at least LONG_BYTES bytes, is found out once per vocabulary; then a text costs two look-ups per token, which is little beside
encoding it. Texts are encoded as in a preparation: by the engine that the gate chose, and control strings in them as text.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from pyarrow import compute

from .encoders import Encoder
from .splitting import byte_letters
from .vocabulary import Vocabulary

LONG_BYTES = 16
"""A token of at least so many bytes is a long one: two or three words, or indentation."""

BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
SPACE = "\u2581"
"""What SentencePiece writes for a space."""

BYTES_OF_LETTERS = {letter: byte for byte, letter in byte_letters().items()}

WORD = compute.MatchSubstringOptions(f"[^{re.escape(''.join(filter(str.isspace, map(chr, range(0x3001)))))}]+")
"""Finds what Python's `str.split` separates. With Arrow 26.0, the result of `utf8_split_whitespace` changes from call to call for
some texts that end with white space."""


@dataclass(frozen=True, slots=True)
class TextCounts:
    """The size of some texts: documents, UTF-8 bytes, characters, words."""

    documents: int = 0
    size: int = 0
    characters: int = 0
    words: int = 0

    def __add__(self, other: "TextCounts") -> "TextCounts":
        return TextCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The counts of a vocabulary for some texts.

    `fallback` counts tokens that aren't whole characters, `long` tokens of at least LONG_BYTES bytes, `controls` the control
    strings that the texts contain. `seconds` is the CPU time of encoding.
    """

    tokens: int = 0
    fallback: int = 0
    long: int = 0
    controls: int = 0
    seconds: float = 0.0

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class TokenKinds:
    """The kinds of a vocabulary's tokens, bool [size], and what finds its control strings in text, None if it has none."""

    fallback: np.ndarray
    long: np.ndarray
    controls: compute.MatchSubstringOptions | None


def kinds_of(vocabulary: Vocabulary) -> TokenKinds:
    """Return the kinds of all tokens of a vocabulary; takes 0.5 s, and 2 s more for an encoding of tiktoken."""
    fallback, long = (np.zeros(vocabulary.size, np.bool_) for _ in range(2))
    for number, (spelled, is_byte) in token_bytes(orjson.loads(vocabulary.definition())).items():
        # Lossy decoding changes exactly those bytes that aren't UTF-8.
        fallback[number] = is_byte or spelled.decode(errors="ignore").encode() != spelled
        long[number] = len(spelled) >= LONG_BYTES
    pattern = "|".join(map(re.escape, vocabulary.special_tokens))
    return TokenKinds(fallback, long, compute.MatchSubstringOptions(pattern) if pattern else None)


def token_bytes(definition: Mapping[str, Any]) -> dict[int, tuple[bytes, bool]]:
    """Return the bytes of each token of a parsed tokenizer.json, by id, and whether it is a piece for a byte."""
    model, added = definition["model"], definition.get("added_tokens") or []
    listed = model["vocab"]
    pieces = listed.items() if isinstance(listed, dict) else ((piece, at) for at, (piece, _) in enumerate(listed))
    parts: Sequence[Mapping[str, Any]] = [definition.get(name) or {} for name in ("pre_tokenizer", "decoder")]
    steps = [step for part in parts for step in [part, *part.get("pretokenizers", []), *part.get("decoders", [])]]
    is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    found: dict[int, tuple[bytes, bool]] = {}
    for piece, number in pieces:
        if not is_byte_level:
            byte = BYTE_PIECE.fullmatch(piece)
            found[number] = (bytes([int(byte[1], 16)]), True) if byte else (piece.replace(SPACE, " ").encode(), False)
            continue
        try:
            found[number] = piece.translate(BYTES_OF_LETTERS).encode("latin-1"), False
        except UnicodeEncodeError:  # a control string, which is written as it is
            found[number] = piece.encode(), False
    return found | {token["id"]: (token["content"].encode(), False) for token in added}


def count_texts(texts: pa.LargeStringArray) -> TextCounts:
    """Return the size of a batch of texts."""
    counts = [compute.call_function(name, [texts]) for name in ("binary_length", "utf8_length")]
    counts.append(compute.call_function("count_substring_regex", [texts], WORD))
    return TextCounts(len(texts), *(compute.call_function("sum", [each]).as_py() or 0 for each in counts))


def count_tokens(texts: pa.LargeStringArray, encoder: Encoder, kinds: TokenKinds) -> TokenCounts:
    """Count a batch of texts with a vocabulary."""
    started = time.process_time()
    ids = encoder.encode(texts).ids
    seconds = time.process_time() - started
    controls = 0
    if kinds.controls is not None:
        found = compute.call_function("count_substring_regex", [texts], kinds.controls)
        controls = compute.call_function("sum", [found]).as_py() or 0
    fallback, long = (int(np.count_nonzero(mask[ids])) for mask in (kinds.fallback, kinds.long))
    return TokenCounts(len(ids), fallback, long, controls, seconds)
