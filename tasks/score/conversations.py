"""Turn rows into the token sequences to score, with the loss mask of training.

Harmony text is parsed by its grammar and encoded message by message (`tasks.harmony.sequences`), so every token is known to
belong to the analysis, a tool call or the answer. Under a different model's template, rows become sequences as for SFT
(`tasks.pack.formats`), and parts are not distinguished. A template that drops earlier reasoning gives one sequence per turn,
and the row's score covers all its sequences.

For such templates Harmony messages become a chat (`chat_of`): analysis becomes reasoning, calls become tool calls, commentary
and answer the content. The system message is Harmony's own (identity, effort, channels) and is dropped. The developer message
becomes the system message unchanged, with its tool declarations, because rows hold these only as text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.encoding import Batch, Filled, Segments
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.harmony.converters import UNTRAINED, harmony_text
from tokenmill.tasks.harmony.grammar import START
from tokenmill.tasks.harmony.message import FUNCTIONS, HarmonyMessage
from tokenmill.tasks.harmony.sequences import encode
from tokenmill.tasks.harmony.vocabulary import encoding
from tokenmill.tasks.pack.formats import Rows
from tokenmill.tasks.sources.files import field_path
from tokenmill.tasks.tokenize.encoders import Encoder

from .nll import Completions

INSTRUCTIONS = "# Instructions\n\n"


@dataclass(frozen=True, slots=True)
class PlainTexts:
    """Rows with a text to embed, in the first of `fields` that holds one."""

    fields: Sequence[str]

    def read(self, record: Mapping[str, Any]) -> str | Rejected:
        found = next((text for name in self.fields if (text := text_at(record, name)) is not None), None)
        if found is None:
            return Rejected("no_text", f"text not found under {' or '.join(map(repr, self.fields))}")
        return found if found.strip() else Rejected("empty_text", "the text is empty")


@dataclass(frozen=True, slots=True)
class Sequenced:
    """The sequences of some rows; `owners` int64 [sequences] are the indices of their rows, ascending."""

    completions: Completions
    owners: np.ndarray


@dataclass(frozen=True, slots=True)
class HarmonyTexts:
    """Rows with Harmony text."""

    text_field: str
    policy: LossPolicy

    @property
    def fields(self) -> list[str]:
        return [self.text_field, UNTRAINED]

    def read(self, record: Mapping[str, Any]) -> list[HarmonyMessage] | Rejected:
        if text_at(record, self.text_field) is None:
            return Rejected("no_text", f"text not found under {self.text_field!r}; normalize chats to Harmony first")
        return harmony_text(record, self.text_field)

    def sequenced(self, read: Sequence[list[HarmonyMessage]]) -> Sequenced:
        found = encode(read, self.policy)
        return Sequenced(Completions(found.ids, found.offsets, found.loss, found.parts), np.arange(len(read)))

    def encode(self, text: str) -> Sequence[int]:
        return encoding().encode(text)


@dataclass(frozen=True, slots=True)
class TemplatedChats:
    """Rows with chats, or with Harmony text, under the template of a different model."""

    text_field: str
    rows: Rows[Any]
    encoder: Encoder

    @property
    def fields(self) -> list[str]:
        return [self.text_field, UNTRAINED, *self.rows.fields]

    def read(self, record: Mapping[str, Any]) -> Sequence[Segments | Filled] | Rejected:
        text = text_at(record, self.text_field)
        if text is not None and text.startswith(START):
            messages = harmony_text(record, self.text_field)
            if isinstance(messages, Rejected):
                return messages
            record = chat_of(messages)
        found = self.rows.read(record)
        return found if isinstance(found, Rejected) else self.rows.sequences(found)

    def sequenced(self, read: Sequence[Sequence[Segments | Filled]]) -> Sequenced:
        batch = Batch()
        for sequence in (each for sequences in read for each in sequences):
            batch.add(sequence)
        found = batch.encode(self.encoder)
        owners = np.repeat(np.arange(len(read)), [len(sequences) for sequences in read])
        return Sequenced(Completions(found.ids, found.offsets, found.trained, np.zeros_like(found.trained)), owners)

    def encode(self, text: str) -> Sequence[int]:
        return self.encoder.encode(cast("pa.LargeStringArray", pa.array([text], pa.large_string()))).ids.tolist()


Conversations = HarmonyTexts | TemplatedChats  # what turns the rows of a dataset into sequences


def text_at(record: Mapping[str, Any], field: str) -> str | None:
    """Return the text at a dotted path of a record, or None."""
    found: object = record
    for key in field_path(field):
        found = cast("Mapping[str, object]", found).get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else None


def chat_of(messages: Sequence[HarmonyMessage]) -> dict[str, Any]:
    """Return a record with Harmony `messages` in OpenAI's chat format."""
    chat: list[dict[str, Any]] = []
    steps: list[HarmonyMessage] = []
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        author = message.author
        if author == "assistant":
            steps.append(message)
            # A turn ends with an answer or before a different author, so that consecutive calls are kept together.
            if message.channel == "final" or following is None or following.author != author:
                chat.append(_assistant_turn(steps))
                steps = []
        elif author in {"developer", "user"}:
            role = "system" if author == "developer" else author
            chat.append({"role": role, "content": message.body.removeprefix(INSTRUCTIONS)})
        elif author != "system":  # Harmony's own settings, which no other template has
            chat.append({"role": "tool", "name": author.removeprefix(FUNCTIONS), "content": message.body})
    return {"messages": chat}


def _assistant_turn(messages: Sequence[HarmonyMessage]) -> dict[str, Any]:
    calls = [message for message in messages if message.recipient is not None]
    said = [message for message in messages if message.recipient is None]
    thoughts = [message.body for message in said if message.channel == "analysis"]
    content = "\n".join(message.body for message in said if message.channel != "analysis")
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if not all(message.trained for message in messages):
        turn["train"] = False
    for message in calls:
        name, arguments = (message.recipient or "").removeprefix(FUNCTIONS), message.body
        try:
            is_object = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):  # not JSON, a number with too many digits, or nested too deeply
            is_object = False
        if not is_object:  # code for a built-in tool
            arguments = json.dumps({"code": arguments}, ensure_ascii=False)
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turn.setdefault("tool_calls", []).append(call)
    return turn
