"""Vocabularies: the content of a tokenizer, independent of the library that runs it.

There are three kinds: Hugging Face, tiktoken and SentencePiece. Each has a fingerprint (the hash of its content, part of every
shard's identity), a size, control strings, BOS and EOS ids, and encoders: those of the engines, and the reference. With `literal`,
an encoder treats control strings in text as ordinary text, so that `<|endoftext|>` in a web page does not end a document.
Control strings are those flagged as special by the tokenizer.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
    vocabulary as a tokenizer.json, `chat_template` the model's own template, if any; `commit` that of the hub's repository that it
    was loaded from.
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
    commit: str | None = None


def _digest(*parts: bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return f"sha256:{hasher.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What only the model of a tokenizer.json tells: its type, the size of the vocabulary, and the ids of BOS and EOS."""

    model: str
    size: int
    bos: int | None
    eos: int | None


MODEL = re.compile(rb'"model"\s*:\s*')

BEFORE_MODEL = frozenset({"added_tokens", "normalizer", "pre_tokenizer", "post_processor"})
"""The keys that `tokenizers` writes before the model and that are read here."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A tokenizer.json: all but its model, parsed, and the `model` as JSON, because a large one takes 0.2 s to parse."""

    content: bytes
    others: Mapping[str, Any]
    model: bytes

    @classmethod
    def of(cls, content: bytes) -> "Definition":
        """The definition in a file. Raises ValueError for invalid JSON before the model, KeyError without a model."""
        found = MODEL.search(content)
        with suppress(orjson.JSONDecodeError):  # if it is no key of the outermost object
            others = orjson.loads(content[: found.end()] + b"null}") if found else {}
            if found and others.keys() >= BEFORE_MODEL:
                return cls(content, others, content[found.end() : content.rindex(b"}")])
        others = orjson.loads(content)
        return cls(content, others, orjson.dumps(others.pop("model")))

    def changed(self, **changes: Any) -> "Definition":  # noqa: ANN401 - JSON
        """The same with other values of some keys before the model."""
        others = {**self.others, **changes}
        return Definition(orjson.dumps({**others, "model": orjson.Fragment(self.model)}), others, self.model)

    @property
    def added(self) -> list[dict[str, Any]]:
        """The added tokens."""
        return self.others.get("added_tokens") or []

    def facts(self, config: Mapping[str, Any]) -> Facts:
        """The facts of its model. Raises ValueError, TypeError or KeyError for one without a vocabulary."""
        model = orjson.loads(self.model)
        listed = model["vocab"]
        pieces: dict[str, int] = (
            listed if isinstance(listed, dict) else {piece: place for place, (piece, _) in enumerate(listed)}
        )
        ids = pieces | {token["content"]: token["id"] for token in self.added}
        bos, eos = (ids.get(name) for name in named_tokens(config))
        return Facts(model.get("type", "BPE"), 1 + max(ids.values()) if listed else 0, bos, eos)


def named_tokens(config: Mapping[str, Any]) -> list[str | None]:
    """The BOS and EOS tokens that a configuration names."""
    tokens = [config.get(name) for name in ("bos_token", "eos_token")]
    return [token["content"] if isinstance(token, dict) else token for token in tokens]


def huggingface_vocabulary(
    definition: Definition, config: Mapping[str, Any], facts: Facts, fingerprint: str
) -> Vocabulary:
    """The vocabulary of a tokenizer.json.

    `config` is the content of the tokenizer_config.json or special_tokens_map.json beside it, which name BOS and EOS;
    `facts` and `fingerprint` are those of the definition.
    """

    def guarding(tokens: frozenset[str]) -> Vocabulary:
        if tokens.issubset(special):
            return vocabulary
        flagged = [
            {**token, "special": token.get("special") or token["content"] in tokens} for token in definition.added
        ]
        return huggingface_vocabulary(definition.changed(added_tokens=flagged), config, facts, fingerprint)

    special = [token["content"] for token in definition.added if token.get("special")]
    loaded = cache(partial(_huggingface_tokenizer, definition.content))
    vocabulary = Vocabulary(
        fingerprint=fingerprint,
        size=facts.size,
        special_tokens=special,
        bos=facts.bos,
        eos=facts.eos,
        fast=lambda engine, literal: ENGINES[engine].from_definition(
            _without_special(definition) if literal else definition.content
        ),
        reference=cache(lambda literal: _huggingface_reference(loaded, literal=literal)),
        splitting=lambda engine: huggingface_splitting(
            {**definition.others, "model": {"type": facts.model}}, ENGINES[engine]
        ),
        controls={token["content"]: token["id"] for token in definition.added},
        decode=lambda ids: loaded().decode(list(ids), skip_special_tokens=False),
        guarding=cache(guarding),
        definition=lambda: definition.content,
        chat_template=_chat_template(config),
    )
    return vocabulary


def huggingface_fingerprint(content: bytes) -> str:
    """The fingerprint of a tokenizer.json."""
    return _digest(b"huggingface", content)


def _without_special(definition: Definition) -> bytes:
    """The tokenizer.json without its special added tokens, so that it finds no control strings."""
    added = [token for token in definition.added if not token.get("special")]
    return definition.changed(added_tokens=added, post_processor=None).content


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
            _without_special(Definition.of(sentencepiece_to_tokenizer_json(model).encode()))
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
