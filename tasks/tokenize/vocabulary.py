"""Vocabularies: the content of a tokenizer, independent of the library that runs it.

There are three kinds: Hugging Face, tiktoken and SentencePiece. Each has a fingerprint (the hash of its content, part of every
shard's identity), a size, control strings, BOS and EOS ids, and encoders: the engines' and the reference. With `literal`,
an encoder treats control strings in text as ordinary text, so that `<|endoftext|>` in a web page does not end a document.
Control strings are those flagged as special by the tokenizer.

SentencePiece models are Protocol Buffers messages, in which a repeated field may continue anywhere and the last value of any other
field counts. A symbol is matched in text if its type is `user_defined`, and never if it is `control`. So tokens that a folder adds to its
model become pieces of one type or the other, behind the model, and types are added behind the piece.
"""

import hashlib
import itertools
import os
import re
import struct
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import orjson
import sentencepiece
import tiktoken
import tokenizers
from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json  # private in the pinned version
from tokenmill.tasks.errors import InputError

from .added import Added, AddedTokens, folder_tokens
from .encoders import ENGINES, Encoder, Ranks, ReferenceEncoder
from .rank_files import QWEN_PATTERN, RankFile
from .settings import Engine
from .splitting import NFC, Splitting, huggingface_splitting, ranks_splitting, tiktoken_definition, tiktoken_splitting

NONE_ADDED = AddedTokens()


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """A tokenizer's content.

    `fingerprint` is `sha256:…` over everything that decides the ids of a text; `size` is the largest id plus one, added
    tokens included; `bos` and `eos` are the ids that begin a sequence and end a document, or None. `fast(engine, literal)`
    makes the encoder of an engine, or raises ValueError if it does not support the tokenizer; `reference(literal)` makes the
    encoder that defines this vocabulary, once.

    `controls` maps control strings and other added tokens to ids; `literal` treats `special_tokens` as ordinary text.
    `guarding(tokens)` is the same vocabulary with more added tokens among these. `splitting(engine)` is how text is cut
    into pieces; None if not by regular expressions. `decode` writes ids as text, with control strings. `definition` is the
    vocabulary as a tokenizer.json, `added` its added tokens where they are matched in text with flags, `chat_template` the model's
    own template, if any; `commit` the commit of the Hub repository that it was loaded from.
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
    added: AddedTokens = NONE_ADDED
    chat_template: str | None = None
    commit: str | None = None


def _digest(*parts: bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))  # so that the border between two parts counts
        hasher.update(part)
    return f"sha256:{hasher.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that only the model of a tokenizer.json has: its type, BPE dropout, the size of the vocabulary, and the ids of BOS and EOS."""

    model: str
    dropout: float
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
        """Return the definition in a file. Raises ValueError for invalid JSON before the model, KeyError without a model."""
        # `tokenizers` writes the model last, so what precedes it is JSON once it is closed.
        found = MODEL.search(content)
        with suppress(orjson.JSONDecodeError):  # if it is no key of the outermost object
            others = orjson.loads(content[: found.end()] + b"null}") if found else {}
            if found and others.keys() >= BEFORE_MODEL:
                return cls(content, others, content[found.end() : content.rindex(b"}")])
        others = orjson.loads(content)
        if not isinstance(others["model"], dict):
            raise KeyError("model")
        return cls(content, others, orjson.dumps(others.pop("model")))

    def changed(self, **changes: Any) -> "Definition":  # noqa: ANN401 - JSON
        """Return the same with other values of some keys before the model."""
        others = {**self.others, **changes}
        return Definition(orjson.dumps({**others, "model": orjson.Fragment(self.model)}), others, self.model)

    @property
    def added(self) -> list[dict[str, Any]]:
        return self.others.get("added_tokens") or []

    def with_tokens_of(self, config: Mapping[str, Any]) -> "Definition":
        """Return the same with the tokens of its folder that it lacks, as `AutoTokenizer` adds them."""
        ids = self._ids(orjson.loads(self.model))
        # Tokens that the file has keep their flags.
        new = [token for token in folder_tokens(config, ids) if token["content"] not in ids]
        return self.changed(added_tokens=[*self.added, *new])

    def _ids(self, model: Mapping[str, Any]) -> dict[str, int]:
        listed = model["vocab"]
        pieces: dict[str, int] = (
            listed if isinstance(listed, dict) else {piece: place for place, (piece, _) in enumerate(listed)}
        )
        return pieces | {token["content"]: token["id"] for token in self.added}

    @property
    def matching(self) -> AddedTokens:
        normalizer = self.others.get("normalizer")
        changes = bool(normalizer and normalizer.get("normalizers", True))  # an empty sequence changes nothing
        # Normalizers nest, so their names are looked for in all of it; Precompiled is SentencePiece's own NFKC.
        composes = any(f'"{form}"' in orjson.dumps(normalizer).decode() for form in ("NFC", "NFKC", "Precompiled"))
        return AddedTokens([Added.of(token) for token in self.added], changes, composes)

    def facts(self, config: Mapping[str, Any]) -> Facts:
        """Return the facts of its model. Raises ValueError, TypeError or KeyError for one without a vocabulary."""
        model = orjson.loads(self.model)
        ids = self._ids(model)
        bos, eos = (ids.get(name) if name else None for name in named_tokens(config))
        dropout = float(model.get("dropout") or 0)
        return Facts(model.get("type", "BPE"), dropout, 1 + max(ids.values()) if model["vocab"] else 0, bos, eos)


