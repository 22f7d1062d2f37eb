"""How tokenizers normalize and split text, independent of their tokens; and tiktoken encodings as tokenizer.json.

A byte-level BPE normalizes, cuts by regular expressions, and merges within the pieces. The first two steps depend on Unicode
tables, which may differ between libraries; merging does not. So the first two steps are run with artificial tokens: single
bytes, which show a normal form, and tokens that show where pieces end (`sweep`).

tiktoken merges the pair that gives the token of the lowest rank; a tokenizer.json lists pairs, and the first in the list merges
first. So every way to cut a token into two others is listed, in the order of the tokens' ranks. Neither merges a piece that is
itself a token. Bytes are written as the 256 printable characters of GPT-2 (Radford et al. 2019). For 200,000 tokens this takes
2 s and 9 MB.
"""

import base64
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import tiktoken
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.storage import join

from .added import FLAGS
from .encoders import Encoder, Loader, Ranks, ReferenceEncoder

BYTES = {bytes([byte]): byte for byte in range(256)}

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}

BYTE_LEVEL_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The default expression of Hugging Face's ByteLevel, from GPT-2 (Radford et al. 2019)."""

NFC = {"type": "NFC"}

NormalForm = Callable[[list[str]], Sequence[str]]
"""Normalizes texts."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a tokenizer normalizes and splits text.

    Tokenizers with the same `key` normalize and cut alike. `patterns()` are the regular expressions that cut, in order.
    `encoders(ranks)` makes a fast encoder and a reference that cut in this way but have other tokens: bytes with their
    ranks, of which the lowest merge first. Neither normalizes. `normal_forms()` are the normalizers of the fast encoder and
    of the reference; None if they do not normalize.
    """

    key: Sequence[Any]
    patterns: Callable[[], Sequence[str]]
    encoders: Callable[[Mapping[bytes, int]], tuple[Encoder, Encoder]]
    normal_forms: Callable[[], tuple[NormalForm, NormalForm]] | None = None


def huggingface_splitting(definition: Mapping[str, Any], engine: Loader) -> Splitting | None:
    """Return the splitting of a parsed tokenizer.json by an engine, or None if it is not a byte-level BPE."""
    model, cutting, normalizer = (definition.get(part) or {} for part in ("model", "pre_tokenizer", "normalizer"))
    steps = list(_steps(cutting, "pretokenizers"))
    normalizes = any(_steps(normalizer, "normalizers"))  # not by an empty sequence
    if model.get("type", "BPE") != "BPE" or not any(step["type"] == "ByteLevel" for step in steps):
        return None

    def encoders(ranks: Mapping[bytes, int]) -> tuple[Encoder, Encoder]:
        made = _definition(ranks, cutting, None)
        encode = tokenizers.Tokenizer.from_buffer(made).encode_batch_fast
        reference = ReferenceEncoder(lambda texts: [each.ids for each in encode(texts, add_special_tokens=False)])
        return engine.from_definition(made), reference

    def patterns() -> list[str]:
        found: list[str] = []
        for step in steps:
            pattern = step.get("pattern") or {}
            if "Regex" in pattern:
                found.append(pattern["Regex"])
            if "String" in pattern:
                found.append(re.escape(pattern["String"]))
            if step["type"] == "ByteLevel" and step.get("use_regex", True):
                found.append(BYTE_LEVEL_PATTERN)
        return found

    key = [cutting, normalizer if normalizes else None]
    normal_forms = partial(_normal_forms, engine, normalizer) if normalizes else None
    return Splitting(key, patterns, encoders, normal_forms)


def tiktoken_splitting(given: Ranks, engine: Loader) -> Splitting:
    """Return the splitting of a tiktoken encoding by an engine."""

    def encoders(ranks: Mapping[bytes, int]) -> tuple[Encoder, Encoder]:
        reference = tiktoken.Encoding(
            "artificial", pat_str=given.pattern(), mergeable_ranks=dict(ranks), special_tokens={}
        )
        lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
        with tempfile.TemporaryDirectory() as folder:
            place = join(folder, "artificial.tiktoken")  # engines read ranks from files only
            publish_bytes(place, b"".join(lines))
            fast = engine.from_ranks(replace(given, place=place, special={}))
        return fast, ReferenceEncoder(lambda texts: list(map(reference.encode_ordinary, texts)))

    return Splitting([given.encoding, given.pretokenizer], lambda: [given.pattern()], encoders)


