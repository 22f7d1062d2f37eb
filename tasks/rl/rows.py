"""Rows of an RL preparation: records, functions over them, targets, and the checks that targets share.

A transform never modifies its input record. If nothing changes it returns the same object, and such a row is written as the
bytes that were read.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from tokenmill.tasks.chat.conversation import Role
from tokenmill.tasks.chat.json_values import kind, listed, quoted
from tokenmill.tasks.sources.files import Rejected

Record = dict[str, Any]
Transform = Callable[[Record], Record | Rejected]
Check = Callable[[Record], Rejected | None]
"""Why a record cannot be used, or None."""

PARAMS = "responses_create_params"
PLACEHOLDER, QUESTION_PLACEHOLDER = "_hf_placeholder", "_hf_question_placeholder"
"""The fields in which the rows for Nemotron 3 Nano and Super, and for Ultra and Lightning, refer to a question elsewhere."""
ROLES = get_args(Role)

READ = ("reasoning_content", "content", "tool_calls", "name", "arguments", "output")
"""Keys of a message, a call or a result that hold text."""


def accept(_record: Record) -> None:
    """Accept any row."""


@dataclass(frozen=True, slots=True)
class RowTarget:
    """A program that reads prepared rows.

    `check` returns why a row cannot be used. `texts` lists the texts of a valid row that a model reads, each once; tools, calls
    and non-text parts count as JSON. `unread` names the fields of a valid row that the program ignores. `form` names the form
    of a row if the program accepts several; a file must not mix them, because it is read as one table.
    """

    name: str
    check: Check = accept
    texts: Callable[[Record], list[str]] = lambda _: []
    unread: Callable[[Record], Sequence[str]] = lambda _: ()
    form: Callable[[Record], str] | None = None


def placeholder_of(record: Record) -> str | None:
    """Return the field in which a row refers to a question elsewhere, if any. Parquet writes a null struct as one full of nulls."""
    if PLACEHOLDER in record and not is_null(record[PLACEHOLDER]):
        return PLACEHOLDER
    if QUESTION_PLACEHOLDER in record and not is_null(record[QUESTION_PLACEHOLDER]):
        return QUESTION_PLACEHOLDER
    return None


def is_null(value: object) -> bool:
    """Return whether a value is null or an object of nulls."""
    # Parquet writes a null struct as an object of nulls, at any depth.
    return all(map(is_null, cast("Record", value).values())) if isinstance(value, dict) else value is None


def filled_text(value: object, field: str) -> Rejected | None:
    """Require a text that is not empty."""
    if isinstance(value, str) and not value:
        return Rejected("empty_text", f"{field} is empty; filter out such rows")
    return None if isinstance(value, str) else wrong_type(field, value, "text")


def wrong_type(field: str, value: object, wanted: str) -> Rejected:
    """Return the rejection for a field that is missing or has the wrong type."""
    if value is None:
        return Rejected("missing_field", f"there is no {field}; make it {wanted}, or filter out such rows")
    return Rejected("bad_field", f"{field} is {kind(value)}; make it {wanted}")


def conversation(messages: object, field: str) -> Rejected | None:
    """Require messages with role and content."""
    if not isinstance(messages, list):
        return wrong_type(field, messages, "an array of messages")
    if not messages:
        return Rejected("no_messages", f"{field} is empty; filter out such rows")
    for number, message in enumerate(messages, 1):
        if wrong := _message(message, f"message {number} of {len(messages)} in {field}"):
            return wrong
    return None


def _message(message: object, where: str) -> Rejected | None:
    if not isinstance(message, dict):
        return Rejected("bad_message", f"{where} is {kind(message)}; make it an object with role and content")
    fields: Record = message
    if wrong := known_role(fields, ROLES, where) or _tool_calls(fields.get("tool_calls"), where):
        return wrong
    if isinstance(fields.get("content"), str):
        return None
    if fields.get("content") is not None:
        return Rejected("not_text", f"the content of {where} is {kind(fields['content'])}; make it one text")
    if "content" in fields and fields.get("tool_calls"):
        return None
    remedy = "write text, or null beside tool_calls"
    return Rejected("no_content", f"{where} doesn't have content; its keys are {listed(fields)}; {remedy}")


def known_role(message: Record, known: tuple[str, ...], where: str) -> Rejected | None:
    """Require one of the `known` roles."""
    role = message.get("role")
    if role in known:  # a tuple, because a role of the data may be unhashable
        return None
    return Rejected("unknown_role", f"the role of {where} is {quoted(role)}; known: {', '.join(known)}")


def _tool_calls(calls: object, where: str) -> Rejected | None:
    if not calls or _are_objects(calls):
        return None
    return Rejected("bad_tool_calls", f"tool_calls of {where} is {contents(calls)}; make it an array of objects")


def tools(found: object, field: str) -> Rejected | None:
    """Require tools to be absent, empty, or an array of objects."""
    # "" and {} are how CSV and Parquet write "no tools".
    if found is None or found in ("", {}) or _are_objects(found):
        return None
    return Rejected("bad_tools", f"{field} is {contents(found)}; make it an array of objects")


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def contents(value: object) -> str:
    """Return the type of a value that is not an array of objects, for messages."""
    if not isinstance(value, list):
        return kind(value)
    return f"an array with {next(kind(item) for item in value if not isinstance(item, dict))} in it"


def ranked(completions: object) -> tuple[Record, Record] | Rejected:
    """Two completions with ranks, the preferred one (the lower rank) first."""
    if not isinstance(completions, list):
        return Rejected("bad_field", f"completions is {kind(completions)}; make it an array of two, each with a rank")
    if len(completions) != 2:  # noqa: PLR2004 - a pair
        count = f"completions has {len(completions)}, and preferences are trained on exactly two"
        return Rejected("not_two_completions", f"{count}; make a row of every pair")
    for number, each in enumerate(completions, 1):
        if not isinstance(each, dict):
            return Rejected("bad_field", f"completion {number} of 2 is {kind(each)}; make it {{rank, completion}}")
        if type(each.get("rank")) is not int:  # a boolean is an int, but not a rank
            found = f"the rank of completion {number} is {kind(each.get('rank'))}"
            return Rejected("bad_rank", f"{found}; make it a whole number, 0 for the better")
    first, second = cast("tuple[Record, Record]", completions)
    if first["rank"] == second["rank"]:
        both = f"both completions have rank {first['rank']}"
        return Rejected("tied_ranks", f"{both}; filter out ties, which express no preference")
    return (first, second) if first["rank"] < second["rank"] else (second, first)


def texts_of_messages(messages: list[Record]) -> list[str]:
    """Return the texts of messages, or of items of the Responses API."""
    return [text for message in messages for key in READ if key in message for text in texts_in(message[key])]


def texts_in(value: object) -> list[str]:
    """Return a text, the items of an array, or anything else as JSON; nothing for null."""
    if value is None:
        return []
    return [_text_of(item) for item in value] if isinstance(value, list) else [_text_of(value)]


def _text_of(value: object) -> str:
    text = cast("Record", value).get("text") if isinstance(value, dict) else value
    return text if isinstance(text, str) else json.dumps(value, ensure_ascii=False, default=str)
