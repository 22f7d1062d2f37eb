"""Harmony as a chat template: records to conversations, and what a person may choose about it.

A record is Harmony text already, under `text`, or chat that is composed as for a normalization. Text is read by the
strict grammar, whose fault is the reason for a bad row, and then taken as it is. Which of the two a record is, its data
set says: text is looked for first, unless it names a field of messages, and that may hold text as well.

Reading costs what the grammar takes for a text, and what intake and composition take for a chat.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast, get_args

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.parse import fields_read
from tokenmill.tasks.chat.sequences import Pieces
from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.tokenize.settings import SpecialTokens

from .compose import compose, compose_literally
from .converters import openai_messages
from .grammar import Fault, parse
from .sequences import HarmonyConversation, HarmonyRenderer
from .turns import TEMPLATE_VERSION, Effort, ParallelCalls, Policy, Thoughts, Trailing

HARMONY = "harmony"
"""The name of this chat template."""

TEXT = "text"
"""The field of Harmony text where a data set names no other."""

UNTRAINED = "untrained_messages"
"""The field beside a text that numbers the messages which are not to be trained on, as normalized rows have it."""

OPTIONS: Mapping[str, Sequence[str]] = {
    "effort": get_args(Effort),
    "parallel_calls": get_args(ParallelCalls),
    "thoughts": get_args(Thoughts),
    "trailing": get_args(Trailing),
}
"""What can be chosen about composition as variables of the template; control strings have a setting of their own."""


@dataclass(frozen=True, slots=True)
class HarmonyTemplate:
    """Harmony in the place of a Jinja template: how chat is composed, and the version of that."""

    policy: Policy

    @property
    def source(self) -> str:
        """Its name."""
        return HARMONY

    @property
    def digest(self) -> str:
        """What changes when the same record becomes another text."""
        return f"{HARMONY}:{TEMPLATE_VERSION}"

    @property
    def variables(self) -> dict[str, Any]:
        """Everything that was chosen, defaults too."""
        return {name: value for name, value in asdict(self.policy).items() if name in OPTIONS}

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> "HarmonyTemplate":
        """The template with some choices. Raises InputError, with the nearest known one, for what is none."""
        for name, value in variables.items():
            if name not in OPTIONS:
                raise InputError(f"template_variables: {name!r} means nothing for Harmony; {nearest(name, OPTIONS)}")
            if value not in OPTIONS[name]:
                known = ", ".join(OPTIONS[name])
                raise InputError(f"template_variables.{name}: {value!r} is no choice; known: {known}")
        return cls(Policy(**variables))


@dataclass(frozen=True, slots=True)
class HarmonyRows:
    """The rows of a data set as Harmony sequences."""

    template: HarmonyTemplate
    renderer: HarmonyRenderer
    special: SpecialTokens
    messages_field: str | None
    tools_field: str

    @property
    def fields(self) -> list[str]:
        """The fields of a record that are looked at."""
        texts = [TEXT] if self.messages_field is None else []
        others = ["reasoning", "reasoning_effort", UNTRAINED]
        return [*texts, *fields_read(self.messages_field, self.tools_field), *others]

    def read(self, record: Mapping[str, Any]) -> HarmonyConversation | Rejected:
        """The conversation in a record, or why there is none."""
        given = _at(record, self.messages_field or TEXT)
        if isinstance(given, str) and not (self.messages_field and given.lstrip().startswith("[")):
            return _conversation(given, self.messages_field or TEXT, record.get(UNTRAINED))
        return self._composed(record)

    def sequences(self, conversation: HarmonyConversation) -> list[Pieces] | Rejected:
        """The sequences that a conversation is trained as."""
        return self.renderer.sequences(conversation)

    def said(self, conversation: HarmonyConversation) -> Iterable[str]:
        """What is said in a conversation, and by whom, by which it is told from others."""
        for message in conversation.messages:
            yield from (message.author, message.recipient or "", message.channel or "", message.body)

    def texts(self, conversation: HarmonyConversation) -> Iterable[str]:
        """The texts of a conversation that are encoded, without headers."""
        return (message.body for message in conversation.messages if message.body)

    def flagged(self, conversation: HarmonyConversation) -> int:
        """How many messages the data itself keeps from being trained on."""
        return sum(not message.trained for message in conversation.messages if message.author == "assistant")

    def _composed(self, record: Mapping[str, Any]) -> HarmonyConversation | Rejected:
        """Thoughts of earlier turns stay, since they may be learned in a sequence of their own."""
        source = openai_messages.convert(self._renamed(record), HARMONY)
        if isinstance(source, Rejected):
            return source
        keeping = replace(self.template.policy, thoughts="keep_all", special_strings="reject")
        composed = (compose if self.special == "reject" else compose_literally)(source, keeping)
        if isinstance(composed, Rejected):
            return composed
        return HarmonyConversation(composed.messages, forgets=self.template.policy.thoughts == "last_turn")

    def _renamed(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """The record with messages and tools where the converter looks for them."""
        if self.messages_field is None:
            return {**record, "tools": _at(record, self.tools_field)}
        others = {name: record.get(name) for name in ("system", "reasoning", "reasoning_effort")}
        return {**others, "messages": _at(record, self.messages_field), "tools": _at(record, self.tools_field)}


def _conversation(text: str, field: str, untrained: object) -> HarmonyConversation | Rejected:
    found = parse(text)
    if isinstance(found, Fault):
        detail = f"{found.code} at character {found.offset} of {field}: {found.detail}"
        return Rejected(found.name, f"{detail}; if the conversation is elsewhere, name its messages_field")
    numbers = cast("list[object]", untrained) if isinstance(untrained, list) else []
    return HarmonyConversation(
        [replace(each, trained=number not in numbers) if numbers else each for number, each in enumerate(found)]
    )


def _at(record: Mapping[str, Any], path: str) -> object:
    """What stands at a dotted path, None where there is nothing."""
    found: object = record
    for key in path.split("."):
        found = cast("Mapping[str, object]", found).get(key) if isinstance(found, Mapping) else None
    return found
