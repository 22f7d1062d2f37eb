"""A conversation as chat templates see it, whatever shape its row had.

It is the OpenAI form, made strict: keys that say nothing are absent instead of null, reasoning stands apart from the
answer, and the arguments of tool calls are objects. Messages are plain dicts, because templates take dicts and test
keys with `is defined`; a class for each would cost a conversion on the way in and another on the way out.

The arguments of a call come as an object or as JSON text, and templates want either. Both are kept, so that a template
which prints the text prints the very text of the source, blanks and all, and not one that was parsed and written anew.
"""

from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from tokenmill.tasks.sources.files import Rejected as Rejected  # noqa: PLC0414 - for those who read conversations

Role = Literal["system", "developer", "user", "assistant", "tool"]

Range = tuple[int, int]
"""Characters of a text, from the first to before the second."""

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
    "bad_loss_flag",
    "no_assistant",
]
"""Why a record is no conversation."""


class Arguments(dict[str, Any]):
    """The arguments of a tool call; `text` is their JSON, the source's own where it gave a string."""

    __slots__ = ("text",)

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text


class Function(TypedDict):
    """Which function is called, and with what."""

    name: str
    arguments: Arguments


class ToolCall(TypedDict):
    """One call by the assistant."""

    type: Literal["function"]
    function: Function
    id: NotRequired[str]


class Message(TypedDict):
    """One message. Absent keys are absent, never None; only `content` may be None, beside tool calls.

    `reasoning_content` is never blank and, like `tool_calls`, the assistant's alone; `tool_call_id` is a tool's.
    `trained` is for the assistant's messages that the data keeps from being trained on, whole or in part: the characters
    of the content that may be, in order (see `loss_flags.py`). Templates do not see it.
    """

    role: Role
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    trained: NotRequired[tuple[Range, ...]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages, at least one of them by the assistant, and the tools that were offered, as the source has them."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class RejectionError(ValueError):
    """Raised while a record is read, and caught by whoever reads the record: why it cannot be used."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
