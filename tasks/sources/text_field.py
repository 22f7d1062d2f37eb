"""Picking the text out of rows of JSON, and saying exactly why a row has none.

A block of rows is first parsed as if every row were good: one comprehension and one Arrow array. Only when something
in the block is not as hoped is it gone through row by row, where every row ends as a text, a blank or a reason: those
of `json_rows`, and missing_field, null_text and not_a_string.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import orjson
import pyarrow as pa
from tokenmill.tasks.errors import nearest

from .exact_json import rounded
from .files import TextBatch
from .json_rows import Refused, Row, each_row, from_row, kind_of


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
    texts, numbers, bad = each_row(rows, lambda row: text_of(row, path), first)
    return TextBatch(pa.array(texts, pa.large_string()), numbers, bad, len(rows) - len(texts) - len(bad))


def text_of(row: Row, path: Sequence[str]) -> str | Refused | None:
    """The text at `path` in one row, why there is none, or None for a blank row."""
    return from_row(row, rounded, lambda value: _walk(value, path))


def _walk(value: object, path: Sequence[str]) -> str | tuple[str, str]:
    """The string at `path`, or reason and detail. A null on the way is null_text, as it is at the end."""
    place = "the row"
    for key in path:
        if value is None and place != "the row":
            break
        if not isinstance(value, dict):
            return "not_an_object", f"{place} is {kind_of(value)}, so it has no field {key!r}"
        fields = cast("dict[str, object]", value)
        if key not in fields:
            return "missing_field", f"{place} has no field {key!r}; {nearest(key, fields) if fields else 'it is empty'}"
        value = fields[key]
        place = repr(key) if place == "the row" else f"{place}.{key!r}"
    if isinstance(value, str):
        return value
    return ("null_text" if value is None else "not_a_string"), f"{place} is {kind_of(value)}"
