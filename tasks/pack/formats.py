"""Chat formats: a Jinja template or Harmony turns the rows of a dataset into sequences."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from tokenmill.tasks.chat.check import checked_renderer, load_template, renderer_of, variant
from tokenmill.tasks.chat.controls import Controls
from tokenmill.tasks.chat.conversation import Conversation, RejectionError, apart, rejecting, required
from tokenmill.tasks.chat.encoding import Filled, Segments
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.chat.probes import unwritten_in
from tokenmill.tasks.chat.programs import Programs
from tokenmill.tasks.chat.sequences import Renderer, SplitTurns
from tokenmill.tasks.chat.shapes import KWARGS, Given, fields_read
from tokenmill.tasks.chat.template import ChatTemplate, compiled
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.message import Policy
from tokenmill.tasks.harmony.sequences import CONTROLS, HarmonyRenderer
from tokenmill.tasks.harmony.training import HARMONY, HarmonyRows, HarmonyTemplate, checked, has_tokens, require_tokens
from tokenmill.tasks.sources.files import Rejected
from tokenmill.tasks.tokenize.settings import SpecialTokens
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .settings import AUTO, SftSettings

Read = TypeVar("Read")
"""A conversation as read by its format."""

Template = ChatTemplate | HarmonyTemplate
"""Both have `source` (text or name), `digest` (changes with the meaning of the source) and JSON `variables`."""


class Rows(Protocol[Read]):
    """Reads the rows of a dataset in a format."""

    @property
    def fields(self) -> Sequence[str]:
        """Fields of a record that are read."""
        ...

    def read(self, record: Mapping[str, Any]) -> Read | Rejected:
        """Return the conversation in a record."""
        ...

    def sequences(self, conversation: Read, /) -> Sequence[Segments | Filled] | Rejected:
        """Return the sequences that a conversation is trained as, at least one."""
        ...

    def said(self, conversation: Read, /) -> Iterable[str]:
        """Return the texts that identify a conversation, regardless of its row's format."""
        ...

    def texts(self, conversation: Read, /) -> Iterable[str]:
        """Encoded texts, as samples for the exactness gate."""
        ...

    def flagged(self, conversation: Read, /) -> int:
        """Number of messages that the data excludes from training, whole or in part."""
        ...

    def unread(self, conversation: Read, /) -> Sequence[str]:
        """What of a row isn't read, or isn't written by the template; rows are counted by it."""
        ...


def renderer_in(maker: Programs | Renderer) -> Renderer:
    """Return the renderer that programs are learned from, or the one that works without them."""
    return maker.renderer if isinstance(maker, Programs) else maker


MAX_VARIANTS = 256
"""Combinations of variables of rows that are kept; probing one takes 0.1 s."""


@dataclass(frozen=True, slots=True)
class ChatRows:
    """Reads the rows of a dataset for a Jinja template; rows with their own variables have their own maker."""

    vocabulary: Vocabulary
    split_turns: SplitTurns
    maker: Programs | Renderer
    special: SpecialTokens
    messages_field: str | None
    tools_field: str
    given: Given = ()
    _variants: dict[bytes, Programs | Renderer | Rejected] = field(default_factory=dict[bytes, Any])

    @property
    def fields(self) -> list[str]:
        return fields_read(self.messages_field, self.tools_field, self.given)

    @rejecting
    def read(self, record: Mapping[str, Any]) -> Conversation:
        found = required(conversation(record, self.messages_field, self.tools_field, self.given))
        renderer = renderer_in(required(self._maker(found)))
        found = required(apart(found, renderer.inline))
        if self.special == "reject" and renderer.controls.spelled_in(found):
            raise RejectionError("special_token_in_text", "the text contains a control string of the template")
        return found

    def sequences(self, conversation: Conversation) -> Sequence[Segments | Filled] | Rejected:
        maker = self._maker(conversation)
        return maker if isinstance(maker, Rejected) else maker.sequences(conversation)

    def _maker(self, conversation: Conversation) -> Programs | Renderer | Rejected:
        """What makes the sequences of a conversation, by its variables that the template reads."""
        base = renderer_in(self.maker)
        # Variables that the template doesn't read change nothing, and would only fill the cache.
        own = {name: value for name, value in conversation.variables.items() if base.template.reads(name)}
        if not own:
            return self.maker
        key = orjson.dumps(own, option=orjson.OPT_SORT_KEYS)
        if key not in self._variants:
            # A variable such as a date may have a value per row, so memory is bounded by beginning anew.
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            found = variant(base, own, self.vocabulary, self.split_turns, self.special)
            filled = isinstance(self.maker, Programs)
            self._variants[key] = Programs(found) if filled and isinstance(found, Renderer) else found
        return self._variants[key]

    def said(self, conversation: Conversation) -> Iterable[str]:
        for message in conversation.messages:
            yield from (message["role"], message["content"] or "", message.get("reasoning_content", ""))
            for call in message.get("tool_calls", ()):
                yield from (call["function"]["name"], call["function"]["arguments"].text)

    def texts(self, conversation: Conversation) -> Iterable[str]:
        return (message["content"] for message in conversation.messages if message["content"])

    def flagged(self, conversation: Conversation) -> int:
        return sum("trained" in message for message in conversation.messages)

    def unread(self, conversation: Conversation) -> Sequence[str]:
        maker = self._maker(conversation)
        kinds = frozenset[str]() if isinstance(maker, Rejected) else renderer_in(maker).unwritten
        template = renderer_in(self.maker).template
        names = [f"{KWARGS}.{name}" for name in conversation.variables if not template.reads(name)]
        return [*conversation.unread, *unwritten_in(conversation, kinds), *names]


