"""Encoders: a batch of Arrow text in, flat token ids out.

gigatoken reads Arrow's own buffers (wrapped as an awkward array, without a copy); fastokens reads a list of strings. Both return
one flat uint32 array with offsets: no Python object per token. They are twice as fast once their cache of pre-tokens is warm,
so an encoder is kept from shard to shard. They run on one thread, because Dask runs many processes.

The references are the libraries that define each type of tokenizer: Hugging Face `tokenizers`, `tiktoken` and `sentencepiece`.
They are correct by definition and about a hundred times slower.

Engines, which load a vocabulary and encode with it:

    gigatoken  reads Arrow's buffers; 110 to 250 MB per CPU-second on fresh text; loads in 0.2 to 0.5 s
    fastokens  reads lists of strings; 140 to 210 MB per CPU-second; loads in 0.8 to 1.4 s

Neither is always faster: gigatoken is on o200k, fastokens on DeepSeek's vocabulary, where it also cuts every character like the
reference. `gate` decides which engines can be trusted with a dataset, and which of those is faster.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import fastokens
import gigatoken
import numpy as np
import psutil
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.errors import RunError

from .settings import Engine


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of documents: `ids` uint32 [tokens], `offsets` int64 [documents + 1]; document i is ids[o[i]:o[i+1]].

    `by_reference` counts the documents that the reference encoded instead of the fast encoder.
    """

    ids: np.ndarray
    offsets: np.ndarray
    by_reference: int = 0

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64."""
        return np.diff(self.offsets)


class Encoder(Protocol):
    """Turns text into ids, without adding BOS or EOS."""

    def encode(self, texts: pa.LargeStringArray) -> Tokens:
        """Return the ids of each text; no text may be null."""
        ...


def utf8_of(texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """Where each text begins and the last one ends, int64 [texts + 1], and the UTF-8 that these are places in, uint8; without a copy."""
    _, offsets, characters = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return bounds, np.frombuffer(characters or b"", np.uint8)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The mergeable ranks of a tiktoken encoding, in a file.

    `encoding` is its name for tiktoken, `pattern` returns the regular expression by which it cuts text, `pretokenizer` is
    gigatoken's name for that, or None; `special` maps control strings that are matched in text to ids.
    """

    place: str
    encoding: str
    pattern: Callable[[], str]
    pretokenizer: str | None
    special: Mapping[str, int]


class NoEncoder:
    """One id for each text that isn't empty: for reading rows without an engine, which takes half a second to load."""

    def encode(self, texts: pa.LargeStringArray) -> Tokens:
        some = compute.call_function("binary_length", [texts]).to_numpy(zero_copy_only=False) > 0
        return Tokens(np.zeros(int(some.sum()), np.uint32), np.concatenate([[0], np.cumsum(some, dtype=np.int64)]))


@dataclass(frozen=True, slots=True)
class GigatokenEncoder:
    """gigatoken."""

    tokenizer: gigatoken.Tokenizer

    @classmethod
    def from_definition(cls, definition: bytes) -> Encoder:
        """Load a tokenizer.json. Raises ValueError for a vocabulary that it doesn't support."""
        try:
            return cls(gigatoken.Tokenizer.from_json(definition))
        except (RuntimeError, KeyError, TypeError) as error:  # RuntimeError comes from its Rust core
            raise ValueError(f"cannot load this tokenizer: {str(error).partition(chr(10))[0]}") from error

    @classmethod
    def from_ranks(cls, ranks: Ranks) -> Encoder:
        """Load ranks. Raises ValueError for a vocabulary that it doesn't support."""
        if ranks.pretokenizer is None:
            raise ValueError(f"does not know how {ranks.encoding} splits text")
        return cls(gigatoken.Tokenizer.from_tiktoken(ranks.place, ranks.pretokenizer, dict(ranks.special)))

    def encode(self, texts: pa.LargeStringArray) -> Tokens:
        import awkward as ak  # takes 0.1 s, and only encoding needs it

        # An awkward array of strings over Arrow's own buffers, without a copy.
        bounds, content = utf8_of(texts)
        strings = ak.Array(
            ak.contents.ListOffsetArray(
                ak.index.Index64(bounds),
                ak.contents.NumpyArray(cast("Any", content), parameters={"__array__": "char"}),
                parameters={"__array__": "string"},
            )
        )
        layout: Any = self.tokenizer.encode_batch(strings, parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        return Tokens(np.asarray(layout.content.data)[offsets[0] : offsets[-1]], offsets - offsets[0])


@dataclass(frozen=True, slots=True)
class FastokensEncoder:
    """fastokens."""

    tokenizer: fastokens.Tokenizer

    @classmethod
    def from_definition(cls, definition: bytes) -> Encoder:
        """Load a tokenizer.json. Raises ValueError for a vocabulary that it doesn't support."""
        try:
            return cls(fastokens.Tokenizer.from_json_str(definition.decode()))
        except ValueError as error:
            raise ValueError(f"cannot load this tokenizer: {str(error).partition(chr(10))[0]}") from error

    @classmethod
    def from_ranks(cls, ranks: Ranks) -> Encoder:
        """Load ranks. Raises ValueError for a vocabulary that it doesn't support."""
        special = dict(ranks.special)
        return cls(fastokens.Tokenizer.from_tiktoken(ranks.place, pattern=ranks.pattern(), special_tokens=special))

    def encode(self, texts: pa.LargeStringArray) -> Tokens:
        ids, offsets = self.tokenizer.encode_batch_flat(texts.to_pylist())
        return Tokens(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64))


