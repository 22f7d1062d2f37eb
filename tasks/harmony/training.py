"""Harmony as a chat template: options, records to conversations, and its self-check.

A record is Harmony text under `text`, or under the field set by `messages_field`, or chat, which is composed as for a
normalization. The strict grammar parses the text, which is used unchanged.

The self-check composes the same conversations as for Jinja templates, and requires the same: the tokens decode to the text, the
trained ones match the policy, and the ids are the tokenizer's own. In addition, the ids must equal openai-harmony's. It
takes about a second, and the result is cached in the store.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, get_args

import numpy as np
from tokenmill.tasks.chat.check import refusals, remembered_check, text_encoder
from tokenmill.tasks.chat.conversation import Conversation, rejecting, required
from tokenmill.tasks.chat.encoding import Batch, Segments
from tokenmill.tasks.chat.probes import NO_QUESTION, PROBES
from tokenmill.tasks.chat.shapes import Given, fields_read
from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.renamed import LEAVES, renamed
from tokenmill.tasks.sources.files import Rejected
from tokenmill.tasks.tokenize.settings import SpecialTokens
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .compose import compose
from .converters import EFFORT, TEXT, UNTRAINED, Names, chat, harmony_text, text_field
from .message import TEMPLATE_VERSION, Effort, ParallelCalls, Policy, Thoughts, Trailing
from .render import TAGS
from .semantics import prompt_faults
from .sequences import CONTROLS, HarmonyConversation, HarmonyRenderer
from .vocabulary import IDS, encoding

HARMONY = "harmony"  # the name of this chat template

OPTIONS: Mapping[str, Sequence[str]] = {
    "effort": get_args(Effort),
    "parallel_calls": get_args(ParallelCalls),
    "keep_reasoning": get_args(Thoughts),
    "trailing": get_args(Trailing),
}
"""Options of the composition, set as template variables; control strings have their own setting."""

POLICIES = {new: old for old, new in LEAVES.items()}
"""The field of a policy by the name of its option today. Fields are hashed, so they keep their names."""


@dataclass(frozen=True, slots=True)
class HarmonyTemplate:
    """Harmony in place of a Jinja template."""

    policy: Policy

    @property
    def source(self) -> str:
        return HARMONY

    @property
    def digest(self) -> str:
        """Changes if a record is rendered as a different text."""
        return f"{HARMONY}:{TEMPLATE_VERSION}"

    @property
    def variables(self) -> dict[str, Any]:
        """The policy's fields that are options, as recipes keep them."""
        return {name: value for name, value in asdict(self.policy).items() if LEAVES.get(name, name) in OPTIONS}

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> "HarmonyTemplate":
        """Return the template with some options. Raises InputError for an unknown option or value, and for an option's old name."""
        for name, value in variables.items():
            if name not in OPTIONS:
                why = renamed(name, OPTIONS) or f"{name!r} isn't an option of Harmony; {nearest(name, OPTIONS)}"
                raise InputError(f"template_variables: {why}")
            if value not in OPTIONS[name]:
                known = ", ".join(OPTIONS[name])
                raise InputError(f"template_variables.{name}: {value!r} is not a valid value; choose one of {known}")
        return cls(Policy(**{POLICIES.get(name, name): value for name, value in variables.items()}))


