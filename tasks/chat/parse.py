"""Parse a record into a conversation, or into a reason for rejecting it.

Sources have three formats: OpenAI's list of messages, ShareGPT's list of turns, and a question with its answer. All become one
strict form. A record that is ambiguous, or readable only in part, is rejected with a reason and the first fault; nothing is
repaired, and bad data never raises an exception.

A null counts as an absent key, because in Parquet every row has all keys of a struct. Records are not modified; tools and
arguments share their values with the record.

Cost: 0.7 µs per plain message and 1 µs per record, 1.5 to 2 µs per message with reasoning or nulls, 5 µs per tool call,
14 µs per KB of tool definitions.
"""

from collections.abc import Mapping
from typing import Any

from .conversation import Conversation, Message, Reason, Rejected, RejectionError
from .json_values import kind, listed, parsed, quoted
from .messages import read_message, read_template_kwargs, read_tools

LISTS = ("messages", "conversations")
PAIRS = (("input", "output"), ("prompt", "response"))

KWARGS = "chat_template_kwargs"
"""The field of a row's own variables for the template, as TRL and Megatron-Bridge call it."""


def fields_read(messages_field: str | None, tools_field: str) -> list[str]:
    """The fields of a record that `conversation` reads, dotted if nested."""
    if messages_field is not None:
        return [messages_field, "system", tools_field, KWARGS]
    return [*LISTS, *(name for pair in PAIRS for name in pair), "instruction", "system", tools_field, KWARGS]


def conversation(record: Mapping[str, Any], messages_field: str | None, tools_field: str) -> Conversation | Rejected:
    """The conversation in `record`, or the reason for rejecting it.

    `messages_field` names the field of the messages; None takes the first of `messages`, `conversations`, `input` with
    `output` and `prompt` with `response`. Both fields may be dotted paths. Details number messages from 1, including a
    separate system prompt.
    """
    try:
        given = _messages(record, messages_field)
        tools = read_tools(_field(record, tools_field, "bad_tools"))
        variables = read_template_kwargs(record.get(KWARGS))
    except RejectionError as error:
        return Rejected(error.reason, error.detail)
    messages: list[Message] = []
    for number, each in enumerate(given, 1):
        try:
            messages.append(read_message(each))
        except RejectionError as error:
            return Rejected(error.reason, f"message {number} of {len(given)}{_speaker(each)}: {error.detail}")
    if not any(message["role"] == "assistant" for message in messages):
        return Rejected(
            "no_assistant", f"none of its {len(messages)} messages is by the assistant, so there is nothing to train on"
        )
    return Conversation(messages, tools, variables=variables)


def _speaker(message: object) -> str:
    names = [message[key] for key in ("role", "from") if message.get(key)] if isinstance(message, dict) else []
    return f" ({quoted(names[0])})" if names and isinstance(names[0], str) else ""


def _messages(record: Mapping[str, Any], field: str | None) -> list[Any]:
    if field is not None:
        return _with_system(record, _list(_field(record, field, "no_messages"), field, record))
    for name in LISTS:
        if record.get(name) is not None:
            return _with_system(record, _list(record[name], name, record))
    for question, answer in PAIRS:
        if record.get(question) is not None and record.get(answer) is not None:
            return _pair(record, question, answer)
    forms = "messages, conversations, input with output or prompt with response"
    raise RejectionError("no_messages", f"there is none of {forms}; {_there(record)}")


def _pair(record: Mapping[str, Any], question: str, answer: str) -> list[Any]:
    """The messages of a question (or the messages so far) and its answer."""
    if record.get("instruction"):
        raise RejectionError(
            "no_messages",
            f"an instruction beside {question} and {answer} is ambiguous; write the record as messages",
        )
    asked = record[question]
    before = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    return [*_system(record), *before, {"role": "assistant", "content": record[answer]}]


def _with_system(record: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """The messages, after the system prompt that ShareGPT keeps beside its turns."""
    first = messages[0]
    is_turn = isinstance(first, dict) and first.get("role") is None and first.get("from") is not None
    return [*_system(record), *messages] if is_turn else messages


def _system(record: Mapping[str, Any]) -> list[Any]:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def _list(value: object, field: str, record: Mapping[str, Any]) -> list[Any]:
    if isinstance(value, str):
        value = parsed(value, "no_messages", f"{field} (a string)")
    if value is None:
        raise RejectionError("no_messages", f"there is no {field}; {_there(record)}")
    if not isinstance(value, list):
        raise RejectionError("no_messages", f"{field} is {kind(value)}; make it an array of messages")
    if not value:
        raise RejectionError("no_messages", f"{field} is empty")
    return value


def _field(record: Mapping[str, Any], path: str, reason: Reason) -> object:
    """The value at `path`, None if it or a parent is absent or null."""
    value: object = record
    for key in path.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise RejectionError(reason, f"the path {path} needs an object at {key}, but finds {kind(value)}")
        value = value.get(key)
    return value


def _there(record: Mapping[str, Any]) -> str:
    return f"the fields with a value: {listed(key for key in record if record[key] is not None)}"
