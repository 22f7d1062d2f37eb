"""Vocabularies: the content of a tokenizer, independent of the library that runs it.

There are three kinds: Hugging Face, tiktoken and SentencePiece. Each has a fingerprint (the hash of its content, part of every
shard's identity), a size, control strings, BOS and EOS ids, and encoders: those of the engines, and the reference. With `literal`,
an encoder treats control strings in text as ordinary text, so that `<|endoftext|>` in a web page does not end a document.
Control strings are those flagged as special by the tokenizer.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import orjson
import sentencepiece
import tiktoken
import tokenizers
from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json  # private in the pinned version
from tokenmill.tasks.errors import InputError

from .encoders import Encoder, ReferenceEncoder
from .engines import ENGINES, Ranks
from .settings import Engine
from .splitting import Splitting, huggingface_splitting, tiktoken_definition, tiktoken_splitting


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """A tokenizer's content.

    `fingerprint` is `sha256:…` over everything that decides the ids of a text; `size` is the largest id plus one, added
    tokens included; `bos` and `eos` are the ids that begin a sequence and end a document, or None. `fast(engine, literal)`
    makes the encoder of an engine, or raises ValueError if it does not support the tokenizer; `reference(literal)` makes the
    encoder that defines this vocabulary, once.

    `controls` maps control strings and other added tokens to ids; `literal` treats `special_tokens` as ordinary text.
    `guarding(tokens)` is the same vocabulary with more added tokens among these. `splitting(engine)` says how text is cut
    into pieces; None if not by regular expressions. `decode` writes ids as text, with control strings. `definition` is the
    vocabulary as a tokenizer.json, `chat_template` the model's own template, if any.
    """

    fingerprint: str
    size: int
    special_tokens: Sequence[str]
    bos: int | None
    eos: int | None
    fast: Callable[[Engine, bool], Encoder]
    reference: Callable[[bool], Encoder]
    splitting: Callable[[Engine], Splitting | None]
    controls: Mapping[str, int]
    decode: Callable[[Sequence[int]], str]
    guarding: "Callable[[frozenset[str]], Vocabulary]"
    definition: Callable[[], bytes]
    chat_template: str | None = None


def _digest(*parts: bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return f"sha256:{hasher.hexdigest()}"


def _without_special(definition: Mapping[str, Any]) -> bytes:
    """The tokenizer.json without its special added tokens, so that it finds no control strings."""
    added = [token for token in definition.get("added_tokens") or [] if not token.get("special")]
    return orjson.dumps({**definition, "added_tokens": added, "post_processor": None})


def huggingface_vocabulary(definition: bytes, parsed: Mapping[str, Any], config: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a tokenizer.json, as bytes and parsed.

    `config` is the content of the tokenizer_config.json or special_tokens_map.json beside it, which name BOS and EOS.
    """
    return _from_definition(definition, parsed, _digest(b"huggingface", definition), config)


def _from_definition(
    definition: bytes, parsed: Mapping[str, Any], fingerprint: str, config: Mapping[str, Any]
) -> Vocabulary:
    added: list[dict[str, Any]] = parsed.get("added_tokens") or []
    listed = parsed["model"]["vocab"]
    pieces: dict[str, int] = (
        listed if isinstance(listed, dict) else {piece: place for place, (piece, _) in enumerate(listed)}
    )
    ids = pieces | {token["content"]: token["id"] for token in added}

    def named(name: str) -> int | None:
        token = config.get(name)
        return ids.get(token["content"] if isinstance(token, dict) else token)

    def guarding(tokens: frozenset[str]) -> Vocabulary:
        if tokens.issubset(special):
            return vocabulary
        return _from_definition(*_flagged(parsed, tokens), fingerprint, config)

    special = [token["content"] for token in added if token.get("special")]
    loaded = cache(partial(_huggingface_tokenizer, definition))
    vocabulary = Vocabulary(
        fingerprint=fingerprint,
        size=1 + max(ids.values()),
        special_tokens=special,
        bos=named("bos_token"),
        eos=named("eos_token"),
        fast=lambda engine, literal: ENGINES[engine].from_definition(
            _without_special(parsed) if literal else definition
        ),
        reference=cache(lambda literal: _huggingface_reference(loaded, literal=literal)),
        splitting=lambda engine: huggingface_splitting(parsed, ENGINES[engine]),
        controls={token["content"]: token["id"] for token in added},
        decode=lambda ids: loaded().decode(list(ids), skip_special_tokens=False),
        guarding=cache(guarding),
        definition=lambda: definition,
        chat_template=_chat_template(config),
    )
    return vocabulary