def without_programs(rows: Rows[Any]) -> Rows[Any]:
    """Return the same, but every conversation is rendered."""
    if isinstance(rows, ChatRows) and isinstance(rows.maker, Programs):
        return replace(rows, maker=rows.maker.renderer, _variants={})
    return rows


@dataclass(frozen=True, slots=True)
class Format:
    """A template for a vocabulary and a loss policy, with the control tokens that it writes.

    `rows` takes the fields of messages, tools and other parts, and reads the rows of a dataset.
    """

    template: Template
    controls: Controls
    rows: Callable[[str | None, str, Given], Rows[Any]]


@dataclass(frozen=True, slots=True)
class CheckedFormat:
    """A format that passed its self-check; `refused` maps each rejected conversation type to the reason."""

    format: Format
    refused: Mapping[str, str]
    warnings: Sequence[str]


def with_template(settings: SftSettings, vocabulary: Vocabulary) -> SftSettings:
    """Return the settings with the template that `auto` chooses, which the manifest and the summary name."""
    if settings.chat_template != AUTO:
        return settings
    return settings.model_copy(update={"chat_template": HARMONY if has_tokens(vocabulary) else "tokenizer"})


def find_template(settings: SftSettings, vocabulary: Vocabulary) -> Template:
    """Return the template that the settings name.

    Raises InputError if it does not exist, or does not fit the vocabulary or the settings.
    """
    settings = with_template(settings, vocabulary)
    if settings.chat_template == HARMONY:
        require_tokens(vocabulary)
        return HarmonyTemplate.of(settings.template_variables)
    if settings.loss_on == "assistant_bodies":
        raise InputError(
            "loss_on=assistant_bodies: only chat_template=harmony separates message bodies from headers; set "
            "loss_on=assistant_all, which trains on everything the model generates"
        )
    return load_template(settings.chat_template, vocabulary, settings.template_variables)


def checked_format(settings: SftSettings, vocabulary: Vocabulary, policy: LossPolicy, store: str) -> CheckedFormat:
    """Return the format of the settings after its self-check, which is cached in the store.

    Raises InputError as `find_template` does, and if its masks cannot be trusted.
    """
    template, special = find_template(settings, vocabulary), settings.special_tokens_in_text
    if isinstance(template, ChatTemplate):
        found = checked_renderer(template, vocabulary, policy, settings.split_turns, special, store)
        # Text of the data that spells a marker could not be told from the marker.
        if not (found.renderer.controls.written.ids or settings.allow_text_markers):
            raise InputError(
                f"chat_template: none of its markers is a control token of {settings.tokenizer.model}, so text in the data could end "
                "a turn; choose the model's own tokenizer and chat_template=tokenizer, or set allow_text_markers=true"
            )
        chat = _jinja(found.renderer, vocabulary, settings.split_turns, special)
        return CheckedFormat(chat, found.refused, found.warnings)
    renderer = _harmony_renderer(policy, settings.split_turns)
    rows = HarmonyRows(template, renderer, special, None, "tools")
    return CheckedFormat(_harmony(template, renderer, special), checked(rows, vocabulary, store), [])


def format_of(
    source: str, variables: Mapping[str, Any], vocabulary: Vocabulary, policy: LossPolicy, split_turns: SplitTurns,
    special: SpecialTokens,
) -> Format:  # fmt: skip
    """Return the format of a template's source and variables, without a self-check."""
    if source == HARMONY:
        return _harmony(HarmonyTemplate(Policy(**variables)), _harmony_renderer(policy, split_turns), special)
    renderer = renderer_of(compiled(source, variables), vocabulary, policy, split_turns, special)
    return _jinja(renderer, vocabulary, split_turns, special)


def _jinja(renderer: Renderer, vocabulary: Vocabulary, split_turns: SplitTurns, special: SpecialTokens) -> Format:
    rows = partial(ChatRows, vocabulary, split_turns, Programs(renderer), special)
    return Format(renderer.template, renderer.controls, rows)


def _harmony(template: HarmonyTemplate, renderer: HarmonyRenderer, special: SpecialTokens) -> Format:
    return Format(template, CONTROLS, partial(HarmonyRows, template, renderer, special))


def _harmony_renderer(policy: LossPolicy, split_turns: SplitTurns) -> HarmonyRenderer:
    return HarmonyRenderer(policy, splits_turns=split_turns == "auto")
