"""Messages of openai-harmony, in the JSON of its `Message.to_dict`, as messages of Harmony text.

Channels, recipients and content types are kept. The library itself writes the content of its system and developer messages.
"""

from collections.abc import Sequence
from typing import Any

from openai_harmony import DeveloperContent, Message, Role, SystemContent, TextContent
from tokenmill.tasks.chat.conversation import RejectionError
from tokenmill.tasks.chat.conversation import Role as ChatRole
from tokenmill.tasks.chat.json_values import kind, quoted
from tokenmill.tasks.chat.messages import trained_characters

from .grammar import FaultError
from .message import HarmonyMessage
from .preamble import body_of
from .render import from_reference, opening


def harmony_messages(given: Sequence[Any]) -> list[HarmonyMessage]:
    """Return the messages. Raise RejectionError, with its number, for one that isn't Harmony."""
    read: list[Message] = []
    untrained: set[int] = set()
    for number, each in enumerate(given):
        where = f"message {number + 1} of {len(given)}"
        try:
            message = _message(each)
            role: ChatRole = "assistant" if message.author.role == Role.ASSISTANT else "user"
            text = "".join(part.text for part in message.content if isinstance(part, TextContent))
            if trained_characters(each, role, text) is not None:
                untrained.add(number)
        except RejectionError as error:
            raise RejectionError(error.reason, f"{where}: {error.detail}") from error
        read.append(message)
    functions = any(isinstance(part, DeveloperContent) and part.tools for message in read for part in message.content)
    made: list[HarmonyMessage] = []
    for number, message in enumerate(read):
        try:
            made.append(_made(message, functions=functions))
            opening(made[-1])
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


def _made(message: Message, *, functions: bool) -> HarmonyMessage:
    role = message.author.role
    for content in message.content:
        if isinstance(content, SystemContent | DeveloperContent):
            return HarmonyMessage(role.value, body_of(role, content, functions=functions))
    calls = role == Role.ASSISTANT and message.recipient not in {None, "all"}
    return from_reference(message, "call" if calls else "end")