@dataclass(frozen=True, slots=True)
class HarmonyRows:
    """Reads the rows of a dataset for Harmony."""

    template: HarmonyTemplate
    renderer: HarmonyRenderer
    special: SpecialTokens
    messages_field: str | None
    tools_field: str
    given: Given = ()

    @property
    def names(self) -> Names:
        """The fields that the blend names."""
        return Names(self.messages_field, self.tools_field, self.given)

    @property
    def fields(self) -> list[str]:
        """Fields of a record that are read."""
        texts = [TEXT] if self.messages_field is None else []
        others = ["reasoning", EFFORT, UNTRAINED]
        return [*texts, *fields_read(self.messages_field, self.tools_field, self.given), *others]

    @rejecting
    def read(self, record: Mapping[str, Any]) -> HarmonyConversation:
        """Return the conversation in a record."""
        field = text_field(record, self.names)
        if field is not None:
            return HarmonyConversation(required(harmony_text(record, field)))
        source = required(chat(record, self.names, field=None))
        # Keeps the reasoning of earlier turns, because it may be trained on in a separate sequence
        keeping = replace(self.template.policy, thoughts="keep_all", special_strings="reject")
        composed = required(compose(source, keeping, literally=self.special != "reject"))
        return HarmonyConversation(composed.messages, self.template.policy.thoughts == "last_turn", source.unread)

    def sequences(self, conversation: HarmonyConversation) -> list[Segments] | Rejected:
        """Return the sequences that a conversation is trained as."""
        return self.renderer.sequences(conversation)

    def said(self, conversation: HarmonyConversation) -> Iterable[str]:
        """Yield the texts and authors that identify a conversation."""
        for message in conversation.messages:
            yield from (message.author, message.recipient or "", message.channel or "", message.body)

    def texts(self, conversation: HarmonyConversation) -> Iterable[str]:
        """Encoded texts, without headers."""
        return (message.body for message in conversation.messages if message.body)

    def flagged(self, conversation: HarmonyConversation) -> int:
        """Number of messages that the data excludes from training."""
        return sum(not message.trained for message in conversation.messages if message.author == "assistant")

    def unread(self, conversation: HarmonyConversation) -> Sequence[str]:
        """What of the row isn't read, and whether it lacks a question."""
        lacks = any(prompt_faults(conversation.messages))
        return [*conversation.unread, NO_QUESTION] if lacks else conversation.unread


def has_tokens(vocabulary: Vocabulary) -> bool:
    """Return whether a vocabulary has Harmony's control tokens with their ids."""
    return all(vocabulary.controls.get(token) == number for token, number in CONTROLS.ids.items())


def require_tokens(vocabulary: Vocabulary) -> None:
    """Raises InputError unless a vocabulary has Harmony's control tokens with their ids."""
    for token, number in CONTROLS.ids.items():
        found = vocabulary.controls.get(token)
        if found != number:
            has = "no such token" if found is None else f"the id {found} for it"
            raise InputError(
                f"chat_template=harmony: {token} is token {number} of Harmony, but the tokenizer has {has}; set "
                "tokenizer.model=o200k_harmony, or choose a different chat_template"
            )


def checked(rows: HarmonyRows, vocabulary: Vocabulary, store: str) -> dict[str, str]:
    """Return the rejected conversation types, with the reason; cached in the store.

    Raises InputError, with the conversation and the fault, if masks or ids cannot be trusted.
    """
    question = [
        # All that the answer depends on: libraries, too, because a new one may encode differently.
        "self-check", rows.template.digest, rows.template.variables, vocabulary.fingerprint,
        asdict(rows.renderer.policy), rows.renderer.splits_turns, rows.special, PROBES,
        *(version(library) for library in ("tokenmill", "openai-harmony", "tokenizers", "tiktoken")),
    ]  # fmt: skip

    @rejecting
    def sequences_of(probe: Conversation) -> list[Segments]:
        found = required(rows.read({"messages": probe.messages, "tools": probe.tools}))
        sequences = required(rows.sequences(found))
        require_official(sequences, vocabulary)
        return sequences

    return remembered_check(question, store, lambda: refusals(sequences_of, CONTROLS, vocabulary))


def require_official(sequences: Sequence[Segments], vocabulary: Vocabulary) -> None:
    """Raise InputError unless the ids of sequences equal openai-harmony's."""
    batch = Batch()
    for segments in sequences:
        batch.add(segments)
    # The vocabulary's own reference, so that a fault isn't one of a faster engine.
    ids = batch.encode(text_encoder(vocabulary, CONTROLS, "reference", "literal")).ids
    names = {number: tag for tag, number in IDS.items()}
    text = "".join(names[each.token] if each.text is None else each.text for segments in sequences for each in segments)
    expected = encoding().encode(text, allowed_special=TAGS, disallowed_special=())
    if not np.array_equal(ids, expected):
        raise InputError(
            "chat_template=harmony: the tokenizer gives Harmony text other ids than openai-harmony does; set "
            "tokenizer.model=o200k_harmony, or choose a different chat_template"
        )
