"""One message, from the form its source gave it.

Most messages are plain: a role and a string. They pass on a path of their own that asks a few questions and copies no
text; everything that may be odd takes the long way, and says at its first fault what is wrong and what to do about it.
"""

from typing import Any

from tokenmill.tasks.errors import nearest

from .conversation import Message, RejectionError, Role
from .json_values import json_text, kind, listed, parsed, quoted, require_single_keys, require_utf8
from .loss_flags import trained_characters
from .reasoning import given_reasoning, split_thinking
from .tool_calls import read_tool_calls, string_at

PLAIN = {"role", "content"}

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""The roles of OpenAI's messages; `function` is the older name of `tool`."""

SPEAKERS: dict[str, Role] = {
    **ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Who speaks in ShareGPT's turns."""

PARTS = ("text", "image_url", "input_audio", "file", "refusal")
"""The types of content parts in OpenAI's API; each part has its content under the name of its type."""


def read_message(value: object) -> Message:
    """`value` as a message.

    Raises RejectionError, which says what is wrong but not in which message.
    """
    if type(value) is dict and value.keys() == PLAIN:
        role, content = value["role"], value["content"]
        if isinstance(role, str) and role in ROLES and isinstance(content, str) and "think>" not in content:
            require_utf8(content, "its content")
            return {"role": ROLES[role], "content": content}
    return _read_any(value)


def _read_any(value: object) -> Message:
    if not isinstance(value, dict):
        raise RejectionError("bad_message", f"it is {kind(value)}; make it an object with role and content")
    fields: dict[str, Any] = value
    require_single_keys(fields, "bad_message", "it")
    if fields.get("role") is None and fields.get("from") is not None:
        fields = _openai_form(fields)
    role = _role(fields.get("role"), ROLES, fields)
    content = _text(fields.get("content"), role)
    reasoning = given_reasoning(fields, role)
    if role == "assistant" and content:
        thoughts, content = split_thinking(content)
        if thoughts and reasoning:
            raise RejectionError("reasoning_twice", "it has reasoning under a key and inline in its content; keep one")
        reasoning = reasoning or thoughts
    return _message(role, content, reasoning, fields)


def _message(role: Role, content: str | None, reasoning: str | None, fields: dict[str, Any]) -> Message:
    message: Message = {"role": role, "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls := read_tool_calls(fields, role):
        message["tool_calls"] = calls
    elif content is None:
        raise RejectionError("no_content", f"it has no content; its keys: {listed(fields)}")
    if role == "tool" and (identifier := string_at(fields, "tool_call_id", "bad_message", "its")):
        message["tool_call_id"] = identifier
    if name := string_at(fields, "name", "bad_message", "its"):
        message["name"] = name
    if (trained := trained_characters(fields, role, content)) is not None:
        message["trained"] = trained
    return message


def _openai_form(turn: dict[str, Any]) -> dict[str, Any]:
    """A ShareGPT turn under OpenAI's keys; what else it has stays."""
    value = turn.get("value")
    role = _role(turn["from"], SPEAKERS, turn)
    if turn["from"] != "function_call":
        return {**turn, "role": role, "content": value}
    calls = parsed(value, "bad_tool_calls", "its value, a tool call,") if isinstance(value, str) else value
    return {**turn, "role": role, "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}


def _role(name: object, known: dict[str, Role], fields: dict[str, Any]) -> Role:
    if name is None:
        raise RejectionError("unknown_role", f"it has neither role nor from; its keys: {listed(fields)}")
    if not isinstance(name, str):
        raise RejectionError("unknown_role", f"its role is {kind(name)}; make it a string")
    if name not in known:
        raise RejectionError("unknown_role", f"its role is {quoted(name)}; {nearest(name[:40], known)}")
    return known[name]


def _text(value: object, role: Role) -> str | None:
    """Content as text. What a tool gave back may be anything, and is its JSON where it is no text."""
    if value is None:
        return None
    if isinstance(value, str):
        text = value
    elif isinstance(value, list) and (role != "tool" or _has_part(value)):
        text = "".join(_part(part, number) for number, part in enumerate(value, 1))
    elif role == "tool":
        return json_text(value, "not_text", "its content")
    else:
        raise RejectionError("not_text", f"its content is {kind(value)}; make it a string or an array of text parts")
    require_utf8(text, "its content")
    return text


def _has_part(items: list[Any]) -> bool:
    """Whether an array from a tool holds content parts, instead of being what the tool gave back."""
    objects = [item for item in items if isinstance(item, dict)]
    return any(item.get("type") == name and item.get(name) is not None for item in objects for name in PARTS)


def _part(part: object, number: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RejectionError("not_text", f"part {number} of its content is {kind(part)}; make it a text part")
    if part.get("type") != "text":
        found = quoted(part.get("type"))
        raise RejectionError("not_text", f"part {number} of its content has the type {found}; only 'text' can be read")
    text = part.get("text")
    if not isinstance(text, str):
        raise RejectionError("not_text", f"the text of part {number} of its content is {kind(text)}; make it a string")
    return text
