"""Messages of openai-harmony, in the JSON of its `Message.to_dict`, as messages of Harmony text.

Channels, recipients and content types are kept. The library itself writes what its system and developer messages hold.
"""

from collections.abc import Sequence
from typing import Any

from openai_harmony import DeveloperContent, Message, Role, SystemContent, TextContent
from tokenmill.tasks.chat.conversation import RejectionError
from tokenmill.tasks.chat.json_values import kind, quoted
from tokenmill.tasks.chat.messages import trained_characters
from tokenmill.tasks.sources.files import Rejected

from .message import HarmonyMessage
from .preamble import body_of, system_body
from .render import from_reference


def harmony_messages(given: Sequence[Any]) -> list[HarmonyMessage] | Rejected:
    """The messages, after a system message if there is none; or why they aren't Harmony."""
    read: list[Message] = []
    untrained: set[int] = set()
    for number, each in enumerate(given):
        where = f"message {number + 1} of {len(given)}"
        if not isinstance(each, dict):
            return Rejected("bad_message", f"{where} is {kind(each)}; make it an object with role and content")
        try:
            message = Message.from_dict(each)
            text = "".join(part.text for part in message.content if isinstance(part, TextContent))
            if (
                trained_characters(each, "assistant" if message.author.role == Role.ASSISTANT else "user", text)
                is not None
            ):
                untrained.add(number)
        except RejectionError as error:
            return Rejected(error.reason, f"{where}: {error.detail}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return Rejected("bad_message", f"{where}: openai-harmony can't read it: {quoted(str(error))}")
        if message.author.name and message.author.role != Role.TOOL:
            return Rejected("named_speaker", f"{where}: {message.author.role.value} has a name, which would be lost")
        read.append(message)
    functions = any(isinstance(part, DeveloperContent) and part.tools for message in read for part in message.content)
    made = [_made(message, functions=functions) for message in read]
    for number in untrained:
        made[number].trained = False
    if made[0].author != "system":
        made.insert(0, HarmonyMessage("system", system_body("medium", python=False, functions=functions)))
    return made


def _made(message: Message, *, functions: bool) -> HarmonyMessage:
    role = message.author.role
    for content in message.content:
        if isinstance(content, SystemContent | DeveloperContent):
            return HarmonyMessage(role.value, body_of(role, content, functions=functions))
    calls = role == Role.ASSISTANT and message.recipient not in {None, "all"}
    return from_reference(message, "call" if calls else "end")
