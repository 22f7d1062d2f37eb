"""Messages: as a source has them, and in Harmony.

    <|start|>AUTHOR to=RECIPIENT<|channel|>CHANNEL <|constrain|>TYPE<|message|>BODY<|end|>

These records are the interface between converters, which know their sources, and the composition, which knows Harmony: a
converter returns a `Source`, which becomes `Composed`. Equal Harmony messages are written alike. `render` rejects messages that
cannot be written, and `faults` checks those that can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from tokenmill.tasks.chat.conversation import Role

Terminator = Literal["end", "call", "return"]
"""How a message ends: normally, by calling its recipient, or as the last token of a training target."""

ROLES = frozenset({"system", "developer", "user", "assistant"})
"""The authors that are not tools. A tool has its own name, such as `functions.get_order` or `python`."""

CHANNELS = ("analysis", "commentary", "final")
"""For private reasoning and calls of built-in tools; for calls of functions and text between them; for the answer."""

FUNCTIONS = "functions."  # prefix of the name of a developer's function, as recipient and as author
TEMPLATE_VERSION = "2"  # increment it when the same record and policy give a different text
Effort = Literal["low", "medium", "high"]  # reasoning effort

ParallelCalls = Literal["interleave", "grouped", "reject"]
SpecialStrings = Literal["reject", "escape"]
Thoughts = Literal["last_turn", "keep_all"]
Trailing = Literal["drop", "reject"]

Schemas = Mapping[str, Mapping[str, Any] | None]  # the JSON schema of a tool's arguments by its name as recipient


@dataclass(slots=True)  # frozen, it would take ten times as long to make
class HarmonyMessage:
    """A message; never changed once it is made. `author` is a role or a tool's name; `content_type` is the type of `body`, such as json, and
    `constrained` is whether `<|constrain|>` precedes it (ignored without a content type). `trained` is not
    written: false if the data excludes the message from training.
    """

    author: str
    body: str
    recipient: str | None = None
    channel: str | None = None
    content_type: str | None = None
    constrained: bool = True
    terminator: Terminator = "end"
    trained: bool = field(default=True, compare=False)


class Call(TypedDict):
    """A tool call; `arguments` is an object or an array, the JSON text of one, or None."""

    name: str
    arguments: str | dict[str, Any] | list[Any] | None
    id: NotRequired[str]


class Turn(TypedDict):
    """A message of the source. `name` and `tool_call_id` identify the call that a tool answers; `trained` is false if the source
    excludes the message from training.
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
    """A conversation of a source: its messages, and the tools it offers, in the source's form.

    `instructions` apply to every answer and are not part of any message. `effort` is None if the source does not state it.
    `python` is true if the source's Python tool is the one built into Harmony. `metadata` holds columns of the source, `unread`
    names what of the row isn't read. `written` are the messages if the source has them in Harmony, maybe without a system message.
    """

    messages: list[Turn]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    instructions: str | None = None
    effort: Effort | None = None
    python: bool = False
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    unread: tuple[str, ...] = ()
    written: Sequence["HarmonyMessage"] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """Choices for every conversation of a run.

    `effort` is for sources that do not state it. Several calls in one turn, which Harmony cannot express, are interleaved with
    their results, grouped before them, or rejected. Text that spells a special token is rejected or broken up by a zero-width
    space. Reasoning before the last user message is dropped, as in a chat with the model, or kept. Messages after the
    assistant's last one are dropped or rejected.
    """

    effort: Effort = "medium"
    parallel_calls: ParallelCalls = "interleave"
    special_strings: SpecialStrings = "reject"
    thoughts: Thoughts = "last_turn"
    trailing: Trailing = "drop"


@dataclass(frozen=True, slots=True)
class Composed:
    """A conversation in Harmony. `facts` holds columns, the source's included; `declared` the recipients that may be
    called, with the schemas of their arguments, or None if they are unknown; `tagless` is true if no body holds `<|`, with
    which every control string begins.
    """

    messages: Sequence[HarmonyMessage]
    facts: dict[str, Any]
    declared: Schemas | None = None
    tagless: bool = False