def ranks_splitting(pattern: str, engine: Loader, *, nfc: bool) -> Splitting:
    """Return the splitting of a file of ranks by an engine, which reads it as a tokenizer.json."""

    def encoders(ranks: Mapping[bytes, int]) -> tuple[Encoder, Encoder]:
        encoding = tiktoken.Encoding("artificial", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={})
        fast = engine.from_definition(tiktoken_definition(encoding))
        return fast, ReferenceEncoder(lambda texts: list(map(encoding.encode_ordinary, texts)))

    def normal_forms() -> tuple[NormalForm, NormalForm]:
        fast, _ = _normal_forms(engine, NFC)
        return fast, lambda texts: [unicodedata.normalize("NFC", text) for text in texts]

    return Splitting(
        ["ranks", pattern, nfc and unicodedata.unidata_version],
        lambda: [pattern],
        encoders,
        normal_forms if nfc else None,
    )


def _normal_forms(engine: Loader, normalizer: Mapping[str, Any]) -> tuple[NormalForm, NormalForm]:
    """A normalizer of a tokenizer.json by an engine and by the reference."""
    made = _definition(BYTES, BYTE_LEVEL, normalizer)
    reference: normalizers.Normalizer = tokenizers.Tokenizer.from_buffer(made).normalizer
    fast = engine.from_definition(made)  # its tokens are BYTES

    def normalized(texts: list[str]) -> list[str]:
        tokens = fast.encode(pa.array(texts, pa.large_string()))  # in one call: it costs more than a short text
        content = tokens.ids.astype(np.uint8).tobytes()
        return [content[start:stop].decode() for start, stop in pairwise(tokens.offsets.tolist())]

    return normalized, lambda texts: list(map(reference.normalize_str, texts))


def _steps(part: Mapping[str, Any], children: str) -> Iterator[Mapping[str, Any]]:
    """The pre-tokenizers (or normalizers) of a tokenizer.json, in order."""
    if part.get("type", "Sequence") != "Sequence":
        yield part
    for child in part.get(children) or []:
        yield from _steps(child, children)


def _definition(ranks: Mapping[bytes, int], cutting: Mapping[str, Any], normalizer: Mapping[str, Any] | None) -> bytes:
    """A tokenizer.json with artificial tokens."""
    definition = orjson.loads(byte_level_bpe(ranks).to_str())
    return orjson.dumps({**definition, "pre_tokenizer": cutting, "normalizer": normalizer})


PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that are written as themselves; the others move beyond 0xFF, in order."""

POSSESSIVE = re.compile(r"(\\p\{\w+\}\{\d+,\d+\})\+")
"""A possessive bounded repetition. Oniguruma, which reads a tokenizer.json, would take the `+` as a second repetition."""


def tiktoken_definition(encoding: tiktoken.Encoding, *, nfc: bool = False) -> bytes:
    """Return the tokenizer.json that encodes like `encoding`, after NFC if asked; its control strings are special tokens."""
    ranks: Mapping[bytes, int] = encoding._mergeable_ranks  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    pattern = POSSESSIVE.sub(r"(?>\1)", encoding._pat_str)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    tokenizer = byte_level_bpe(ranks)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # A tokenizer.json has one string per id: of aliases, the one that the id decodes to.
    numbers = sorted({encoding.encode_single_token(token) for token in encoding.special_tokens_set})
    control = {encoding.decode([number]): number for number in numbers}
    definition = orjson.loads(tokenizer.to_str()) | ({"normalizer": NFC} if nfc else {})
    definition["model"]["vocab"] |= control  # else each would get the first free id, and encodings have gaps
    definition["added_tokens"] = [
        {"id": number, "content": token, **dict.fromkeys(FLAGS, False), "special": True}
        for token, number in control.items()
    ]
    return orjson.dumps(definition)


def byte_level_bpe(ranks: Mapping[bytes, int]) -> tokenizers.Tokenizer:
    """Return a tokenizer that merges by rank, without normalizing or cutting."""
    spelled = byte_letters()

    vocabulary = {token.decode("latin-1").translate(spelled): rank for token, rank in ranks.items()}
    merges: list[tuple[str, str]] = []
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        # Of two ways to make a token, tiktoken takes the one whose parts merged first.
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))


def byte_letters() -> dict[int, int]:
    """Return the code point of the letter that a byte-level BPE writes for each byte."""
    moved = [byte for byte in range(256) if byte not in PRINTABLE]
    return {byte: byte for byte in PRINTABLE} | {byte: 256 + place for place, byte in enumerate(moved)}