def _flagged(parsed: Mapping[str, Any], tokens: frozenset[str]) -> tuple[bytes, Mapping[str, Any]]:
    """The tokenizer.json, as bytes and parsed, in which the added tokens `tokens` are special."""
    added = [
        {**token, "special": token.get("special") or token["content"] in tokens} for token in parsed["added_tokens"]
    ]
    flagged = {**parsed, "added_tokens": added}
    return orjson.dumps(flagged), flagged


def _chat_template(config: Mapping[str, Any]) -> str | None:
    """The template in a tokenizer_config.json: a text, or the one called `default` in a list."""
    found = config.get("chat_template")
    if not isinstance(found, list):
        return found
    named = {each["name"]: each["template"] for each in found}
    return named.get("default")


def _huggingface_tokenizer(definition: bytes) -> tokenizers.Tokenizer:
    """The tokenizer for both encoders and the decoder; takes half a second for a large vocabulary."""
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(definition)
    except ValueError as error:
        raise InputError(
            f"tokenizer.model: its tokenizer.json cannot be read by Hugging Face tokenizers {tokenizers.__version__}: "
            f"{error}; fetch or save it again, or update the package"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _huggingface_reference(loaded: Callable[[], tokenizers.Tokenizer], *, literal: bool) -> ReferenceEncoder:
    tokenizer = loaded()

    def encode(texts: list[str]) -> Sequence[Sequence[int]]:
        tokenizer.encode_special_tokens = literal
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    return ReferenceEncoder(encode)


def tiktoken_vocabulary(
    name: str, ranks_path: str, ranks_digest: str, pretokenizer: str | None, special: Mapping[str, int], size: int
) -> Vocabulary:
    """The vocabulary of a named tiktoken encoding.

    `ranks_path` is the local file of its mergeable ranks and `ranks_digest` their hash; `pretokenizer` is gigatoken's
    name for its pre-tokenizer, or None; `special` maps control strings to ids.
    """

    def fast(engine: Engine, literal: bool) -> Encoder:
        return ENGINES[engine].from_ranks(Ranks(ranks_path, name, pretokenizer, {} if literal else special))

    def reference(literal: bool) -> Encoder:
        encoding = tiktoken.get_encoding(name)
        if literal:
            return ReferenceEncoder(lambda texts: [encoding.encode_ordinary(text) for text in texts])
        return ReferenceEncoder(lambda texts: [encoding.encode(text, allowed_special="all") for text in texts])

    vocabulary = Vocabulary(
        fingerprint=_digest(b"tiktoken", name.encode(), ranks_digest.encode(), orjson.dumps(dict(special))),
        size=size,
        special_tokens=list(special),
        bos=special.get("<|startoftext|>"),
        eos=special.get("<|endoftext|>"),
        fast=fast,
        reference=cache(reference),
        splitting=lambda engine: tiktoken_splitting(name, pretokenizer, ENGINES[engine]),
        controls=special,
        decode=lambda ids: tiktoken.get_encoding(name).decode(ids),
        guarding=lambda _: vocabulary,  # every control string of an encoding is special already
        definition=lambda: tiktoken_definition(tiktoken.get_encoding(name)),
    )
    return vocabulary


def sentencepiece_vocabulary(model: bytes) -> Vocabulary:
    """The vocabulary of a SentencePiece `.model`. Its control pieces never match text, so `literal` has no effect."""
    processor: Any = sentencepiece.SentencePieceProcessor()  # ships no types
    processor.LoadFromSerializedProto(model)
    size: int = processor.GetPieceSize()
    controls = {processor.IdToPiece(number): number for number in range(size) if processor.IsControl(number)}
    vocabulary = Vocabulary(
        fingerprint=_digest(b"sentencepiece", model),
        size=size,
        special_tokens=list(controls),
        bos=_existing(processor.bos_id()),
        eos=_existing(processor.eos_id()),
        fast=lambda engine, _: ENGINES[engine].from_definition(
            _without_special(orjson.loads(sentencepiece_to_tokenizer_json(model)))
        ),
        reference=lambda _: ReferenceEncoder(lambda texts: processor.Encode(texts, out_type=int)),
        splitting=lambda _: None,
        controls=controls,
        decode=lambda ids: _spelled(processor, controls, ids),
        guarding=lambda _: vocabulary,
        definition=lambda: sentencepiece_to_tokenizer_json(model).encode(),
    )
    return vocabulary


def _spelled(processor: Any, controls: Mapping[str, int], ids: Sequence[int]) -> str:  # noqa: ANN401 - ships no types
    """Ids as text with control pieces, which SentencePiece itself omits."""
    names = {number: piece for piece, number in controls.items()}
    runs = itertools.groupby(ids, names.get)
    return "".join(
        "".join(name for _ in run) if name is not None else processor.Decode(list(run)) for name, run in runs
    )


def _existing(identifier: int) -> int | None:
    """The id, or None for -1, SentencePiece's value for a missing one."""
    return identifier if identifier >= 0 else None
