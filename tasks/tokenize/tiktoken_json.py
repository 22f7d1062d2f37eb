"""A tiktoken encoding as the tokenizer.json of Hugging Face's libraries, for models that are published with theirs.

tiktoken merges whatever makes the token of the lowest rank; a tokenizer.json lists pairs, of which the first in the list
is merged first. So every way to cut a token into two others is listed, in the order of the tokens' ranks. A piece of text
that is a token as a whole is not merged at all by either. Bytes are spelled with the 256 printable characters of GPT-2
(Radford et al. 2019). For 200,000 tokens this takes 2 s and 9 MB.
"""

import re
from collections.abc import Iterator, Mapping

import orjson
import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that stand for themselves; the others are moved behind 0xFF, in order."""

POSSESSIVE = re.compile(r"(\\p\{\w+\}\{\d+,\d+\})\+")
"""What is repeated so often and gives nothing back. In a tokenizer.json's kind of patterns it would be repeated again."""


def tiktoken_definition(encoding: tiktoken.Encoding) -> bytes:
    """The tokenizer.json that encodes as `encoding` does; its control strings are special tokens."""
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
    # Of two strings for one id, which a tokenizer.json cannot have, the one that the id is written out as.
    numbers = sorted({encoding.encode_single_token(token) for token in encoding.special_tokens_set})
    control = {encoding.decode([number]): number for number in numbers}
    definition = orjson.loads(tokenizer.to_str())
    definition["model"]["vocab"] |= control  # or each would get the first id that is free, and encodings have gaps
    definition["added_tokens"] = [
        {"id": number, "content": token, "special": True, **dict.fromkeys(FLAGS, False)}
        for token, number in control.items()
    ]
    return orjson.dumps(definition)


def byte_level_bpe(ranks: Mapping[bytes, int]) -> tokenizers.Tokenizer:
    """A tokenizer that merges what makes the token of the lowest rank, with nothing before the merging."""
    spelled = _alphabet()

    def text(token: bytes) -> str:
        return token.decode("latin-1").translate(spelled)

    merges = [(text(left), text(right)) for left, right in _merges(ranks)]
    vocabulary = {text(token): rank for token, rank in ranks.items()}
    return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def _alphabet() -> dict[int, int]:
    moved = [byte for byte in range(256) if byte not in PRINTABLE]
    return {byte: byte for byte in PRINTABLE} | {byte: 256 + place for place, byte in enumerate(moved)}


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
