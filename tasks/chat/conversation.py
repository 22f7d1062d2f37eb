"""A conversation as chat templates see it.

This is OpenAI's form, made strict: keys without a value are absent, reasoning is separate from the answer, and arguments of
tool calls are objects. Messages are plain dicts, because templates need dicts and test keys with `is defined`.

Templates expect arguments as an object or as JSON text. Both are kept, so a template that prints the text prints the source's
text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from tokenmill.tasks.sources.files import Rejected as Rejected  # noqa: PLC0414 - exported again

Role = Literal["system", "developer", "user", "assistant", "tool"]

Range = tuple[int, int]
"""Characters of a text: first and end."""

Reason = Literal[
    "no_messages",
    "bad_message",
    "unknown_role",
    "no_content",
    "not_text",
    "lone_surrogate",
    "bad_reasoning",
    "reasoning_not_by_assistant",
    "reasoning_twice",
    "unclosed_think",
    "bad_tool_calls",
    "bad_tool_arguments",
    "bad_tools",
    "bad_template_kwargs",
    "bad_loss_flag",
    "no_assistant",
    "two_systems",
    "already_tokenized",
]
"""Why a record is not a conversation."""


class Arguments(dict[str, Any]):
    """The arguments of a tool call; `text` is their JSON, the source's own if it gave a string. In a rendering, `message` is the
    number of the message; else -1.
    """

    __slots__ = ("message", "text")

    def __init__(self, values: dict[str, Any], text: str, message: int = -1) -> None:
        super().__init__(values)
        self.text = text
        self.message = message


class Function(TypedDict):
    """A called function and its arguments."""

    name: str
    arguments: Arguments


class ToolCall(TypedDict):
    """A call by the assistant."""

    type: Literal["function"]
    function: Function
    id: NotRequired[str]


class Message(TypedDict):
    """One message. Keys without a value are absent; only `content` may be None, beside tool calls.

    `reasoning_content` is never blank; it and `tool_calls` are for the assistant, `tool_call_id` for tools. `trained`
    restricts training to these characters of an assistant's content (see `messages.trained_characters`), and `cut` says that a
    budget ended its reasoning, so that the end of it isn't trained on; templates see neither.
    """

    role: Role
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    trained: NotRequired[tuple[Range, ...]]
    cut: NotRequired[bool]


def without(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """The ranges without the characters `[start, stop)`."""
    parts = [part for low, high in ranges for part in ((low, min(high, start)), (max(low, stop), high))]
    return [(low, high) for low, high in parts if low < high]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages, at least one by the assistant, and the tools on offer, as in the source. `unread` names fields of the
    row that have a meaning elsewhere and aren't read here; `variables` are the row's own for the template.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    unread: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])


class RejectionError(ValueError):
    """Why a record cannot be used; raised while it is parsed, and caught by its reader."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


PLACEHOLDER = re.compile(r"[\s_.…\-\u2010-\u2015]*")
"""A first question that only stands for one; datasets have it where the question has to be fetched from elsewhere."""


def asks_nothing(question: str, *, first: bool) -> bool:
    """Whether a user's text is blank or, as the first one, a placeholder."""
    return not question or question.isspace() or (first and PLACEHOLDER.fullmatch(question) is not None)
