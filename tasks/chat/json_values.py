"""JSON as chat rows carry it: values that a template may print as JSON, and JSON text inside a string.

What is JSON is decided by orjson, here as where rows are read: no NaN, no half of a surrogate pair, at most 254 levels
(a limit of its own, where that of `json` depends on how deep the caller stands, so that one row could fail in one
worker and pass in another). Numbers keep the spelling of the source, and an object that says a key twice is rejected.
All together takes some 4 ns per byte, and only tool calls, tool results and tool definitions pay.
"""

import json
from collections.abc import Iterable
from typing import Any

import orjson
from tokenmill.tasks.sources.exact_json import (
    NumberRangeError,
    RepeatedKeys,
    SpelledFloat,
    compact,
    loads,
    repeated_key,
    with_placeholders,
)

from .conversation import Reason, RejectionError

KINDS: dict[type[object], str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
    SpelledFloat: "a number",
    RepeatedKeys: "an object",
}

SHOWN_KEYS, SHOWN_CHARACTERS = 12, 40
"""How much of a row a detail repeats."""


def kind(value: object) -> str:
    """What a value is, in the words of JSON."""
    return KINDS.get(type(value), f"a {type(value).__name__}")


def quoted(value: object) -> str:
    """A string's beginning in quotes, anything else by its kind."""
    return repr(value[:SHOWN_CHARACTERS]) if isinstance(value, str) else kind(value)


def listed(keys: Iterable[str]) -> str:
    """Keys for a sentence: the first of them."""
    known = list(keys)
    more = ["…"] if len(known) > SHOWN_KEYS else []
    return ", ".join([*map(quoted, known[:SHOWN_KEYS]), *more]) or "none"


def require_utf8(text: str, what: str) -> None:
    """Raises RejectionError unless UTF-8 can write `text`. Text that is ASCII knows it: 20 ns, however long it is."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _half_pair(f"{what}, character {error.start}") from error


def json_text(value: object, reason: Reason, what: str) -> str:
    """`value` as JSON, with `json`'s blanks and without escapes that UTF-8 does not need.

    Raises RejectionError for what JSON cannot say (NaN, half a surrogate pair, dates and bytes, more than 254 levels) and
    for a key that stands twice.
    """
    require_single_keys(value, reason, what)
    try:
        plain, restored = with_placeholders(value)
        orjson.dumps(plain)
        return restored(json.dumps(plain, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise _rejection(error, reason, what) from error


def parsed(text: str, reason: Reason, what: str) -> Any:  # noqa: ANN401 - JSON may be anything
    """The value of JSON text. Raises RejectionError where `text` is not JSON, or has a key twice in one object."""
    try:
        value = loads(text)
        compact(value)
    except (TypeError, ValueError) as error:
        raise _rejection(error, reason, what) from error
    require_single_keys(value, reason, what)
    return value


def require_single_keys(value: object, reason: Reason, what: str) -> None:
    """Raises RejectionError where an object in `value` has a key twice, of which only one value could be kept."""
    key = repeated_key(value)
    if key is not None:
        raise RejectionError(reason, f"{what}: the key {quoted(key)} stands twice in one object; keep one")


def _rejection(error: Exception, reason: Reason, what: str) -> RejectionError:
    if "surrogate" in str(error):
        return _half_pair(f"{what}: {error}")
    if isinstance(error, NumberRangeError):
        return RejectionError(reason, f"{what}: {error}")
    return RejectionError(reason, f"{what}: not JSON ({error})")


def _half_pair(where: str) -> RejectionError:
    remedy = "half a surrogate pair is no character; write the whole one, or U+FFFD in its place"
    return RejectionError("lone_surrogate", f"{where}; {remedy}")
