"""A conversation as chat templates see it.

This is OpenAI's form, made strict: keys without a value are absent, reasoning is separate from the answer, and arguments of
tool calls are objects. Messages are plain dicts, because templates need dicts and test keys with `is defined`. Templates expect
arguments as an object or as JSON text. Both are kept, so a template that prints the text prints the source's text.

Thinking between `<think>` and `</think>` is a part of the content unless the template reads reasoning apart. A template that
doesn't write `reasoning_content` gets contents byte for byte, as transformers passes them. For a template that writes it,
thinking that begins a content becomes reasoning, because then its mask is known; `probes` finds out which. Elsewhere in a
content the tags are text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal, NotRequired, ParamSpec, TypedDict, TypeVar

from tokenmill.tasks.sources.files import Rejected as Rejected  # noqa: PLC0414 - exported again

Given = ParamSpec("Given")
Found = TypeVar("Found")

Role = Literal["system", "developer", "user", "assistant", "tool"]

Range = tuple[int, int]  # characters of a text: first and end

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
    restricts training to these characters of an assistant's content (see `messages.trained_characters`), and `cut` marks that a
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
    """Return the ranges without the characters `[start, stop)`."""
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


def rejecting(read: Callable[Given, Found]) -> Callable[Given, Found | Rejected]:
    """Wrap a reader of rows: a RejectionError that it raises becomes the Rejected of its row."""

    @wraps(read)
    def reader(*given: Given.args, **named: Given.kwargs) -> Found | Rejected:
        try:
            return read(*given, **named)
        except RejectionError as error:
            return Rejected(error.reason, error.detail)

    return reader


def required(found: Found | Rejected) -> Found:
    """Return the value read from a row. Raise RejectionError, which `rejecting` catches, if the row is rejected."""
    if isinstance(found, Rejected):
        raise RejectionError(found.reason, found.detail)
    return found


PLACEHOLDER = re.compile(r"[\s_.…\-\u2010-\u2015]*")
"""A placeholder for a first question that has to be fetched from elsewhere."""


def asks_nothing(question: str, *, first: bool) -> bool:
    """Return whether a user's text is blank or, as the first one, a placeholder."""
    return not question or question.isspace() or (first and PLACEHOLDER.fullmatch(question) is not None)


OPEN, CLOSE = "<think>", "</think>"

Inline = Literal["content", "dropped", "opened", "closed", "split"]
"""How to read thinking that begins a content.

`content`: as content; `opened`: it is read apart after `<think>`; `closed`: also without that tag; `split`: as `closed`, and the
template does the same, but looks for the innermost tags; `dropped`: as `split`, and the template omits it.
"""


def apart(conversation: Conversation, inline: Inline) -> Conversation | Rejected:
    """Return the conversation with inline thinking as reasoning, where the template reads it so; Rejected if that is ambiguous."""
    messages = conversation.messages
    if not any(has_tag(message) for message in messages):
        return conversation
    found: list[Message] = []
    for number, message in enumerate(messages, 1):
        try:
            found.append(_apart(message, inline) if has_tag(message) else message)
        except RejectionError as error:
            return Rejected(error.reason, f"message {number} of {len(messages)} ('assistant'): {error.detail}")
    return replace(conversation, messages=found)


def has_tag(message: Message) -> bool:
    """Return whether an answer contains a tag. Most contents have no `<`, which takes a fifth of the time to find."""
    content = message["content"]
    return (
        message["role"] == "assistant"
        and content is not None
        and "<" in content
        and (OPEN in content or CLOSE in content)
    )


def _apart(message: Message, inline: Inline) -> Message:
    content = message["content"] or ""
    if inline == "content":
        # If a budget ended the thinking, its first `</think>` isn't the model's, and isn't trained on.
        if not message.get("cut") or CLOSE not in content:
            return message
        start, ranges = content.index(CLOSE), message.get("trained", ((0, len(content)),))
        return {**message, "trained": tuple(without(ranges, start, start + len(CLOSE)))}
    # The rest is for templates that write `reasoning_content`.
    thoughts, answer = _split(content, inline)
    if answer == content:
        return message
    if thoughts and "reasoning_content" in message:
        raise RejectionError("reasoning_twice", "it has reasoning under a key and inline in its content; keep one")
    if message.get("trained"):
        wrong = "it selects characters to train on, and its content includes thinking; move that to reasoning_content"
        raise RejectionError("bad_loss_flag", wrong)
    made: Message = {**message, "content": answer}
    return {**made, "reasoning_content": thoughts} if thoughts else made


def _split(content: str, inline: Inline) -> tuple[str | None, str]:
    """Inline thinking, None if absent or blank, and the answer after it. A closing tag without an opening one, within a line, is text.

    Raises RejectionError for unterminated thinking, and for tags that occur again.
    """
    # Of `<think>…</think>`, older templates write the opening tag in the prompt, so the content may lack it.
    opened = content.lstrip().startswith(OPEN)
    thoughts, ended, answer = content.partition(CLOSE)
    if opened and not ended:
        raise RejectionError("unclosed_think", f"its content opens {OPEN} and never closes it; was it cut short?")
    # A template that searches for the last `</think>` would cut "the tag </think> ends…" in half.
    in_sentence = inline in {"split", "dropped"} and answer[:1] not in {"", "\n"}
    if not ended or not (opened or (inline != "opened" and OPEN not in thoughts and not in_sentence)):
        return None, content
    answer = answer if inline == "dropped" else answer.lstrip("\n")
    # A second thought in the answer would be trained on as an answer, or cut by the template.
    before, again, _ = answer.partition(CLOSE)
    if answer.lstrip().startswith(OPEN) or (again and (inline in {"split", "dropped"} or OPEN not in before)):
        raise RejectionError("reasoning_twice", f"thinking follows its first {CLOSE} again")
    thoughts = (thoughts.lstrip().removeprefix(OPEN) if opened else thoughts).strip("\n")
    if inline == "split" and OPEN in thoughts:
        raise RejectionError("reasoning_twice", f"its thinking has {OPEN} again, where the chat template would cut it")
    return thoughts if thoughts.strip() else None, answer
