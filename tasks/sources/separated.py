r"""Rows of separated values, with column names in the first one. Values are text; a quoted one may contain separators and line ends.

Python's csv module reads them, strictly: text beside a closing quote and a quote that is never closed are bad rows, because the
values around them are most likely torn. An unclosed quote swallows what follows, so its row is up to 256 MiB long. Rows are
numbered from the one after the column names. A file is one slice: no place in it shows whether it is inside quotes.

Reasons for bad rows: malformed_csv, wrong_columns, invalid_utf8 and row_too_long.
"""

import csv
from collections.abc import Iterator
from itertools import chain

import orjson

from .files import Refused, Row
from .json_lines import MAX_ROW_BYTES, split_lines
from .json_rows import BYTE_ORDER_MARK, HEAD_BYTES, BrokenContentError, RowFormat
from .opening import BLOCK_BYTES

NOT_UTF8 = "surrogateescape"
"""How bytes that are not UTF-8 pass through the csv module."""


class Separated(RowFormat):
    """`.csv` and `.tsv`."""

    rank = 1

    def __init__(self, name: str, separator: str) -> None:
        self.name, self.endings, self._separator = name, (f".{name}",), separator

    def split(self, content: Iterator[bytes]) -> Iterator[list[Row]]:
        csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process; by default, 128 kB
        lines = _Lines(content)
        found = csv.reader(lines, delimiter=self._separator, strict=True)
        names, rows, size = list[str](), list[Row](), 0
        while (values := _next(found, lines)) is not None:
            if values and not names:  # the first row that isn't blank
                if isinstance(values, Refused):
                    why = f"the column names in its first row can't be read: {values.detail}; correct that row"
                    raise BrokenContentError(why)
                if twice := next((name for name in values if name and values.count(name) > 1), None):
                    why = f"{values.count(twice)} columns are called {twice!r}; give each column its own name"
                    raise BrokenContentError(why)
                names = values
                continue
            rows.append(_row(names, values, lines))
            size += sum(map(len, lines.row))
            if size >= BLOCK_BYTES:
                yield rows
                rows, size = [], 0
        yield rows


class UnreadableLineError(ValueError):
    """A line that is too long."""


class _Lines:
    """Lines as text for the csv module; `row` are the lines of its current row."""

    def __init__(self, content: Iterator[bytes]) -> None:
        self._lines = chain.from_iterable(split_lines(content))
        self._mark = BYTE_ORDER_MARK
        self.row: list[str] = []

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line, mark, self._mark = next(self._lines), self._mark, b""
        if isinstance(line, Refused):
            raise UnreadableLineError(line.detail)
        # With its line end, because a quoted value may go on in the next line.
        self.row.append(line.removeprefix(mark).decode(errors=NOT_UTF8) + "\n")
        return self.row[-1]

    def head(self) -> bytes:
        return "".join(line[:HEAD_BYTES] for line in self.row[:HEAD_BYTES]).encode(errors=NOT_UTF8)[:HEAD_BYTES]


def _next(found: Iterator[list[str]], lines: _Lines) -> list[str] | Refused | None:
    """The values of the next row; None after the last."""
    lines.row.clear()  # the reader takes as many lines as its row has
    try:
        return next(found, None)
    except UnreadableLineError as error:
        return Refused("row_too_long", str(error), lines.head())
    except csv.Error as error:
        reason = "row_too_long" if "field limit" in str(error) else "malformed_csv"
        return Refused(reason, str(error), lines.head())


def _row(names: list[str], values: list[str] | Refused, lines: _Lines) -> Row:
    """Values as a JSON object; none is a blank line."""
    if isinstance(values, Refused):
        return values
    if not values:
        return b""
    if len(values) != len(names):
        return Refused("wrong_columns", f"{len(values)} values for {len(names)} columns", lines.head())
    try:
        return orjson.dumps(dict(zip(names, values, strict=True)))
    except TypeError as error:  # surrogates, which stand for bytes that are not UTF-8
        return Refused("invalid_utf8", str(error), lines.head())
