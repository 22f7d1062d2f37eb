"""Engines: libraries that encode some hundred times faster than the reference.

    gigatoken  reads Arrow's buffers; 110 to 250 MB per CPU-second on fresh text; loads in 0.2 to 0.5 s
    fastokens  reads lists of strings; 140 to 210 MB per CPU-second; loads in 0.8 to 1.4 s

Neither is always faster: gigatoken is on o200k, fastokens on DeepSeek's vocabulary, where it also cuts every character like the
reference. `gate` decides which engines can be trusted with a dataset, `race` which of those is faster.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import fastokens
import gigatoken

from .encoders import Encoder, FastokensEncoder, GigatokenEncoder
from .settings import Engine


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


class Loader(Protocol):
    """Loads vocabularies into an engine. Both raise ValueError, with a reason, for one that the engine does not support."""

    def from_definition(self, definition: bytes) -> Encoder:
        """The encoder of a tokenizer.json."""
        ...

    def from_ranks(self, ranks: Ranks) -> Encoder:
        """The encoder of a tiktoken encoding."""
        ...


class Gigatoken:
    """See Loader."""

    def from_definition(self, definition: bytes) -> Encoder:
        """See Loader."""
        try:
            return GigatokenEncoder(gigatoken.Tokenizer.from_json(definition))
        except (RuntimeError, KeyError, TypeError) as error:  # RuntimeError comes from its Rust core
            raise ValueError(f"cannot load this tokenizer: {_sentence(error)}") from error

    def from_ranks(self, ranks: Ranks) -> Encoder:
        """See Loader."""
        if ranks.pretokenizer is None:
            raise ValueError(f"does not know how {ranks.encoding} splits text")
        return GigatokenEncoder(gigatoken.Tokenizer.from_tiktoken(ranks.place, ranks.pretokenizer, dict(ranks.special)))


class Fastokens:
    """See Loader."""

    def from_definition(self, definition: bytes) -> Encoder:
        """See Loader."""
        try:
            return FastokensEncoder(fastokens.Tokenizer.from_json_str(definition.decode()))
        except ValueError as error:
            raise ValueError(f"cannot load this tokenizer: {_sentence(error)}") from error

    def from_ranks(self, ranks: Ranks) -> Encoder:
        """See Loader."""
        return FastokensEncoder(
            fastokens.Tokenizer.from_tiktoken(ranks.place, pattern=ranks.pattern(), special_tokens=dict(ranks.special))
        )


ENGINES: Mapping[Engine, Loader] = {"gigatoken": Gigatoken(), "fastokens": Fastokens()}
"""In the order in which they are tried: the first one loads faster."""


def _sentence(error: Exception) -> str:
    return str(error).partition("\n")[0]