def named_tokens(config: Mapping[str, Any]) -> list[str | None]:
    """Return the BOS and EOS tokens that a configuration names."""
    tokens = [config.get(name) for name in ("bos_token", "eos_token")]
    return [token["content"] if isinstance(token, dict) else token for token in tokens]


def huggingface_vocabulary(
    definition: Definition, config: Mapping[str, Any], facts: Facts, fingerprint: str
) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json.

    `config` is the content of the tokenizer_config.json or special_tokens_map.json beside it, which name BOS and EOS;
    `facts` and `fingerprint` belong to the definition.
    """

    def guarding(tokens: frozenset[str]) -> Vocabulary:
        if tokens.issubset(special):
            return vocabulary
        flagged = [
            {**token, "special": token.get("special") or token["content"] in tokens} for token in definition.added
        ]
        return huggingface_vocabulary(definition.changed(added_tokens=flagged), config, facts, fingerprint)

    @cache
    def reference(literal: bool) -> ReferenceEncoder:
        tokenizer = loaded()

        def encode(texts: list[str]) -> Sequence[Sequence[int]]:
            tokenizer.encode_special_tokens = literal  # both encoders share the tokenizer
            return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

        return ReferenceEncoder(encode)

    special = [token["content"] for token in definition.added if token.get("special")]
    # For both encoders and the decoder: a large vocabulary takes half a second.
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
        reference=reference,
        splitting=lambda engine: huggingface_splitting(
            {**definition.others, "model": {"type": facts.model}}, ENGINES[engine]
        ),
        controls={token["content"]: token["id"] for token in definition.added},
        decode=lambda ids: loaded().decode(list(ids), skip_special_tokens=False),
        guarding=cache(guarding),
        definition=lambda: definition.content,
        added=definition.matching,
        chat_template=_chat_template(config),
    )
    return vocabulary


def merges_definition(
    vocab: Mapping[str, int], merges: str, config: Mapping[str, Any]
) -> tuple[Definition, dict[str, Any]]:
    """Return the tokenizer.json of a vocab.json and the merges.txt beside it, and its configuration with the names that its class adds.

    Raises ValueError for a class that isn't known to cut text as GPT-2 or Qwen 2 do.
    """
    name = str(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if name not in MERGED:
        raise ValueError(
            f"is a vocabulary of {name}, which is read from a tokenizer.json only; make one: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    pattern, defaults = MERGED[name]
    named = {**dict.fromkeys(defaults, END_OF_TEXT), **config}
    # The tokenizer.json that transformers would save of these files, key by key.
    spaced = bool(config.get("add_prefix_space"))
    level = {"type": "ByteLevel", "add_prefix_space": spaced, "trim_offsets": True, "use_regex": pattern is None}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab,
        "merges": [line for line in merges.split("\n") if line and not line.startswith("#version")],
    }  # fmt: skip
    definition = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": folder_tokens(named, vocab),
        "normalizer": NFC if pattern else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]} if pattern else level,
        "post_processor": None, "decoder": {**level, "use_regex": True}, "model": model,
    }  # fmt: skip
    return Definition.of(orjson.dumps(definition)), named


MERGED: Mapping[str, tuple[str | None, tuple[str, ...]]] = {
    "GPT2Tokenizer": (None, ("bos_token", "eos_token", "unk_token")),
    "Qwen2Tokenizer": (QWEN_PATTERN, ("eos_token", "pad_token", "unk_token")),
}
"""By class of transformers that reads vocab.json and merges.txt: the expression, if not GPT-2's, and the token that is END_OF_TEXT by default."""

