"""Render Harmony messages as canonical text, and read messages as the reference, openai-harmony, has them.

Rendering rejects bodies with special strings and headers that would parse differently, so `parse(render(messages))` always
gives the same messages. Cost: 0.4 µs per KB and 1 µs per message.

Rows may have the library's messages, in the JSON of its `Message.to_dict`. Their channels, recipients and content types are kept;
the library itself writes the content of its system and developer messages.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import pyarrow as pa
from openai_harmony import DeveloperContent, HarmonyError, Message, Role, SystemContent, TextContent
from tokenmill.tasks.chat.conversation import RejectionError
from tokenmill.tasks.chat.conversation import Role as ChatRole
from tokenmill.tasks.chat.json_values import kind, quoted
from tokenmill.tasks.chat.messages import trained_characters
from tokenmill.tasks.errors import InputError

from .grammar import (
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    START,
    TAG,
    TERMINATORS,
    Fault,
    FaultError,
    Header,
    check_characters,
    read_header,
)
from .message import HarmonyMessage, Terminator
from .preamble import body_of
from .vocabulary import IDS, encoding, harmony_encoder

TAGS = frozenset({START, MESSAGE, CHANNEL, CONSTRAIN, *TERMINATORS})  # special strings of canonical text

ENDS = {name: tag for tag, name in TERMINATORS.items()}
ENDS_BY_ID: dict[int, Terminator] = {IDS[tag]: name for tag, name in TERMINATORS.items()}


def render(messages: Sequence[HarmonyMessage]) -> str:
    """Return the canonical text of at least one message. Raises InputError for messages that would not parse back unchanged."""
    if not messages:
        raise InputError("a conversation without messages can't be written as Harmony text; remove it")
    texts: list[str] = []
    for number, message in enumerate(messages):
        try:
            check_characters(message.body)
            begin = opening(message)
        except FaultError as error:
            raise InputError(f"message {number} by {message.author!r} cannot be written: {error}") from error
        if special := TAG.search(message.body):
            raise InputError(
                f"message {number} by {message.author!r} cannot be written: its body holds {special[0]} at character "
                f"{special.start()}, which would be read as a tag; escape or reject the text"
            )
        texts.append(f"{begin}{message.body}{ENDS[message.terminator]}")
    return "".join(texts)


def official(text: str) -> list[HarmonyMessage] | Fault:
    """Return the messages as the reference reads them, or R01 if it rejects the text.

    The ids are from our encoder: the library's own takes time quadratic in the length of a word or of a run of one character.
    """
    ids = harmony_encoder().encode(cast("pa.LargeStringArray", pa.array([text], pa.large_string()))).ids.tolist()
    try:
        read = encoding().parse_messages_from_completion_tokens(ids, strict=True)
    except HarmonyError as error:
        return Fault("R01", "reference_refuses", 0, f"the reference implementation rejects the text: {error}")
    terminators: list[Terminator] = [ENDS_BY_ID[number] for number in ids if number in ENDS_BY_ID]
    # The library also returns a last message that doesn't end.
    if len(terminators) != len(read):
        return Fault("R01", "reference_refuses", len(text), "the reference reads a message that does not end")
    return [from_reference(message, end) for message, end in zip(read, terminators, strict=True)]


def cross_check(text: str, messages: Sequence[HarmonyMessage]) -> Fault | None:
    """R01 if the reference rejects the text of `messages`, R02 if it reads other messages, else None."""
    read = official(text)
    if isinstance(read, Fault):
        return read
    # The first difference is reported; a different number of messages only if there is none.
    for number, (ours, theirs) in enumerate(zip(messages, read, strict=False)):
        if _header(ours) != _header(theirs) or (ours.body, ours.terminator) != (theirs.body, theirs.terminator):
            return Fault("R02", "reference_differs", 0, f"the reference reads message {number} as {theirs}")
    if len(messages) != len(read):
        return Fault("R02", "reference_differs", 0, f"the reference reads {len(read)} messages, not {len(messages)}")
    return None


def opening(message: HarmonyMessage) -> str:
    """Return the text of a message before its body. Raises FaultError if it would be read differently."""
    constrained = message.constrained or message.content_type is None
    return _opening(message.author, message.recipient, message.channel, message.content_type, constrained)


def _header(message: HarmonyMessage) -> Header:
    constrained = message.constrained or message.content_type is None
    return Header(message.author, message.recipient, message.channel, message.content_type, constrained)


@lru_cache(maxsize=4096)
def _opening(
    author: str, recipient: str | None, channel: str | None, content_type: str | None, constrained: bool
) -> str:
    header = Header(author, recipient, channel, content_type, constrained)
    to = "" if recipient is None else f" to={recipient}"
    on = "" if channel is None else f"{CHANNEL}{channel}"
    typed = "" if content_type is None else f" {CONSTRAIN if constrained else ''}{content_type}"
    text = f"{author}{to}{on}{typed}"
    # The parser is the judge, so there is no second list of forbidden words.
    if read_header(text) != header:
        raise FaultError("E11", 0, f"the header {text!r} would be read as {read_header(text)}")
    return f"{START}{text}{MESSAGE}"


def from_reference(message: Message, terminator: Terminator) -> HarmonyMessage:
    """Return a message of the library, with the texts of its content."""
    author, named = message.author, message.content_type
    # Only tools have names in Harmony; the library keeps those of others, too.
    name = author.name or "" if author.role == Role.TOOL else author.role.value
    body = "".join(part.text for part in message.content if isinstance(part, TextContent))
    content_type = None if named is None else named.removeprefix(CONSTRAIN)
    constrained = named is None or named.startswith(CONSTRAIN)
    return HarmonyMessage(name, body, message.recipient, message.channel, content_type, constrained, terminator)


def harmony_messages(given: Sequence[Any]) -> list[HarmonyMessage]:
    """Return the messages of a row in the library's JSON. Raise RejectionError, with its number, for one that isn't Harmony."""
    read: list[Message] = []
    untrained: set[int] = set()
    for number, each in enumerate(given):
        where = f"message {number + 1} of {len(given)}"
        try:
            message = _message(each)
            speaker: ChatRole = "assistant" if message.author.role == Role.ASSISTANT else "user"
            text = "".join(part.text for part in message.content if isinstance(part, TextContent))
            if trained_characters(each, speaker, text) is not None:
                untrained.add(number)
        except RejectionError as error:
            raise RejectionError(error.reason, f"{where}: {error.detail}") from error
        read.append(message)
    functions = any(isinstance(part, DeveloperContent) and part.tools for message in read for part in message.content)
    made: list[HarmonyMessage] = []
    for number, message in enumerate(read):
        role = message.author.role
        generated = [part for part in message.content if isinstance(part, SystemContent | DeveloperContent)]
        calls = role == Role.ASSISTANT and message.recipient not in {None, "all"}
        try:
            if generated:
                made.append(HarmonyMessage(role.value, body_of(role, generated[0], functions=functions)))
            else:
                made.append(from_reference(message, "call" if calls else "end"))
            opening(made[-1])  # which raises for a header that would be read differently
        except FaultError as error:
            raise RejectionError("bad_message", f"message {number + 1} of {len(given)}: {error}") from error
    for number in untrained:
        made[number].trained = False
    return made


def _message(given: Any) -> Message:  # noqa: ANN401 - not checked yet
    """Return a message as the library reads it. Raises RejectionError for a message that it can't read, or Harmony text can't hold."""
    if not isinstance(given, dict):
        raise RejectionError("bad_message", f"it is {kind(given)}; make it an object with role and content")
    fields: dict[str, Any] = given
    # The library takes any value for these, and fails later.
    for name in ("channel", "recipient", "content_type"):
        if not isinstance(fields.get(name), str | None):
            raise RejectionError("bad_message", f"its {name} is {kind(fields[name])}; make it a string")
    try:
        message = Message.from_dict(fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RejectionError("bad_message", f"openai-harmony can't read it: {quoted(str(error))}") from error
    if message.author.name and message.author.role != Role.TOOL:
        raise RejectionError("named_speaker", f"the {message.author.role.value} has a name, which would be lost")
    if len(message.content) > 1 and not all(isinstance(part, TextContent) for part in message.content):
        raise RejectionError("bad_message", "it has texts beside its generated content; keep one of the two")
    return message
