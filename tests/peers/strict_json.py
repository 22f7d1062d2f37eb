"""What a row of JSON holds, by the standard library's parser made as strict as RFC 8259 and UTF-8 are."""

import json
import math


class OutOfRangeError(ValueError):
    """A number that JSON allows and that Python does not hold."""


REASONS = {
    UnicodeDecodeError: "invalid_utf8",
    UnicodeEncodeError: "lone_surrogate",
    OutOfRangeError: "number_out_of_range",
}


def judged(row, path=("text",)):
    """The text at `path` as `("text", it)`, or the reason why there is none, or `blank`."""
    content = row.removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        return "blank"
    try:
        value = parsed(content)
    except ValueError as error:
        return REASONS.get(type(error), "malformed_json")
    return descended(value, path)


def parsed(row):
    """The value of a row. Raises ValueError where it is no JSON, no UTF-8, or holds half a surrogate pair."""
    value = json.loads(row.decode(), parse_constant=refuse, parse_float=finite, parse_int=whole)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def refuse(_):
    raise ValueError


def finite(digits):
    """A number of JSON as a double. Raises OutOfRangeError beyond its range."""
    if math.isinf(float(digits)):
        raise OutOfRangeError(digits)
    return float(digits)


def whole(digits):
    """An integer of JSON. Raises OutOfRangeError where it has more digits than Python reads."""
    try:
        return int(digits)
    except ValueError as error:
        raise OutOfRangeError(digits) from error


def descended(value, path):
    for depth, key in enumerate(path):
        if value is None and depth:
            return "null_text"
        if not isinstance(value, dict):
            return "not_an_object"
        if key not in value:
            return "missing_field"
        value = value[key]
    return ("text", value) if isinstance(value, str) else "null_text" if value is None else "not_a_string"