END_OF_TEXT = "<|endoftext|>"


def huggingface_fingerprint(definition: Definition) -> str:
    """Return the fingerprint of a tokenizer.json. Where added tokens compete, ids of earlier versions may be wrong, and aren't reused."""
    revised = [b"tangles"] if definition.matching.changes_identity() else []
    return _digest(b"huggingface", definition.content, *revised)


def _without_special(definition: Definition) -> bytes:
    """The tokenizer.json without its special added tokens, so that it finds no control strings."""
    added = [token for token in definition.added if not token.get("special")]
    return definition.changed(added_tokens=added, post_processor=None).content


def _chat_template(config: Mapping[str, Any]) -> str | None:
    """The template in a tokenizer_config.json: a text, or the one called `default` in a list."""
    found = config.get("chat_template")
    if isinstance(found, list):  # templates with names, such as one for calls
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _huggingface_tokenizer(definition: bytes) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(definition)
    except ValueError as error:
        raise InputError(
            f"tokenizer.model: its tokenizer.json cannot be read by Hugging Face tokenizers {tokenizers.__version__}: "
            f"{error}; fetch or save it again, or update the package"
        ) from error
    tokenizer.no_truncation()  # which a tokenizer.json may ask for; documents are cut by `max_doc_tokens` alone
    tokenizer.no_padding()
    return tokenizer


def tiktoken_vocabulary(
    name: str, ranks_path: str, ranks_digest: str, pretokenizer: str | None, special: Mapping[str, int], size: int
) -> Vocabulary:
    """Return the vocabulary of a named tiktoken encoding.

    `ranks_path` is the local file of its mergeable ranks and `ranks_digest` their hash; `pretokenizer` is gigatoken's
    name for its pre-tokenizer, or None; `special` maps control strings to ids.
    """

    def encoding() -> tiktoken.Encoding:
        if ranks_path:  # tiktoken finds ranks by its environment variable alone, which may have changed since
            os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(ranks_path).parent)
        return tiktoken.get_encoding(name)

    def pattern() -> str:
        return encoding()._pat_str  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    ranks = Ranks(ranks_path, name, pattern, pretokenizer, special)

    def fast(engine: Engine, literal: bool) -> Encoder:
        return ENGINES[engine].from_ranks(replace(ranks, special={}) if literal else ranks)

    def reference(literal: bool) -> Encoder:
        found = encoding()
        if literal:
            return ReferenceEncoder(lambda texts: [found.encode_ordinary(text) for text in texts])
        return ReferenceEncoder(lambda texts: [found.encode(text, allowed_special="all") for text in texts])

    vocabulary = Vocabulary(
        fingerprint=_digest(b"tiktoken", name.encode(), ranks_digest.encode(), orjson.dumps(dict(special))),
        size=size,
        special_tokens=list(special),
        bos=special.get("<|startoftext|>"),
        eos=special.get("<|endoftext|>"),
        fast=fast,
        reference=cache(reference),
        splitting=lambda engine: tiktoken_splitting(ranks, ENGINES[engine]),
        controls=special,
        decode=lambda ids: encoding().decode(ids),
        guarding=lambda _: vocabulary,  # every control string of an encoding is special already
        definition=lambda: tiktoken_definition(encoding()),
    )
    return vocabulary


