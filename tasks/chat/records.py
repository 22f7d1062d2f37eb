"""Messages and tool calls as templates see them: plain dicts that know which message they are or belong to.

An assistant that calls tools and says nothing has an empty content here, and not None: templates that print contents
would print `None`, and be trained on it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .conversation import Message
from .traced import Traced


class ToolCallRecord(dict[str, Any]):
    """A tool call; `message` is the number of the message that makes it."""

    __slots__ = ("message",)
    message: int


class MessageRecord(dict[str, Any]):
    """A message; `number` is its place in the conversation."""

    __slots__ = ("number",)
    number: int


def records(messages: Sequence[Message]) -> list[MessageRecord]:
    """The messages for a template: numbered, and what the assistant and its tools say with its origin."""
    return [_record(number, message) for number, message in enumerate(messages)]


def _record(number: int, message: Message) -> MessageRecord:
    content, reasoning = message["content"] or "", message.get("reasoning_content")
    record = MessageRecord(message if reasoning is None else {"thinking": "", **message})
    record.number = number
    record.pop("trained", None)
    if message["role"] == "tool":  # some templates write it into the turn of the assistant
        record["content"] = Traced(content, ((0, len(content), (number, "result")),))
    if message["role"] != "assistant":
        return record
    record["content"] = Traced(content, ((0, len(content), (number, "content")),))
    if reasoning is not None:
        traced = Traced(reasoning, ((0, len(reasoning), (number, "reasoning")),))
        record["thinking"] = record["reasoning_content"] = traced  # newer templates of OpenAI's read `thinking`
    if "tool_calls" in message:
        record["tool_calls"] = [_call(number, call) for call in message["tool_calls"]]
    return record


def _call(number: int, call: Mapping[str, Any]) -> ToolCallRecord:
    record = ToolCallRecord(call)
    record.message = number
    return record
