"""JSON that preserves the spelling of numbers, from the bytes of a row to the text written from it.

orjson reads integers beyond 64 bits as floats, and Python's parsers do not keep the spelling of a float: `1.50` becomes `1.5`,
`1e3` becomes `1000.0`. A model trained on a tool call must see the source's spelling, so such numbers are read as
`SpelledFloat` and as Python integers. An object with a repeated key is read as `RepeatedKeys`, because the intended value is
ambiguous.

Such rows are rare. orjson parses every row, and a scan of the text (`kernel.c`) detects a possible loss. Only then does `json`
parse the row again. The scan costs 0.2 ms per megabyte of long texts.
"""

import ctypes
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import count
from operator import or_
from typing import Any, cast

import orjson
from tokenmill.tasks.compiled import load

SIGNED_64, UNSIGNED_64 = 1 << 63, 1 << 64

BEYOND_DOUBLE = "number is infinity"
"""The beginning of orjson's message about a number beyond a double."""

TOO_DEEP = "Recursion limit"
"""The beginning of orjson's message about more than 254 levels."""

MAX_SCANNED_BYTES = 4 << 20
"""Bytes of rows that are scanned together, which takes a copy of them."""

INEXACT, DEEP, BROKEN = 1, 2, 4
"""What `kernel.c` doubts."""

_KERNEL = load(__file__)
_KERNEL.doubts.argtypes = [ctypes.c_char_p, ctypes.c_int64]
_KERNEL.doubts.restype = ctypes.c_int64

MARKS = 10**10
"""Placeholders of numbers are integers of ten unique digits and a seven-digit index."""


class NumberRangeError(ValueError):
    """Valid JSON with a number that is not accepted: a float beyond a double, an integer of too many digits, or a number that
    must be read exactly in a row that is nested too deeply.
    """


class SpelledFloat(float):
    """A float that Python would spell differently; `text` is the source's spelling."""

    __slots__ = ("text",)
    text: str

    def __repr__(self) -> str:
        """The source's spelling, which templates print too."""
        return self.text

    __str__ = __repr__


class RepeatedKeys(dict[str, Any]):
    """An object with a repeated `key`; it holds the last value."""

    __slots__ = ("key",)
    key: str


def loads(data: bytes | str) -> Any:  # noqa: ANN401 - any JSON
    """The value of JSON text, with exact numbers.

    Raises orjson.JSONDecodeError if orjson does not accept the text, NumberRangeError for numbers that are not accepted.
    """
    return _exact(rounded(data), data if isinstance(data, bytes) else data.encode())


def _exact(value: Any, raw: bytes) -> Any:  # noqa: ANN401 - same
    """The value of JSON text that orjson read as `value`."""
    if not _doubts([raw]) & INEXACT:  # nearly every row: the scan is cheaper than a second parser
        return value
    if _is_too_deep(value):
        raise NumberRangeError(
            "numbers are not read exactly in rows with more than 254 levels; nest less, or write them as strings"
        )
    return _parsed(raw)


def loads_all(rows: Sequence[bytes]) -> list[Any]:
    """The values of several rows, as `loads` gives them; scanned together, which is faster."""
    values = [rounded(row) for row in rows]
    if not _doubts(rows) & INEXACT:
        return values
    return [_exact(value, row) for value, row in zip(values, rows, strict=True)]


def are_lines(rows: Sequence[bytes]) -> bool:
    """Whether no row, which orjson accepts, has a line break. Raises NumberRangeError if `loads` does for one of them."""
    doubts = _doubts(rows)
    if doubts & DEEP:
        for row in rows:
            loads(row)
    return not doubts & BROKEN


def _doubts(rows: Sequence[bytes]) -> int:
    """What Python may lose of valid rows: INEXACT if a number may be spelled otherwise, or a key may be repeated; DEEP for more
    levels than orjson writes. And BROKEN if a row may have a line break.
    """
    texts = [b" ".join(rows)] if sum(map(len, rows)) <= MAX_SCANNED_BYTES else rows
    return reduce(or_, [_KERNEL.doubts(text, len(text)) for text in texts], 0)


def rounded(data: bytes | str) -> Any:  # noqa: ANN401 - same
    """The value of JSON text with rounded numbers, for readers that need only texts. Raises as `loads` does."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if not error.msg.startswith(BEYOND_DOUBLE):
            raise
        return _long_integers(data if isinstance(data, bytes) else data.encode())


def compact(value: object) -> bytes:
    """`value` as JSON without blanks. Raises TypeError for values that JSON lacks, and for more than 254 levels."""
    plain, restored = with_placeholders(value)
    return orjson.dumps(plain) if plain is value else restored(orjson.dumps(plain).decode()).encode()


def with_placeholders(value: Any) -> tuple[Any, Callable[[str], str]]:  # noqa: ANN401 - any JSON
    """`value` with integers as placeholders for the numbers that JSON writers would change, and a function that restores the
    numbers in the written text. The same object without such numbers.

    Raises TypeError for more than 254 levels.
    """
    try:
        orjson.dumps(value)
    except TypeError as error:
        if TOO_DEEP in str(error):
            raise
        numbers: list[str] = []
        spelling = repr(value)
        begin = next(number for number in count(MARKS) if str(number) not in spelling)
        plain = _marked(value, numbers, begin)
        if numbers:
            mark = re.compile(rf"(?<!\w){begin}(\d{{7}})(?!\w)")
            return plain, lambda text: mark.sub(lambda found: numbers[int(found[1])], text)
    return value, str


def repeated_key(value: object) -> str | None:
    """A repeated key of an object in `value`, or None."""
    waiting = [value]
    for each in waiting:
        if isinstance(each, RepeatedKeys):
            return each.key
        if isinstance(each, dict):
            waiting += cast("dict[str, object]", each).values()
        elif isinstance(each, list):
            waiting += cast("list[object]", each)
    return None


def _is_too_deep(value: object) -> bool:
    """Whether a value has more levels than orjson writes. `json` reads some 900."""
    try:
        orjson.dumps(value)
    except TypeError as error:
        return TOO_DEEP in str(error)
    return False


def _long_integers(raw: bytes) -> Any:  # noqa: ANN401 - same
    """The value of text that orjson rejected for a number beyond a double, if that is an integer."""
    value = _parsed(raw)
    try:
        compact(value)  # orjson stopped early, and is stricter than json
    except TypeError as error:
        raise orjson.JSONDecodeError(str(error), raw.decode(), 0) from error
    return value


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
    return value if repr(value) == text else _spelled(value, text)


def _integer(text: str) -> float:
    try:
        return int(text) if text != "-0" else _spelled(-0.0, text)
    except ValueError as error:
        raise NumberRangeError(
            f"an integer of {len(text):,} digits is valid JSON, but too long ({error}); write it as a string"
        ) from error


def _spelled(value: float, text: str) -> SpelledFloat:
    number = SpelledFloat(value)
    number.text = text
    return number


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


def _marked(value: Any, numbers: list[str], begin: int) -> Any:  # noqa: ANN401 - same
    """A copy of `value` with placeholders for the numbers, which are appended to `numbers`."""
    if isinstance(value, dict):
        return {key: _marked(each, numbers, begin) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_marked(each, numbers, begin) for each in cast("list[Any]", value)]
    if isinstance(value, SpelledFloat) or (type(value) is int and not -SIGNED_64 <= value < UNSIGNED_64):
        numbers.append(str(value))
        return int(f"{begin}{len(numbers) - 1:07}")
    return value