def ranks_vocabulary(file: RankFile, config: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a rank file; `config` is its folder's."""
    normal = partial(unicodedata.normalize, "NFC") if file.nfc else str

    @cache
    def encoding() -> tiktoken.Encoding:
        return tiktoken.Encoding(
            "ranks", pat_str=file.pattern, mergeable_ranks=dict(file.ranks), special_tokens=dict(file.special)
        )

    @cache
    def definition() -> Definition:
        return Definition.of(tiktoken_definition(encoding(), nfc=file.nfc))

    def reference(literal: bool) -> Encoder:
        if literal or not file.matched:
            return ReferenceEncoder(lambda texts: [encoding().encode_ordinary(normal(text)) for text in texts])
        return ReferenceEncoder(
            lambda texts: [encoding().encode(normal(text), allowed_special="all") for text in texts]
        )

    tables = unicodedata.unidata_version if file.nfc else None  # Python's, which Qwen's own code normalizes by
    described = [file.pattern, dict(file.special), file.matched, tables]
    vocabulary = Vocabulary(
        fingerprint=_digest(b"ranks", file.content, orjson.dumps(described)),
        size=1 + max(*file.ranks.values(), *file.special.values(), 0),
        special_tokens=list(file.special),
        bos=file.bos,
        eos=file.eos,
        fast=lambda engine, literal: ENGINES[engine].from_definition(
            _without_special(definition()) if literal or not file.matched else definition().content
        ),
        reference=cache(reference),
        splitting=lambda engine: ranks_splitting(file.pattern, ENGINES[engine], nfc=file.nfc),
        controls=file.special,
        decode=lambda ids: encoding().decode(ids),
        guarding=lambda _: vocabulary,  # every control string is special already
        definition=lambda: definition().content,
        chat_template=_chat_template(config),
    )
    return vocabulary


CONTROL, USER_DEFINED = 3, 4
"""Types of pieces (sentencepiece_model.proto)."""

PIECES, NAME, SCORE, TYPE = 1, 1, 2, 3
"""Numbers of fields, of the model and of a piece."""

VARINT, EIGHT_BYTES, COUNTED, FOUR_BYTES = 0, 1, 2, 5
"""How values are written (Protocol Buffers encoding)."""


def sentencepiece_vocabulary(
    model: bytes, config: Mapping[str, Any] | None = None, guarded: frozenset[str] = frozenset()
) -> Vocabulary:
    """Return the vocabulary of a SentencePiece model.

    `config` is its folder's (see `folder_tokens`): its tokens are matched in text, special ones only without `literal`. The
    model's own control pieces never match text. `guarded` tokens of the folder count as special.

    Raises ValueError for a file that isn't a model.
    """
    own = _processor(model)
    pieces = {own.IdToPiece(number): number for number in range(own.GetPieceSize())}
    tokens = folder_tokens(config or {}, pieces)
    # Pieces of these types never match text as it is, whatever the folder lists.
    fixed = (own.IsControl, own.IsUnknown, own.IsByte, own.IsUnused)
    matched = [token for token in tokens if token["id"] >= len(pieces) or not any(each(token["id"]) for each in fixed)]
    special = {token["content"] for token in matched if token["special"] or token["content"] in guarded}

    def guarding(more: frozenset[str]) -> Vocabulary:
        # A model that the folder doesn't change remains as it is, so that its data keep their keys.
        unguarded = more.intersection(token["content"] for token in matched) - special
        return sentencepiece_vocabulary(model, config, more) if unguarded and variant(False) != model else vocabulary

    @cache
    def variant(literal: bool) -> bytes:
        kinds = {
            token["content"]: CONTROL if literal and token["content"] in special else USER_DEFINED for token in matched
        }
        new = [(name, kind) for name, kind in kinds.items() if name not in pieces]
        return with_pieces(model, kinds, new) if kinds else model

    @cache
    def definition(literal: bool) -> Definition:
        return Definition.of(sentencepiece_to_tokenizer_json(variant(literal)).encode())

    processors = cache(lambda literal: _processor(variant(literal)))
    named = {token["content"]: token["id"] for token in tokens}
    own_controls = {name: number for name, number in pieces.items() if own.IsControl(number)}
    controls = own_controls | {token["content"]: token["id"] for token in matched}
    bos, eos = (named.get(name) if name else None for name in named_tokens(config or {}))
    own_bos, own_eos = (number if number >= 0 else None for number in (own.bos_id(), own.eos_id()))  # -1: none
    # A model that the folder doesn't change has the fingerprint of before folders were read.
    revised = [variant(True)] if variant(True) != variant(False) else []
    vocabulary = Vocabulary(
        fingerprint=_digest(b"sentencepiece", variant(False), *revised),
        size=len(pieces) + len([token for token in tokens if token["id"] >= len(pieces)]),
        special_tokens=[name for name in controls if name in special or name in own_controls],
        bos=own_bos if bos is None else bos,
        eos=own_eos if eos is None else eos,
        fast=lambda engine, literal: ENGINES[engine].from_definition(_without_special(definition(literal))),
        reference=lambda literal: ReferenceEncoder(lambda texts: processors(literal).Encode(texts, out_type=int)),
        splitting=lambda _: None,
        controls=controls,
        decode=lambda ids: _spelled(processors(True), controls, ids),
        guarding=cache(guarding),
        definition=lambda: definition(False).content,
        chat_template=_chat_template(config or {}),
    )
    return vocabulary


def _processor(model: bytes) -> Any:  # noqa: ANN401 - ships no types
    processor: Any = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return processor


def _spelled(processor: Any, controls: Mapping[str, int], ids: Sequence[int]) -> str:  # noqa: ANN401 - ships no types
    """Ids as text with control pieces, which SentencePiece itself omits."""
    names = {number: piece for piece, number in controls.items()}
    runs = itertools.groupby(ids, names.get)
    return "".join(name * len([*run]) if name is not None else processor.Decode(list(run)) for name, run in runs)


def with_pieces(model: bytes, kinds: Mapping[str, int], added: Sequence[tuple[str, int]]) -> bytes:
    """Return the model whose pieces named in `kinds` have these types, with more pieces of the types in `added` at the end.

    Raises ValueError for a file that isn't a model.
    """
    parts: list[bytes] = []
    for field, start, content, end in _fields(model):
        piece = (
            {key: model[content + a : content + b] for key, _, a, b in _fields(model[content:end])}
            if field == PIECES
            else {}
        )
        kind = kinds.get(piece.get(NAME, b"").decode())
        if kind is None or piece.get(TYPE) == bytes([kind]):
            parts.append(model[start:end])
        else:  # of two types in a piece, the last counts
            parts.append(_counted(PIECES, model[content:end] + _typed(kind)))
    score = bytes([SCORE << 3 | FOUR_BYTES]) + struct.pack("<f", 0)
    parts += [_counted(PIECES, _counted(NAME, name.encode()) + score + _typed(kind)) for name, kind in added]
    return b"".join(parts)


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, beginning, beginning of its content, and end."""
    place = 0
    while place < len(message):
        start = place
        # The number of the field, and in the lowest three bits how its value is written.
        key, place = _varint(message, place)
        size = {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(key & 7, 0)
        content = place
        if key & 7 == VARINT:
            _, place = _varint(message, place)
        elif key & 7 == COUNTED:
            size, content = _varint(message, place)
            place = content
        elif not size:
            raise ValueError("isn't a SentencePiece model")
        place += size
        yield key >> 3, start, content, place


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while message[place] & 0x80:
        value |= (message[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | message[place] << shift, place + 1


def _counted(field: int, content: bytes) -> bytes:
    size = len(content)
    written = bytearray([field << 3 | COUNTED])
    while size > 0x7F:  # noqa: PLR2004 - seven bits to a byte
        written.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*written, size]) + content


def _typed(kind: int) -> bytes:
    return bytes([TYPE << 3 | VARINT, kind])
