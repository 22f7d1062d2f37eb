"""Chat formats: what turns the rows of a data set into sequences, a Jinja template or Harmony.

A shard asks five things of a format (`Rows`) and does not care which it is. What a row is taken for is the format's own:
a template reads conversations, Harmony also rows of its own text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tokenmill.tasks.chat.check import checked_renderer, renderer_of
from tokenmill.tasks.chat.controls import Controls
from tokenmill.tasks.chat.conversation import Conversation, Rejected
from tokenmill.tasks.chat.load import load_template
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.parse import conversation, fields_read
from tokenmill.tasks.chat.sequences import Pieces, Renderer, SplitTurns
from tokenmill.tasks.chat.template import ChatTemplate
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony import check as harmony_check
from tokenmill.tasks.harmony.sequences import CONTROLS, HarmonyRenderer
from tokenmill.tasks.harmony.training import HARMONY, HarmonyRows, HarmonyTemplate
from tokenmill.tasks.tokenize.settings import SpecialTokens
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .settings import SftSettings

Read = TypeVar("Read")
"""What a format reads of a row."""


class Rows(Protocol[Read]):
    """The rows of a data set in a format."""

    @property
    def fields(self) -> Sequence[str]:
        """The fields of a record that are looked at."""
        ...

    def read(self, record: Mapping[str, Any]) -> Read | Rejected:
        """The conversation in a record, or why there is none."""
        ...

    def sequences(self, conversation: Read, /) -> list[Pieces] | Rejected:
        """The sequences that a conversation is trained as, at least one, or why there is none."""
        ...

    def said(self, conversation: Read, /) -> Iterable[str]:
        """What is said in a conversation, by which it is told from others, whatever its row looked like."""
        ...

    def texts(self, conversation: Read, /) -> Iterable[str]:
        """Texts that are encoded, for the exactness gate to try."""
        ...

    def flagged(self, conversation: Read, /) -> int:
        """How many messages the data itself keeps from being trained on, whole or in part."""
        ...


class Template(Protocol):
    """What makes a format."""

    @property
    def source(self) -> str:
        """Its text, or its name."""
        ...

    @property
    def digest(self) -> str:
        """What changes when the source means something else."""
        ...

    @property
    def variables(self) -> Mapping[str, Any]:
        """What it is given, as JSON knows it."""
        ...


class Format(Protocol):
    """A template for a vocabulary and a policy."""

    @property
    def template(self) -> Template:
        """The template."""
        ...

    @property
    def controls(self) -> Controls:
        """The control tokens that it writes."""
        ...

    def rows(self, messages_field: str | None, tools_field: str) -> Rows[Any]:
        """How the rows of a data set with these fields are read."""
        ...


@dataclass(frozen=True, slots=True)
class ChatRows:
    """The rows of a data set as a Jinja template writes them."""

    renderer: Renderer
    special: SpecialTokens
    messages_field: str | None
    tools_field: str

    @property
    def fields(self) -> list[str]:
        """See Rows."""
        return fields_read(self.messages_field, self.tools_field)

    def read(self, record: Mapping[str, Any]) -> Conversation | Rejected:
        """See Rows."""
        found = conversation(record, self.messages_field, self.tools_field)
        if isinstance(found, Rejected):
            return found
        if self.special == "reject" and self.renderer.controls.spelled_in(found):
            return Rejected("special_token_in_text", "the text contains a control string of the template")
        return found

    def sequences(self, conversation: Conversation) -> list[Pieces] | Rejected:
        """See Rows."""
        return self.renderer.sequences(conversation)

    def said(self, conversation: Conversation) -> Iterable[str]:
        """See Rows."""
        for message in conversation.messages:
            yield from (message["role"], message["content"] or "", message.get("reasoning_content", ""))
            for call in message.get("tool_calls", ()):
                yield from (call["function"]["name"], call["function"]["arguments"].text)

    def texts(self, conversation: Conversation) -> Iterable[str]:
        """See Rows: the contents of the messages."""
        return (message["content"] for message in conversation.messages if message["content"])

    def flagged(self, conversation: Conversation) -> int:
        """See Rows."""
        return sum("trained" in message for message in conversation.messages)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A Jinja template."""

    renderer: Renderer
    special: SpecialTokens

    @property
    def template(self) -> ChatTemplate:
        """See Format."""
        return self.renderer.template

    @property
    def controls(self) -> Controls:
        """See Format."""
        return self.renderer.controls

    def rows(self, messages_field: str | None, tools_field: str) -> ChatRows:
        """See Format."""
        return ChatRows(self.renderer, self.special, messages_field, tools_field)


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """Harmony, which is no template but written message by message."""

    template: HarmonyTemplate
    renderer: HarmonyRenderer
    special: SpecialTokens

    @property
    def controls(self) -> Controls:
        """See Format."""
        return CONTROLS

    def rows(self, messages_field: str | None, tools_field: str) -> HarmonyRows:
        """See Format."""
        return HarmonyRows(self.template, self.renderer, self.special, messages_field, tools_field)


@dataclass(frozen=True, slots=True)
class CheckedFormat:
    """A format that was seen to be right, and what a person should know about it: `refused` maps the kinds of
    conversation that it does not take to the reason.
    """

    format: Format
    refused: Mapping[str, str]
    warnings: Sequence[str]


def find_template(settings: SftSettings, vocabulary: Vocabulary) -> Template:
    """The template that the settings name.

    Raises InputError when there is none, or when vocabulary or settings do not fit it.
    """
    if settings.chat_template == HARMONY:
        harmony_check.require_tokens(vocabulary)
        return HarmonyTemplate.of(settings.template_variables)
    if settings.loss_on == "assistant_bodies":
        raise InputError(
            "loss_on=assistant_bodies: only chat_template=harmony tells what a message says from its header; set "
            "loss_on=assistant_all, which trains on what the model generates"
        )
    return load_template(settings.chat_template, vocabulary, settings.template_variables)


def checked_format(settings: SftSettings, vocabulary: Vocabulary, policy: LossPolicy, store: str) -> CheckedFormat:
    """The format that the settings ask for, after its self-check, whose outcome is kept in the store.

    Raises InputError as `find_template` does, and when its masks cannot be trusted.
    """
    template, special = find_template(settings, vocabulary), settings.special_tokens_in_text
    if isinstance(template, ChatTemplate):
        checked = checked_renderer(template, vocabulary, policy, settings.split_turns, special, store)
        return CheckedFormat(ChatFormat(checked.renderer, special), checked.refused, checked.warnings)
    found = _harmony(template.variables, policy, settings.split_turns, special)
    return CheckedFormat(found, harmony_check.checked(found.rows(None, "tools"), vocabulary, store), [])


def format_of(
    source: str, variables: Mapping[str, Any], vocabulary: Vocabulary, policy: LossPolicy, split_turns: SplitTurns,
    special: SpecialTokens,
) -> Format:  # fmt: skip
    """The format of a template's source and variables for a vocabulary; not checked."""
    if source == HARMONY:
        return _harmony(variables, policy, split_turns, special)
    return ChatFormat(renderer_of(ChatTemplate(source, variables), vocabulary, policy, split_turns, special), special)


def _harmony(
    variables: Mapping[str, Any], policy: LossPolicy, split_turns: SplitTurns, special: SpecialTokens
) -> HarmonyFormat:
    renderer = HarmonyRenderer(policy, splits_turns=split_turns == "auto")
    return HarmonyFormat(HarmonyTemplate.of(variables), renderer, special)
