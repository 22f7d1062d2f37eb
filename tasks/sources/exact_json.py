"""JSON whose numbers keep their spelling, from the bytes of a row to the text that is made of it.

orjson reads integers beyond 64 bits as floats, and no parser of Python remembers how a float was written: `1.50`
becomes `1.5`, `1e3` becomes `1000.0`. A model that is trained on a tool call must see what the source says, so such
numbers are read as `SpelledFloat`s and as Python's integers. An object that says a key twice is read as `RepeatedKeys`,
because nobody can tell which of the two values is meant.

Almost no row has any of these. orjson parses every row, and a walk over its values tells whether it has lost something:
a float is among them, or the row has more strings than they have. Only then is the row parsed again, by `json`. The walk
costs 0.3 µs per kilobyte of text and 30 ns per value, about as much as parsing short rows does.
"""

import json
import math
import re
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import orjson

SIGNED_64, UNSIGNED_64 = 1 << 63, 1 << 64

NEGATIVE_ZERO = re.compile(rb"-0(?![\d.eE])")
"""Python has no integer of this spelling."""

BEYOND_DOUBLE = "number is infinity"
"""How orjson's message about a number beyond a double begins."""

TOO_DEEP = "Recursion limit"
"""How orjson's message about more than 254 levels begins."""

MARKS = 10**10
"""Integers that stand for numbers have ten digits that nothing else has, and seven that count."""


class NumberRangeError(ValueError):
    """A number that JSON allows and that is not accepted: a float beyond a double, an integer of too many digits, or one
    that has to be read exactly in a row of too many levels.
    """


class SpelledFloat(float):
    """A float that the source spells in another way than Python does; `text` is the source's spelling."""

    __slots__ = ("text",)
    text: str

    def __repr__(self) -> str:
        """The source's spelling, which templates print as well."""
        return self.text

    __str__ = __repr__


class RepeatedKeys(dict[str, Any]):
    """An object in which `key` stands more than once; it holds the last value."""

    __slots__ = ("key",)
    key: str


def loads(data: bytes | str) -> Any:  # noqa: ANN401 - JSON may be anything
    """The value of JSON text, which orjson decides about, with exact numbers.

    Raises orjson.JSONDecodeError for what is not JSON, NumberRangeError for numbers that are not accepted.
    """
    value = rounded(data)
    raw = data if isinstance(data, bytes) else data.encode()
    if _is_exact(value, raw):
        return value
    if _is_too_deep(value):
        raise NumberRangeError(
            "numbers are not read exactly in rows of more than 254 levels; nest less, or write them as strings"
        )
    return _parsed(raw)


def rounded(data: bytes | str) -> Any:  # noqa: ANN401 - same
    """The value of JSON text as orjson reads it, which is enough for who wants its texts alone. Raises as `loads`."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if not error.msg.startswith(BEYOND_DOUBLE):
            raise
        return _long_integers(data if isinstance(data, bytes) else data.encode())


def compact(value: object) -> bytes:
    """`value` as JSON without blanks. Raises TypeError for what JSON cannot say, and for more than 254 levels."""
    plain, restored = apart(value)
    return orjson.dumps(plain) if plain is value else restored(orjson.dumps(plain).decode()).encode()


def apart(value: Any) -> tuple[Any, Callable[[str], str]]:  # noqa: ANN401 - JSON may be anything
    """`value` with plain integers in place of the numbers that writers of JSON would change, and what puts these back
    into the text that a writer has made of it; the same object where there are none.

    Raises TypeError for more than 254 levels.
    """
    try:
        orjson.dumps(value)
    except TypeError as error:
        if TOO_DEEP in str(error):
            raise
        numbers: list[str] = []
        said = repr(value)
        begin = next(number for number in count(MARKS) if str(number) not in said)
        plain = _marked(value, numbers, begin)
        if numbers:
            mark = re.compile(rf"(?<!\w){begin}(\d{{7}})(?!\w)")
            return plain, lambda text: mark.sub(lambda found: numbers[int(found[1])], text)
    return value, str


def repeated_key(value: object) -> str | None:
    """A key that stands more than once in an object in `value`, or None."""
    waiting = [value]
    for each in waiting:
        if isinstance(each, RepeatedKeys):
            return each.key
        if isinstance(each, dict):
            waiting += cast("dict[str, object]", each).values()
        elif isinstance(each, list):
            waiting += cast("list[object]", each)
    return None


def _is_exact(value: object, raw: bytes) -> bool:
    """Whether orjson has lost nothing: no float, and as many strings as the text has."""
    strings, waiting = 0, [value]
    for each in waiting:
        kind = type(each)
        if kind is str:
            strings += 1
        elif kind is dict:
            strings += len(cast("dict[str, object]", each))
            waiting += cast("dict[str, object]", each).values()
        elif kind is list:
            waiting += cast("list[object]", each)
        elif kind is float:
            return False
    unescaped = raw.replace(b"\\\\", b"")
    if unescaped.count(b'"') - unescaped.count(b'\\"') != 2 * strings:
        return False
    return b"-0" not in raw or NEGATIVE_ZERO.search(raw) is None


def _is_too_deep(value: object) -> bool:
    """Whether a value has more levels than orjson writes. `json` reads some 900, depending on its caller's own."""
    try:
        orjson.dumps(value)
    except TypeError as error:
        return TOO_DEEP in str(error)
    return False


def _long_integers(raw: bytes) -> Any:  # noqa: ANN401 - same
    """What orjson refuses for a number beyond a double, where that is an integer."""
    value = _parsed(raw)
    try:
        compact(value)  # orjson has not read to the end, and is stricter than json
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
    """A copy of `value` with a mark for each number that is added to `numbers`."""
    if isinstance(value, dict):
        return {key: _marked(each, numbers, begin) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_marked(each, numbers, begin) for each in cast("list[Any]", value)]
    if isinstance(value, SpelledFloat) or (type(value) is int and not -SIGNED_64 <= value < UNSIGNED_64):
        numbers.append(str(value))
        return int(f"{begin}{len(numbers) - 1:07}")
    return value
