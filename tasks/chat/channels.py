"""Messages of openai-harmony as messages of a conversation.

The library's JSON (`Message.to_dict`, `Conversation.to_json`) has a message for every channel: reasoning on `analysis`, calls
with a `recipient`, text before them on `commentary`, the answer on `final`. Here, those that make up one turn are one message:
`reasoning_content`, `content` and `tool_calls`. What its system message says of model, date and effort is the business of a
chat template, and counted as not read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .conversation import RejectionError
from .json_values import quoted

Message = Mapping[str, Any]

FUNCTIONS = "functions."
"""Prefix of the recipients that are functions of the developer."""

OPEN = "open"
"""The key of a turn that goes on, with the value None, which counts as absent."""

HEADER = frozenset({"role", "name", "content", "channel", "recipient", "content_type"})
PREAMBLES = ("system_content", "developer_content")


def without_channels(messages: Sequence[Any], unread: set[str]) -> list[Any]:
    """The messages in OpenAI's form; what of them isn't read is added to `unread`.

    Raises RejectionError for channels that are unknown, and for several thoughts in a row.
    """
    made: list[Any] = []
    for number, message in enumerate(messages, 1):
        try:
            _read(message, made, unread)
        except (AttributeError, TypeError) as error:  # a part of another type than the library's
            wrong = f"message {number} of {len(messages)} isn't as openai-harmony writes it ({error})"
            raise RejectionError("bad_message", wrong) from error
    return made


def _read(message: object, made: list[Any], unread: set[str]) -> None:
    """Add a message to those before it."""
    if not isinstance(message, Mapping):
        made.append(message)
    elif (preamble := _preamble(message)) is not None:
        made += _preambles(preamble, unread)
    elif message.get("role") == "assistant":
        _add(made, message)
    elif message.get("role") == "tool":
        named = str(message.get("name") or "").removeprefix(FUNCTIONS)
        made.append({**_rest(message), "role": "tool", "name": named, "content": message.get("content")})
    else:
        made.append({key: value for key, value in message.items() if key not in HEADER - {"role", "name", "content"}})


def _preamble(message: Message) -> Mapping[str, Any] | None:
    """The generated content of a system or developer message; None for texts."""
    content = message.get("content")
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    return next((part for part in parts if isinstance(part, Mapping) and part.get("type") in PREAMBLES), None)


def _preambles(content: Mapping[str, Any], unread: set[str]) -> list[dict[str, Any]]:
    if content["type"] == "system_content":
        unread.add("system_content")
        return []
    spaces: Mapping[str, Any] = content.get("tools") or {}
    tools = [tool for space in spaces.values() for tool in space.get("tools") or []]
    return [{"role": "developer", "content": content.get("instructions") or "", "tools": tools}]


def _add(made: list[Any], message: Message) -> None:
    """Add a message by the assistant: to the turn before it, which an answer or a call ends."""
    channel, recipient = message.get("channel"), message.get("recipient")
    recipient = None if recipient == "all" else recipient
    if channel not in {None, "analysis", "commentary", "final"}:
        raise RejectionError("bad_message", f"it is on the channel {quoted(channel)}, which Harmony doesn't have")
    part, before = _part(message, channel, recipient), made[-1] if made else None
    if not isinstance(before, dict) or before.get("role") != "assistant" or OPEN not in before:
        before = {"role": "assistant", "content": None, OPEN: None}
        made.append(before)
    if twice := [name for name in part if before.get(name) is not None]:
        raise RejectionError("reasoning_twice", f"the turn has two texts on {channel} ({twice[0]}); join them")
    before.update(part)
    if recipient or channel in {None, "final"}:
        del before[OPEN]


def _part(message: Message, channel: str | None, recipient: str | None) -> dict[str, Any]:
    content = message.get("content")
    if recipient:
        function = {"name": recipient.removeprefix(FUNCTIONS), "arguments": _text(content)}
        return {**_rest(message), "tool_calls": [{"type": "function", "function": function}]}
    if channel == "analysis":
        return {**_rest(message), "reasoning_content": _text(content)}
    return {**_rest(message), "content": content}


def _rest(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in HEADER and value is not None}


def _text(content: object) -> object:
    """The text of a content, if all its parts are texts."""
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    given = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in given if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(given) else content
