"""What a converter hands over, and what becomes of it: a conversation before Harmony, and in Harmony.

A converter knows its source and nothing of Harmony, the composition knows Harmony and no source, and these records
stand between them. So a new source is one function, and the rules of Harmony are kept once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from tokenmill.tasks.chat.conversation import Role

from .message import HarmonyMessage
from .semantics import Schemas

Effort = Literal["low", "medium", "high"]
"""How much the model is asked to reason."""

ParallelCalls = Literal["interleave", "grouped", "reject"]
SpecialStrings = Literal["reject", "escape"]
Thoughts = Literal["last_turn", "keep_all"]
Trailing = Literal["drop", "reject"]

TEMPLATE_VERSION = "1"
"""Changes whenever the same record with the same policy becomes another text."""


class Call(TypedDict):
    """A call of a tool: `arguments` is an object or an array, the JSON text of one, or None."""

    name: str
    arguments: str | dict[str, Any] | list[Any] | None
    id: NotRequired[str]


class Turn(TypedDict):
    """One message of the source. `name` and `tool_call_id` say which call a tool answers; `trained` is false where the
    source keeps the message from being trained on.
    """

    role: Role
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Call]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    trained: NotRequired[bool]


@dataclass(frozen=True, slots=True)
class Source:
    """A conversation as its source has it.

    `tools` are all that were offered, in the source's form. `instructions` is what the source asks of every answer and
    no message says. `effort` is None where the source does not tell. `python` is true where the source's Python tool
    is the one that is built into Harmony. `metadata` holds the columns that the source knows.
    """

    messages: list[Turn]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    instructions: str | None = None
    effort: Effort | None = None
    python: bool = False
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Policy:
    """What is decided for every conversation of a run.

    `effort` is for sources that do not tell. Several calls in one turn, which Harmony cannot write, are interleaved
    with their results, grouped before them, or reject the row. Text that looks like a special token rejects the row or
    is broken up by a zero-width space. Reasoning before the last user message is dropped, as in a chat with the model,
    or all of it is kept. Messages after the last one by the assistant are dropped or reject the row.
    """

    effort: Effort = "medium"
    parallel_calls: ParallelCalls = "interleave"
    special_strings: SpecialStrings = "reject"
    thoughts: Thoughts = "last_turn"
    trailing: Trailing = "drop"


@dataclass(frozen=True, slots=True)
class Composed:
    """A conversation in Harmony. `facts` holds columns by name, those of the source among them; `declared` the
    recipients that may be called, each with the schema of its arguments if it has one, and is None where these are not
    known.
    """

    messages: Sequence[HarmonyMessage]
    facts: dict[str, Any]
    declared: Schemas | None = None


class RefusedError(ValueError):
    """Raised while a conversation is composed and caught where that began: why there is none in Harmony."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
