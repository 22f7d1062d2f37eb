"""JSON values and JSON text in chat rows.

orjson defines valid JSON, as it does for reading rows: no NaN, no lone surrogate, at most 254 levels (the limit of `json`
depends on the caller's stack, so a row could fail in only some workers). Integers are exact, and duplicate keys are rejected. This takes 4 ns per byte, and applies only to tool calls, results and definitions.
"""

import json
from collections.abc import Iterable
from typing import Any

from tokenmill.tasks.sources.exact_json import NumberRangeError, RepeatedKeys, compact, loads, repeated_key

from .conversation import Reason, RejectionError

KINDS: dict[type[object], str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
    RepeatedKeys: "an object",
}

SHOWN_KEYS, SHOWN_CHARACTERS = 12, 40  # limits of quotes from a row in a detail


def kind(value: object) -> str:
    """Return the JSON type of a value."""
    return KINDS.get(type(value), f"a {type(value).__name__}")


def quoted(value: object) -> str:
    """Return the beginning of a string in quotes, or the type of a different value."""
    return repr(value[:SHOWN_CHARACTERS]) if isinstance(value, str) else kind(value)


def listed(keys: Iterable[str]) -> str:
    """Return the first keys, for a sentence."""
    known = list(keys)
    more = ["…"] if len(known) > SHOWN_KEYS else []
    return ", ".join([*map(quoted, known[:SHOWN_KEYS]), *more]) or "none"


def require_utf8(text: str, what: str) -> None:
    """Raises RejectionError unless `text` can be encoded as UTF-8. ASCII text takes 20 ns, at any length."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _half_pair(f"{what}, character {error.start}") from error


def json_text(value: object, reason: Reason, what: str) -> str:
    """`value` as JSON in `json`'s spacing, without escapes that UTF-8 does not need.

    Raises RejectionError for values that are not JSON (NaN, lone surrogates, dates, bytes, more than 254 levels)
    and for duplicate keys.
    """
    require_single_keys(value, reason, what)
    try:
        compact(value)  # stricter than json
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _rejection(error, reason, what) from error


def parsed(text: str, reason: Reason, what: str) -> Any:  # noqa: ANN401 - JSON may be anything
    """Return the value of JSON text. Raises RejectionError if `text` is not JSON or has a duplicate key."""
    try:
        value = loads(text)
        compact(value)
    except (TypeError, ValueError) as error:
        raise _rejection(error, reason, what) from error
    require_single_keys(value, reason, what)
    return value


def require_single_keys(value: object, reason: Reason, what: str) -> None:
    """Raises RejectionError for an object in `value` with a duplicate key, because one of its values would be lost."""
    key = repeated_key(value)
    if key is not None:
        raise RejectionError(reason, f"{what}: the key {quoted(key)} occurs twice in one object; keep one")


def _rejection(error: Exception, reason: Reason, what: str) -> RejectionError:
    # orjson has one type of error for all values that it doesn't write.
    if "surrogate" in str(error):
        return _half_pair(f"{what}: {error}")
    if isinstance(error, NumberRangeError):
        return RejectionError(reason, f"{what}: {error}")
    return RejectionError(reason, f"{what}: not JSON ({error})")


def _half_pair(where: str) -> RejectionError:
    remedy = "half a surrogate pair is not a character; write the whole pair, or U+FFFD instead"
    return RejectionError("lone_surrogate", f"{where}; {remedy}")
