"""JSON with exact integers and no lost keys, from the bytes of a row to the text written from it.

orjson reads integers beyond 64 bits as floats, and keeps the last of two equal keys. An identifier of 22 digits must not change
in a tool call, and the intended value of a repeated key is ambiguous. So such integers are read as Python integers, and such
objects as `RepeatedKeys`. Floats are Python's doubles, as `json` and transformers read them: `1.50` is 1.5.

Such rows are rare. orjson parses every row, and a scan of the text (`kernel.c`) detects a possible loss. Only then does `json`
parse the row again. The scan costs 0.2 ms per megabyte of long texts.
"""

import ctypes
import json
import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, cast

import orjson
from tokenmill.tasks.runtime import load

BEYOND_DOUBLE = "number is infinity"
"""The beginning of orjson's message about a number beyond a double."""

TOO_LONG = "Integer exceeds"
"""The beginning of orjson's message about an integer beyond 64 bits."""

MAX_SCANNED_BYTES = 4 << 20
"""Bytes of rows that are scanned together, which takes a copy of them."""

INEXACT, DEEP, BROKEN = 1, 2, 4
"""What `kernel.c` doubts."""

_KERNEL = load(__file__)
_KERNEL.doubts.argtypes = [ctypes.c_char_p, ctypes.c_int64]
_KERNEL.doubts.restype = ctypes.c_int64


class NumberRangeError(ValueError):
    """Valid JSON with a number that is not accepted: a float beyond a double, an integer of too many digits, or one beyond 64
    bits in a row that is nested too deeply.
    """


class RepeatedKeys(dict[str, Any]):
    """An object with a repeated `key`; it holds the last value."""

    __slots__ = ("key",)
    key: str


def loads(data: bytes | str) -> Any:  # noqa: ANN401 - any JSON
    """Return the value of JSON text, with exact integers.

    Raises orjson.JSONDecodeError if orjson does not accept the text, NumberRangeError for numbers that are not accepted.
    """
    return _exact(rounded(data), data if isinstance(data, bytes) else data.encode())


def _exact(value: Any, raw: bytes) -> Any:  # noqa: ANN401 - same
    """The value of JSON text that orjson read as `value`."""
    doubts = _doubts([raw])
    if not doubts & INEXACT:  # nearly every row: the scan is cheaper than a second parser
        return value
    if doubts & DEEP:  # `json` reads as many levels as the caller's stack leaves
        raise NumberRangeError(
            "integers beyond 64 bits and repeated keys are not read in rows with more than 254 levels; nest less"
        )
    return _parsed(raw)


def loads_all(rows: Sequence[bytes]) -> list[Any]:
    """Return the values of several rows, as `loads` gives them; scanned together, which is faster."""
    values = [rounded(row) for row in rows]
    if not _doubts(rows) & INEXACT:
        return values
    return [_exact(value, row) for value, row in zip(values, rows, strict=True)]


def are_lines(rows: Sequence[bytes]) -> bool:
    """Return whether no row, which orjson accepts, has a line break. Raises NumberRangeError if `loads` does for one of them."""
    doubts = _doubts(rows)
    if doubts & DEEP:  # some row may be unreadable
        for row in rows:
            loads(row)
    return not doubts & BROKEN


def _doubts(rows: Sequence[bytes]) -> int:
    """What orjson may lose of valid rows: INEXACT if an integer may be beyond 64 bits, or a key may be repeated; DEEP for more
    levels than orjson writes. And BROKEN if a row may have a line break.
    """
    # One call for many short rows, and no copy of long ones.
    texts = [b" ".join(rows)] if sum(map(len, rows)) <= MAX_SCANNED_BYTES else rows
    return reduce(or_, [_KERNEL.doubts(text, len(text)) for text in texts], 0)


def rounded(data: bytes | str) -> Any:  # noqa: ANN401 - same
    """Return the value of JSON text with rounded numbers, for readers that need only texts. Raises as `loads` does."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if not error.msg.startswith(BEYOND_DOUBLE):
            raise
    raw = data if isinstance(data, bytes) else data.encode()
    value = _parsed(raw)  # an integer that is beyond a double, too, is accepted
    try:
        compact(value)  # orjson stopped early, and is stricter than json
    except (TypeError, ValueError) as error:
        raise orjson.JSONDecodeError(str(error), raw.decode(), 0) from error
    return value


def compact(value: object, default: Callable[[Any], Any] | None = None, *, sort_keys: bool = False) -> bytes:
    """`value` as JSON without whitespace; `default` converts values that JSON lacks.

    Raises TypeError for other values and for more than 254 levels, ValueError for NaN and lone surrogates beside an integer beyond 64 bits.
    """
    try:
        return orjson.dumps(value, default, orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError as error:
        if not str(error).startswith(TOO_LONG):
            raise
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=default, sort_keys=sort_keys
    )
    return text.encode()


def repeated_key(value: object) -> str | None:
    """Return a repeated key of an object in `value`, or None."""
    waiting = [value]
    for each in waiting:  # the list grows meanwhile; recursion would end at a thousand levels
        if isinstance(each, RepeatedKeys):
            return each.key
        if isinstance(each, dict):
            waiting += cast("dict[str, object]", each).values()
        elif isinstance(each, list):
            waiting += cast("list[object]", each)
    return None


def _parsed(raw: bytes) -> Any:  # noqa: ANN401 - same
    try:
        return json.loads(
            raw.decode(), parse_float=_float, parse_int=_integer, parse_constant=_refused, object_pairs_hook=_object
        )
    except json.JSONDecodeError as error:
        raise orjson.JSONDecodeError(error.msg, error.doc, error.pos) from error
    except (RecursionError, UnicodeDecodeError) as error:
        raise orjson.JSONDecodeError(str(error), raw.decode(errors="replace"), 0) from error


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise NumberRangeError(
            f"{text[:40]} is valid JSON, but no double holds it (1.8e308 is the most); write it as a string"
        )
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise NumberRangeError(
            f"an integer of {len(text):,} digits is valid JSON, but too long ({error}); write it as a string"
        ) from error


def _refused(text: str) -> None:
    raise orjson.JSONDecodeError(f"{text} is not JSON", text, 0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    repeated = RepeatedKeys(made)
    keys = [key for key, _ in pairs]
    repeated.key = next(key for key in keys if keys.count(key) > 1)
    return repeated
