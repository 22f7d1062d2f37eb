"""How tokenizers prepare text and cut it into pieces, apart from their tokens, so that two libraries can be compared.

A byte-level BPE normalizes, cuts by regular expressions, and merges within the pieces. The first two depend on tables
of Unicode and the third does not. So the first two are put here before other tokens than the tokenizer's own: before
single bytes, which show a normal form as it is, and before whatever shows where pieces end (`tasks.tokenize.suspects`).
"""

import base64
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gigatoken
import numpy as np
import orjson
import pyarrow as pa
import tiktoken
import tokenizers
from tokenizers import normalizers
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.storage import join

from .encoders import Encoder, GigatokenEncoder, ReferenceEncoder
from .tiktoken_json import byte_level_bpe

BYTES = {bytes([byte]): byte for byte in range(256)}

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}

BYTE_LEVEL_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What Hugging Face's ByteLevel cuts by without being told: GPT-2's expression (Radford et al. 2019)."""

NormalForm = Callable[[str], str]
"""Brings a text into the form that a tokenizer cuts."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """The way from a text to its pieces.

    `question` is what it is decided by: two tokenizers with the same one normalize and cut alike. `patterns()` are the
    regular expressions that cut, in order. `encoders(ranks)` makes the fast encoder and the reference that cut so but know
    other tokens: bytes with their ranks, of which the lowest merge first. Neither normalizes.
    `normal_forms()` is how the fast encoder and the reference normalize; None where they leave text as it is.
    """

    question: Sequence[Any]
    patterns: Callable[[], Sequence[str]]
    encoders: Callable[[Mapping[bytes, int]], tuple[Encoder, Encoder]]
    normal_forms: Callable[[], tuple[NormalForm, NormalForm]] | None = None


def huggingface_splitting(definition: Mapping[str, Any]) -> Splitting | None:
    """The splitting of a parsed tokenizer.json, or None when it is no byte-level BPE."""
    model, cutting, normalizer = (definition.get(part) or {} for part in ("model", "pre_tokenizer", "normalizer"))
    steps = list(_steps(cutting, "pretokenizers"))
    normalizes = any(_steps(normalizer, "normalizers"))
    if model.get("type", "BPE") != "BPE" or not any(step["type"] == "ByteLevel" for step in steps):
        return None

    def encoders(ranks: Mapping[bytes, int]) -> tuple[Encoder, Encoder]:
        made = _definition(ranks, cutting, None)
        return GigatokenEncoder(gigatoken.Tokenizer.from_json(made)), _reference(made)

    def normal_forms() -> tuple[NormalForm, NormalForm]:
        made = _definition(BYTES, BYTE_LEVEL, normalizer)
        fast = GigatokenEncoder(gigatoken.Tokenizer.from_json(made))
        reference: normalizers.Normalizer = tokenizers.Tokenizer.from_buffer(made).normalizer
        return partial(_decoded, fast), reference.normalize_str

    question = [cutting, normalizer if normalizes else None]
    return Splitting(question, lambda: list(_patterns(steps)), encoders, normal_forms if normalizes else None)


def tiktoken_splitting(name: str, pretokenizer: str) -> Splitting:
    """The splitting of a tiktoken encoding; `pretokenizer` is gigatoken's name for it."""

    def patterns() -> list[str]:
        return [tiktoken.get_encoding(name)._pat_str]  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    def encoders(ranks: Mapping[bytes, int]) -> tuple[Encoder, Encoder]:
        [pattern] = patterns()
        reference = tiktoken.Encoding("artificial", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={})
        lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
        with tempfile.TemporaryDirectory() as folder:
            place = join(folder, "artificial.tiktoken")  # gigatoken reads ranks from files only
            publish_bytes(place, b"".join(lines))
            fast = gigatoken.Tokenizer.from_tiktoken(place, pretokenizer, {})
        return GigatokenEncoder(fast), ReferenceEncoder(lambda texts: list(map(reference.encode_ordinary, texts)))

    return Splitting([name, pretokenizer], patterns, encoders)


def _steps(part: Mapping[str, Any], children: str) -> Iterator[Mapping[str, Any]]:
    """A pre-tokenizer of a tokenizer.json, or those of a sequence, in order."""
    if part.get("type", "Sequence") != "Sequence":
        yield part
    for child in part.get(children) or []:
        yield from _steps(child, children)


def _patterns(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for step in steps:
        pattern = step.get("pattern") or {}
        if "Regex" in pattern:
            yield pattern["Regex"]
        if "String" in pattern:
            yield re.escape(pattern["String"])
        if step["type"] == "ByteLevel" and step.get("use_regex", True):
            yield BYTE_LEVEL_PATTERN


def _definition(ranks: Mapping[bytes, int], cutting: Mapping[str, Any], normalizer: Mapping[str, Any] | None) -> bytes:
    """A tokenizer.json with other tokens."""
    definition = orjson.loads(byte_level_bpe(ranks).to_str())
    return orjson.dumps({**definition, "pre_tokenizer": cutting, "normalizer": normalizer})


def _reference(definition: bytes) -> ReferenceEncoder:
    tokenizer = tokenizers.Tokenizer.from_buffer(definition)
    return ReferenceEncoder(
        lambda texts: [each.ids for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    )


def _decoded(encoder: Encoder, text: str) -> str:
    """The text as an encoder whose tokens are BYTES has normalized it."""
    return encoder.encode(pa.array([text], pa.large_string())).ids.astype(np.uint8).tobytes().decode()
