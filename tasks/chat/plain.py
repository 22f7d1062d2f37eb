"""Plain rows, read a batch at a time: conversations of roles, contents and reasoning whose texts become one column.

`Programs.placed` makes sequences of them without a look at a single text. A row that is anything else, or has a text that begins or
ends with a blank, is left to `parse`. Reading takes 0.5 µs per message, a tenth of the time of `parse`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from .conversation import Conversation
from .messages import PLAIN, REASONED, ROLES, SPELLINGS
from .parse import LISTS

OWN_ROLES = frozenset(role for role, meant in ROLES.items() if role == meant)

REASONED_KIND = ("role", "assistant", "content", True, SPELLINGS[0], True)
"""An answer with reasoning in a shape."""

MOST_COMPARED = 4
"""Bytes of a tag that are searched for; few texts have these and not the tag."""


class PlainRow(NamedTuple):
    """A plain row: its number in the batch, its conversation, its shape (see `programs`), and its texts, `[start, stop)`."""

    number: int
    conversation: Conversation
    shape: tuple[Any, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The plain rows of a batch, and the texts of all."""

    rows: list[PlainRow] = field(default_factory=list[PlainRow])
    texts: list[str] = field(default_factory=list[str])


def plain_rows(records: Sequence[Mapping[str, Any]], messages_field: str | None, tools_field: str) -> PlainRows:
    """The plain rows among some records. The fields are those of `parse.conversation`."""
    found, name, tools = PlainRows(), messages_field or LISTS[0], tools_field.partition(".")[0]
    if "." in name:
        return found
    for number, record in enumerate(records):
        messages = record.get(name)
        if type(messages) is not list or record.get(tools) is not None:
            continue
        start, kinds = len(found.texts), _read(messages, found.texts)
        if kinds:
            row = PlainRow(number, Conversation(messages, []), (*kinds, None), start, len(found.texts))
            found.rows.append(row)
        else:
            del found.texts[start:]
    return found


def _read(messages: list[Any], texts: list[str]) -> list[Any] | None:
    """The kinds of plain messages, in the order of their texts, which are appended; None if there are others."""
    kinds: list[Any] = []
    for message in messages:
        if type(message) is not dict:
            return None
        keys, role = message.keys(), message.get("role")
        if keys == PLAIN and type(role) is str and role in OWN_ROLES:
            kinds.append(role)
            given = (message["content"],)
        elif keys == REASONED and role == "assistant":
            kinds.append(REASONED_KIND)
            given = message["content"], message[SPELLINGS[0]]
        else:
            return None
        for text in given:
            if type(text) is not str or not text or text.strip() != text:
                return None
        texts += given
    return kinds


def spelling(texts: pa.LargeStringArray, tags: Iterable[str]) -> np.ndarray:
    """Which texts may contain a tag, bool [texts]: those with its first bytes."""
    _, offsets, characters = texts.buffers()
    bounds, content = np.frombuffer(offsets, np.int64), np.frombuffer(characters or b"", np.uint8)
    heads, found = {tag.encode()[:MOST_COMPARED] for tag in tags}, np.zeros(len(texts), np.bool_)
    for first in {head[0] for head in heads}:
        begins = np.flatnonzero(content == first)
        for head in (head for head in heads if head[0] == first):
            places = begins[begins <= len(content) - len(head)]
            for distance, byte in enumerate(head):
                places = places[content[places + distance] == byte]
            found[np.searchsorted(bounds, places, side="right") - 1] = True
    return found


def beginning_with(texts: pa.LargeStringArray, character: str) -> np.ndarray:
    """Which texts, none of them empty, begin with an ASCII character, bool [texts]."""
    _, offsets, characters = texts.buffers()
    return np.frombuffer(characters, np.uint8)[np.frombuffer(offsets, np.int64)[:-1]] == ord(character)
