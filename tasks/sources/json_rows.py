"""Rows of JSON one by one: what each one holds, that it is blank, or exactly why it cannot be read.

Blocks of rows are parsed as if every row were good (`text_field`, `records`); what stands here is for blocks in which
something is not as hoped. So the words for what is wrong cost nothing while nothing is wrong, and one bad row costs a
few milliseconds.

JSON is what orjson calls JSON (RFC 8259): `NaN`, `Infinity`, half a surrogate pair and bytes that are not UTF-8 are
refused, anywhere in the row. So are numbers that JSON allows and Python cannot hold: floats beyond a double, such as
`1e400`, and integers of more than 4,300 digits. Of duplicate keys the last one counts, except in messages, in calls of
tools and in their definitions, which are rejected.

The reasons that every reader knows: malformed_json, number_out_of_range, invalid_utf8, lone_surrogate, not_an_object,
and row_too_long, which those who split the file give.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import orjson

from .exact_json import NumberRangeError
from .files import BadRow

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

EXCERPT_CHARACTERS = 200
HEAD_BYTES = 4 * EXCERPT_CHARACTERS
"""How much of a row an excerpt can need: a character of UTF-8 has four bytes at most."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that gives nothing: a reason, the details, and its first HEAD_BYTES bytes."""

    reason: str
    detail: str
    head: bytes


Row = bytes | Refused
"""The bytes of one row, or what is known of one that could not be handed over whole."""

Found = TypeVar("Found")


def each_row(
    rows: Sequence[Row], read: Callable[[Row], Found | Refused | None], first: int
) -> tuple[list[Found], np.ndarray, list[BadRow]]:
    """What `read` finds in each of `rows`, the numbers of those rows (int64, from `first`), and the bad rows.

    `read` refuses a bad row and gives None for a blank one.
    """
    results: list[Found] = []
    numbers: list[int] = []
    bad: list[BadRow] = []
    for number, row in enumerate(rows, first):
        found = read(row)
        if isinstance(found, Refused):
            bad.append(BadRow(number, found.reason, found.detail, excerpt(found.head)))
        elif found is not None:
            results.append(found)
            numbers.append(number)
    return results, np.array(numbers, np.int64), bad


def from_row(
    row: Row, parse: Callable[[bytes], object], take: Callable[[object], Found | tuple[str, str]]
) -> Found | Refused | None:
    """What `take` takes from the value of one row; why there is nothing; or None for a blank row.

    `take` gives reason and detail where it finds nothing. A byte order mark before the row is skipped: files begin
    with one, and files that were concatenated hold more.
    """
    if isinstance(row, Refused):
        return row
    line = row.removeprefix(BYTE_ORDER_MARK)
    if not line or line.isspace():
        return None
    try:
        found = take(parse(line))
    except NumberRangeError as error:
        found = "number_out_of_range", str(error)
    except orjson.JSONDecodeError as error:
        found = _fault(line, error)
    return Refused(*found, head=row[:HEAD_BYTES]) if isinstance(found, tuple) else found


def _fault(line: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Reason and detail of a line that orjson refused."""
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return "invalid_utf8", str(wrong)
    return ("lone_surrogate" if "surrogate" in error.msg else "malformed_json"), str(error)


def kind_of(value: object) -> str:
    """What JSON calls a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return "a string" if isinstance(value, str) else "a number"


def excerpt(head: bytes) -> str:
    """The first 200 characters of a row, with undecodable bytes and control characters written as escapes."""
    text = head[:HEAD_BYTES].decode(errors="backslashreplace")[:EXCERPT_CHARACTERS]
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
