"""Picking the text out of rows of JSON, and saying exactly why a row has none.

A block of rows is first parsed as if every row were good: one comprehension and one Arrow array. Only when something
in the block is not as hoped is it gone through row by row, where every row ends as a text, a blank or a reason. So
the words for what is wrong cost nothing while nothing is wrong, and one bad row costs a few milliseconds.

JSON is what orjson calls JSON (RFC 8259): `NaN`, `Infinity`, numbers beyond a double, half a surrogate pair and bytes
that are not UTF-8 are refused, anywhere in the row. Of duplicate keys the last one counts.

The reasons: malformed_json, invalid_utf8, lone_surrogate, not_an_object, missing_field, null_text, not_a_string, and
row_too_long, which those who split the file give.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import orjson
import pyarrow as pa

from tasks.errors import nearest
from tasks.sources.files import BadRow, TextBatch

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

EXCERPT_CHARACTERS = 200
HEAD_BYTES = 4 * EXCERPT_CHARACTERS
"""How much of a row an excerpt can need: a character of UTF-8 has four bytes at most."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that gives no text: a reason, the details, and its first HEAD_BYTES bytes."""

    reason: str
    detail: str
    head: bytes


Row = bytes | Refused
"""The bytes of one row, or what is known of one that could not be handed over whole."""


def field_path(text_field: str) -> list[str]:
    """The keys from the row down to the text: `content.text` is the field `text` of the object `content`."""
    return text_field.split(".")


def pick_texts(rows: Sequence[Row], path: Sequence[str], first: int) -> TextBatch:
    """The texts that stand at `path` in `rows`, which are consecutive and numbered from `first`."""
    texts = _all_texts(rows, path)
    if texts is None:
        return _one_by_one(rows, path, first)
    return TextBatch(texts, np.arange(first, first + len(rows), dtype=np.int64))


def _all_texts(rows: Sequence[Row], path: Sequence[str]) -> pa.LargeStringArray | None:
    """The texts of rows that are all good, otherwise None."""
    key, *deeper = path
    try:
        values = [orjson.loads(cast("bytes", row))[key] for row in rows]
        for key in deeper:
            values = [value[key] for value in values]
        texts = pa.array(values, pa.large_string())
    except (ValueError, KeyError, TypeError):  # refused JSON, no such field, not an object or not a string
        return None
    return None if texts.null_count else texts


def _one_by_one(rows: Sequence[Row], path: Sequence[str], first: int) -> TextBatch:
    texts: list[str] = []
    numbers: list[int] = []
    bad: list[BadRow] = []
    for number, row in enumerate(rows, first):
        found = text_of(row, path)
        if isinstance(found, str):
            texts.append(found)
            numbers.append(number)
        elif found is not None:
            bad.append(BadRow(number, found.reason, found.detail, excerpt(found.head)))
    blank = len(rows) - len(texts) - len(bad)
    return TextBatch(pa.array(texts, pa.large_string()), np.array(numbers, np.int64), bad, blank)


def text_of(row: Row, path: Sequence[str]) -> str | Refused | None:
    """The text at `path` in one row, why there is none, or None for a blank row.

    A byte order mark before the row is skipped: files begin with one, and files that were concatenated hold more.
    """
    if isinstance(row, Refused):
        return row
    line = row.removeprefix(BYTE_ORDER_MARK)
    if not line or line.isspace():
        return None
    try:
        found = _walk(orjson.loads(line), path)
    except orjson.JSONDecodeError as error:
        found = _fault(line, error)
    return found if isinstance(found, str) else Refused(*found, head=row[:HEAD_BYTES])


def _walk(value: object, path: Sequence[str]) -> str | tuple[str, str]:
    """The string at `path`, or reason and detail. A null on the way is null_text, as it is at the end."""
    place = "the row"
    for key in path:
        if value is None and place != "the row":
            break
        if not isinstance(value, dict):
            return "not_an_object", f"{place} is {_kind(value)}, so it has no field {key!r}"
        fields = cast("dict[str, object]", value)
        if key not in fields:
            return "missing_field", f"{place} has no field {key!r}; {nearest(key, fields) if fields else 'it is empty'}"
        value = fields[key]
        place = repr(key) if place == "the row" else f"{place}.{key!r}"
    if isinstance(value, str):
        return value
    return ("null_text" if value is None else "not_a_string"), f"{place} is {_kind(value)}"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return "a string" if isinstance(value, str) else "a number"


def _fault(line: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Reason and detail of a line that orjson refused."""
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return "invalid_utf8", str(wrong)
    return ("lone_surrogate" if "surrogate" in error.msg else "malformed_json"), str(error)


def excerpt(head: bytes) -> str:
    """The first 200 characters of a row, with undecodable bytes and control characters written as escapes."""
    text = head[:HEAD_BYTES].decode(errors="backslashreplace")[:EXCERPT_CHARACTERS]
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