Loader = type[GigatokenEncoder] | type[FastokensEncoder]
ENGINES: Mapping[Engine, Loader] = {"gigatoken": GigatokenEncoder, "fastokens": FastokensEncoder}
"""In the order in which they are tried: the first one loads faster."""


@dataclass(slots=True)
class RenewedEncoder:
    """An encoder that is loaded again each time the process has grown by `most_growth` bytes since it was loaded.

    gigatoken remembers every pre-token that it has ever seen: 350 MB of random words take 2.6 GB. Ordinary text takes 0.1 to
    0.2 bytes per byte, so a new start, which costs a second, is needed only after gigabytes. Threads share it: one loads, and the
    others continue with the old one.
    """

    load: Callable[[], Encoder]
    most_growth: int = 384 << 20
    encoder: Encoder = field(init=False)
    _size: int = field(init=False)
    _loading: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._start()

    def encode(self, texts: pa.LargeStringArray) -> Tokens:
        tokens = self.encoder.encode(texts)
        # One thread renews it; to wait would stop the others for a second.
        if _private_bytes() - self._size > self.most_growth and self._loading.acquire(blocking=False):
            try:
                self._start()
            finally:
                self._loading.release()
        return tokens

    def _start(self) -> None:
        self.encoder = self.load()
        return_freed_memory()  # that the old one had filled
        self._size = _private_bytes()


def return_freed_memory() -> None:
    """Return freed memory to the system, which glibc would keep for later allocations."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _private_bytes() -> int:
    """Return this process's memory, without mapped-file pages if the system separates them."""
    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)


GIVING_UP = frozenset({"PanicException", "ValueError", "Exception"})
"""Exceptions that libraries raise for a text that takes their regular expression too many steps (Rust's panic
isn't an Exception), or, bare, for one with characters that a vocabulary without an unknown token doesn't cover."""


@dataclass(frozen=True, slots=True)
class ReferenceEncoder:
    """A reference library, wrapped as a function from a list of texts to a list of id lists."""

    encode_texts: Callable[[list[str]], Sequence[Sequence[int]]]

    def encode(self, texts: pa.LargeStringArray) -> Tokens:
        """See Encoder. The libraries return Python lists, which become arrays here, document by document.

        Raises RunError for a text that the library gives up on.
        """
        documents = [np.asarray(ids, np.uint32) for ids in self._encoded(texts.to_pylist())]
        offsets = np.zeros(len(documents) + 1, np.int64)
        np.cumsum([len(ids) for ids in documents], out=offsets[1:])
        return Tokens(np.concatenate([np.empty(0, np.uint32), *documents]), offsets)

    def _encoded(self, texts: list[str]) -> Sequence[Sequence[int]]:
        try:
            return self.encode_texts(texts)
        except BaseException as error:
            gave_up, why = type(error).__name__ in GIVING_UP, str(error)
            if gave_up and len(texts) > 1:
                # One by one, to find the text, which the message shows.
                return [ids for text in texts for ids in self._encoded([text])]
            if gave_up:
                better = (
                    "that has an unknown token"
                    if "unk" in why.lower()
                    else "whose regular expression takes fewer steps"
                )
                raise RunError(
                    f"the tokenizer cannot encode the text that begins {texts[0][:40]!r} ({why}); leave its row out, or choose a "
                    f"tokenizer {better}"
                ) from error
            raise
