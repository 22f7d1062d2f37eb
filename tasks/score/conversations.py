"""Rows to the sequences that are scored, and which of their tokens count: the mask is the one that training uses.

Harmony text is read by its grammar and encoded message by message (`tasks.harmony.sequences`), so that every token is
known to be of a thought, a call or an answer. Under the template of another model rows become sequences as for SFT
(`tasks.pack.formats`), where parts are not told apart; a template that forgets thoughts gives a sequence per turn, and
the score of a row is that of all its sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.encoding import Batch
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.sequences import Pieces
from tokenmill.tasks.harmony.grammar import START, Fault, ParsedMessage, parse
from tokenmill.tasks.harmony.message import HarmonyMessage
from tokenmill.tasks.harmony.sequences import LOSS_MODES, encode
from tokenmill.tasks.pack.formats import Rows
from tokenmill.tasks.sources.json_rows import field_path
from tokenmill.tasks.tokenize.encoders import Encoder

from .chats import chat_of
from .nll import Completions
from .settings import LossMode


@dataclass(frozen=True, slots=True)
class Sequenced:
    """The sequences of some rows; `owners` int64 [sequences] are the numbers of the rows, ascending."""

    completions: Completions
    owners: np.ndarray


class Conversations(Protocol):
    """How the rows of a data set are read."""

    @property
    def fields(self) -> Sequence[str]:
        """The fields of a record that are looked at."""
        ...

    def read(self, record: Mapping[str, Any]) -> object | Rejected:
        """What a record says, or why nothing."""
        ...

    def sequenced(self, read: Sequence[Any]) -> Sequenced:
        """The sequences of what was read."""
        ...


@dataclass(frozen=True, slots=True)
class HarmonyTexts:
    """Rows of Harmony text."""

    text_field: str
    policy: LossPolicy

    @property
    def fields(self) -> list[str]:
        """See Conversations."""
        return [self.text_field]

    def read(self, record: Mapping[str, Any]) -> list[HarmonyMessage] | Rejected:
        """See Conversations."""
        text = text_at(record, self.text_field)
        if text is None:
            return Rejected("no_text", f"there is no text under {self.text_field!r}; bring chats into Harmony first")
        return _parsed(text)

    def sequenced(self, read: Sequence[list[HarmonyMessage]]) -> Sequenced:
        """See Conversations."""
        found = encode(read, self.policy)
        return Sequenced(Completions(found.ids, found.offsets, found.loss, found.parts), np.arange(len(read)))


@dataclass(frozen=True, slots=True)
class TemplatedChats:
    """Rows of chats, or of Harmony text, under the template of another model."""

    text_field: str
    rows: Rows[Any]
    encoder: Encoder

    @property
    def fields(self) -> list[str]:
        """See Conversations."""
        return [self.text_field, *self.rows.fields]

    def read(self, record: Mapping[str, Any]) -> list[Pieces] | Rejected:
        """See Conversations."""
        text = text_at(record, self.text_field)
        if text is not None and text.startswith(START):
            messages = _parsed(text)
            if isinstance(messages, Rejected):
                return messages
            record = chat_of(messages)
        found = self.rows.read(record)
        return found if isinstance(found, Rejected) else self.rows.sequences(found)

    def sequenced(self, read: Sequence[list[Pieces]]) -> Sequenced:
        """See Conversations."""
        batch = Batch()
        for pieces in (pieces for sequences in read for pieces in sequences):
            batch.add(pieces)
        found = batch.encode(self.encoder)
        owners = np.repeat(np.arange(len(read)), [len(sequences) for sequences in read])
        return Sequenced(Completions(found.ids, found.offsets, found.loss, np.zeros_like(found.loss)), owners)


def policy_of(mode: LossMode, *, harmony: bool) -> LossPolicy:
    """What is scored. A template does not tell headers from what they introduce, so its bodies have them."""
    policy = LOSS_MODES[mode]
    return policy if harmony or policy.on != "assistant_bodies" else replace(policy, on="assistant_all")


def text_at(record: Mapping[str, Any], field: str) -> str | None:
    """The text at a dotted path of a record, None where there is none."""
    found: object = record
    for key in field_path(field):
        found = cast("Mapping[str, object]", found).get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else None


def _parsed(text: str) -> list[HarmonyMessage] | Rejected:
    found: list[ParsedMessage] | Fault = parse(text)
    if isinstance(found, Fault):
        return Rejected(f"invalid_harmony_{found.code}", f"character {found.offset}: {found.detail}")
    return list(found)
