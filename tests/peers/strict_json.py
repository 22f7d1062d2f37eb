"""What a row of JSON holds, by the standard library's parser made as strict as RFC 8259 and UTF-8 are."""

import json
import math

REASONS = {UnicodeDecodeError: "invalid_utf8", UnicodeEncodeError: "lone_surrogate"}


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
    """A number of JSON as a double. Raises ValueError beyond its range."""
    return refuse(digits) if math.isinf(float(digits)) else float(digits)


def whole(digits):
    """An integer of JSON: exact within 64 bits, beyond them the nearest double. Raises ValueError beyond its range."""
    double = finite(digits)
    return int(digits) if -(2**63) <= int(digits) < 2**64 else double


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
