"""JSON rows: each is a text or record, blank, or a bad row with the exact reason.

A block of rows is first parsed as if every row were good. Only if that fails is it parsed row by row, so diagnosis is free if
all rows are good, and one bad row costs a few milliseconds.

JSON is what orjson accepts (RFC 8259): `NaN`, `Infinity`, lone surrogates and bytes that are not UTF-8 are rejected anywhere in
a row. So are numbers that are valid JSON but that Python cannot hold: floats beyond a double, such as `1e400`, and integers of
more than 4,300 digits. If a key is duplicated, the last value counts, except in messages, tool calls and tool definitions,
where they are rejected.

Reasons for every reader: malformed_json, number_out_of_range, invalid_utf8, lone_surrogate, not_an_object and
row_too_long; for texts also missing_field, null_text and not_a_string; with a `where` also not_comparable. A row that a filter
drops is only parsed.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from reprlib import Repr
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
import orjson
import pyarrow as pa
from tokenmill.tasks.errors import nearest
from xxhash import xxh3_128

from .exact_json import NumberRangeError, are_lines, loads, loads_all, rounded
from .files import (
    NO_ROWS,
    BadRow,
    BytesBatch,
    Ranges,
    Record,
    RecordBatch,
    Refused,
    Require,
    Row,
    Slice,
    SourceFile,
    SourceFormat,
    TextBatch,
    field_path,
    leading,
)
from .integrity import verified
from .opening import SourceCorrupt, blocks, open_source, require_stored, require_text_head, text_blocks
from .row_filter import RowFilter, filter_of

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

EXCERPT_CHARACTERS = 200
HEAD_BYTES = 4 * EXCERPT_CHARACTERS
"""Enough bytes for an excerpt: a character of UTF-8 has at most four."""

EXCERPTS = Repr()
EXCERPTS.maxlevel, EXCERPTS.maxdict, EXCERPTS.maxlist, EXCERPTS.maxstring = 4, 8, 4, 60

EVERY_ROW = RowFilter({})

NOT_COMPARABLE = "not_comparable"
"""The reason for a row with a value whose type differs from the one in `where`."""

Given = TypeVar("Given")
Found = TypeVar("Found")
Picked = TypeVar("Picked", TextBatch, RecordBatch)


class BrokenContentError(ValueError):
    """Content that lost an unknown number of rows; the message has the cause and the remedy."""


class RowFormat(SourceFormat):
    """A format whose `split` turns file content into JSON rows. A file is one slice, unless a subclass cuts it."""

    is_text: bool = True

    @abstractmethod
    def split(self, content: Iterator[bytes]) -> Iterator[list[Row]]:
        """Return the rows in consecutive blocks of a file: for each block, a list of the rows that end in it.

        Raises BrokenContentError.
        """

    def cut(self, file: SourceFile, shard_size: int, fields: Sequence[str], require: Require) -> list[Slice]:  # noqa: ARG002
        return [Slice(file, 0, file.size, size=file.size)]

    def owned(self, part: Slice, stream: BinaryIO, fields: Sequence[str]) -> tuple[bytes, Ranges]:  # noqa: ARG002
        self.require_text(part, stream)
        return b"", [(part.start, part.stop)]

    def require_text(self, part: Slice, stream: BinaryIO) -> None:
        """Raise InputError if a file that should be plain text begins like a different format."""
        if self.is_text and part.file.compression is None and part.start == 0:
            stream.seek(0)
            require_text_head(part.file, stream.read(HEAD_BYTES))

    def content(self, part: Slice, stream: BinaryIO, hasher: xxh3_128) -> Iterator[bytes]:
        """Return the decompressed content of a slice, in blocks; `hasher` gets the bytes as they are stored."""
        return blocks(part.file, stream, hasher)

    def rows(self, part: Slice) -> Iterator[list[Row]]:
        with open_source(part.file) as stream, verified(part, stream) as hasher:
            content = self.content(part, stream, hasher)
            if self.is_text and part.start == 0:
                content = text_blocks(part.file, content)
            try:
                yield from leading(self.split(content), part.rows)
            except BrokenContentError as error:
                if not self.is_text and part.file.compression is None:
                    require_stored(part.file, stream, self.name)
                raise SourceCorrupt(f"{part.file.uri}: {error}") from error

    def texts(self, part: Slice, text_field: str) -> Iterator[TextBatch]:
        path, chosen = field_path(text_field), filter_of(part)
        return self._picked(part, lambda rows, first: pick_texts(rows, path, first, chosen))

    def records(self, part: Slice, fields: Sequence[str]) -> Iterator[RecordBatch]:  # noqa: ARG002 - rows hold all fields
        chosen = filter_of(part)
        return self._picked(part, lambda rows, first: pick_records(rows, first, chosen))

    def objects(self, part: Slice) -> Iterator[BytesBatch]:
        """Return the rows of a slice, in order, as bytes: those that `records` would read."""
        return self._picked(part, pick_objects)

    def _picked(self, part: Slice, pick: Callable[[Sequence[Row], int], Found]) -> Iterator[Found]:
        """The batches that `pick` makes of the rows in each block, which it numbers from the rows before."""
        first = 0
        for rows in self.rows(part):
            yield pick(rows, first)
            first += len(rows)

    def count_rows(self, part: Slice, limit: int) -> int:
        count = 0
        for rows in self.rows(part):
            count += len(rows)
            if count >= limit:  # a sample needs no more, and a file may be large
                return limit
        return count

    def first_row(self, part: Slice) -> int:  # noqa: ARG002 - a slice begins its file
        return 0


def pick_texts(rows: Sequence[Row], path: Sequence[str], first: int, chosen: RowFilter = EVERY_ROW) -> TextBatch:
    """Return the texts at `path` in consecutive `rows`, numbered from `first`, of which `chosen` keeps some."""
    found = _all_texts(rows, path, chosen)
    if found is not None:
        texts, kept = found
        return TextBatch(texts, rows=first + kept, filtered=len(rows) - len(kept))
    return _chosen(rows, first, chosen, lambda rest: _good_texts(rest, path))


def _all_texts(
    rows: Sequence[Row], path: Sequence[str], chosen: RowFilter
) -> tuple[pa.LargeStringArray, np.ndarray] | None:
    """The texts that are kept, and the numbers of their rows (int64), if all rows are good, otherwise None."""
    try:
        values = [orjson.loads(cast("bytes", row)) for row in rows]
        kept = _all_kept(values, chosen)
        if kept is None:
            return None
        if chosen:
            values = [values[row] for row in kept.tolist()]
        # A column of Parquet may have a dot in its name, and its rows written as JSON have it as a key.
        if len(path) > 1 and all(path[0] not in value for value in values):
            path = [".".join(path)]
        for key in path:
            values = [value[key] for value in values]
        texts = pa.array(values, pa.large_string())
    except (ValueError, KeyError, TypeError):  # not JSON, no such field, or not an object or string
        return None
    return None if texts.null_count else (texts, kept)


def _all_kept(values: Sequence[Any], chosen: RowFilter) -> np.ndarray | None:
    """The numbers (int64) of the values that are kept; None if some cannot be judged."""
    if not chosen:
        return np.arange(len(values))
    if not all(isinstance(value, dict) for value in values):
        return None
    kept, problems = chosen.of_records(values)
    return None if problems else np.flatnonzero(kept)


def _good_texts(rows: Sequence[Row], path: Sequence[str]) -> TextBatch:
    found, numbers, bad = each_row(rows, lambda row: text_of(row, path), 0)
    blank = _others(len(rows), numbers, bad)
    return TextBatch(pa.array(found, pa.large_string()), rows=numbers, bad=bad, blank=blank)


def _others(count: int, good: np.ndarray, bad: Sequence[BadRow]) -> np.ndarray:
    """The rows that are neither `good` nor `bad`."""
    return NO_ROWS if len(good) + len(bad) == count else np.delete(np.arange(count), [*good, *(row.row for row in bad)])


def pick_records(rows: Sequence[Row], first: int, chosen: RowFilter = EVERY_ROW) -> RecordBatch:
    """Return the records in consecutive `rows`, numbered from `first`, of which `chosen` keeps some."""
    raw, records, kept = cast("Sequence[bytes]", rows), list[Record](), None
    try:
        records = loads_all(raw)
        if all(isinstance(record, dict) for record in records):
            kept = _all_kept(records, chosen)
    except (orjson.JSONDecodeError, NumberRangeError):
        pass  # some row is bad
    if kept is None:
        return _chosen(rows, first, chosen, _good_records)
    if chosen:
        records, raw = [records[row] for row in kept.tolist()], [raw[row] for row in kept.tolist()]
    return RecordBatch(records, raw, rows=first + kept, filtered=len(rows) - len(kept))


def _good_records(rows: Sequence[Row]) -> RecordBatch:
    records, numbers, bad = each_row(rows, lambda row: _from_row(row, loads, _object), 0)
    raw = [cast("bytes", rows[number]) for number in numbers.tolist()]
    return RecordBatch(records, raw, rows=numbers, bad=bad, blank=_others(len(rows), numbers, bad))


def _chosen(rows: Sequence[Row], first: int, chosen: RowFilter, pick: Callable[[Sequence[Row]], Picked]) -> Picked:
    """What `pick` finds in the rows that are not dropped, with their numbers from `first`; unreadable rows are not dropped."""
    records, numbers, _ = (
        each_row(rows, lambda row: _from_row(row, rounded, _object), 0) if chosen else ([], NO_ROWS, [])
    )
    kept, problems = chosen.of_records(records)
    unlike = [
        BadRow(first + int(numbers[row]), NOT_COMPARABLE, why, excerpt(cast("bytes", rows[int(numbers[row])])))
        for row, why in problems.items()
    ]
    places = np.delete(np.arange(len(rows)), numbers[~kept])
    found = pick([rows[place] for place in places.tolist()])
    bad = [replace(row, row=first + int(places[row.row])) for row in found.bad]
    return replace(
        found,
        rows=first + places[found.rows],
        blank=first + places[found.blank],
        bad=sorted([*bad, *unlike], key=lambda row: row.row),
        filtered=len(rows) - len(places) - len(unlike),
    )


def pick_objects(rows: Sequence[Row], first: int) -> BytesBatch:
    """Return the bytes of the records in consecutive `rows`, numbered from `first`."""
    raw = cast("Sequence[bytes]", rows)
    try:
        # A record is dropped as soon as it is parsed, and its memory used again.
        if all(type(orjson.loads(row)) is dict for row in raw):
            numbers = np.arange(first, first + len(rows), dtype=np.int64)
            return BytesBatch(raw, are_lines(raw), rows=numbers)
    except (orjson.JSONDecodeError, NumberRangeError):
        pass  # some row is bad
    batch = pick_records(rows, first)
    return BytesBatch(batch.raw, rows=batch.rows, bad=batch.bad, blank=batch.blank)


def each_row(
    rows: Iterable[Given], read: Callable[[Given], Found | Refused | None], first: int
) -> tuple[list[Found], np.ndarray, list[BadRow]]:
    """Return the results of `read` for the good rows, the numbers of these rows (int64, from `first`), and the bad rows.

    `read` returns None for a blank row.
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


def text_of(row: Row, path: Sequence[str]) -> str | Refused | None:
    """Return the text at `path` in one row, a Refused with the reason, or None for a blank row."""
    return _from_row(row, rounded, lambda value: _text_at(value, path))


def _text_at(value: object, path: Sequence[str]) -> str | tuple[str, str]:
    """The string at `path`, else at the field that is called by all its keys with dots between them; or reason and detail."""
    found = _nested_text(value, path)
    if (
        not isinstance(found, tuple)
        or found[0] not in {"missing_field", "not_an_object"}
        or not isinstance(value, dict)
    ):
        return found
    dotted = ".".join(path)
    return _nested_text(cast("object", value), [dotted]) if dotted in value else found


def _nested_text(value: object, path: Sequence[str]) -> str | tuple[str, str]:
    """The string at `path`, or reason and detail. A null anywhere on the path is null_text."""
    place = "the row"
    for key in path:
        if value is None and place != "the row":  # a row may have no text, but it must be an object
            break
        if not isinstance(value, dict):
            return "not_an_object", f"{place} is {kind_of(value)}, so it doesn't have the field {key!r}"
        fields = cast("dict[str, object]", value)
        if key not in fields:
            return (
                "missing_field",
                f"{place} doesn't have the field {key!r}; {nearest(key, fields) if fields else 'it is empty'}",
            )
        value = fields[key]
        place = repr(key) if place == "the row" else f"{place}.{key!r}"
    if isinstance(value, str):
        return value
    return ("null_text" if value is None else "not_a_string"), f"{place} is {kind_of(value)}"


def _object(value: object) -> Record | tuple[str, str]:
    if isinstance(value, dict):
        return cast("Record", value)
    return "not_an_object", f"the row is {kind_of(value)}"


def _from_row(
    row: Row, parse: Callable[[bytes], object], take: Callable[[object], Found | tuple[str, str]]
) -> Found | Refused | None:
    """Return the result of `take` on the parsed row; a Refused if `take` returns reason and detail; None for a blank row.

    A byte order mark before the row is skipped: files may begin with one, and concatenated files contain more.
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
    """Reason and detail for a line that orjson rejected."""
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return "invalid_utf8", str(wrong)
    several = "; write one object a line" if "after document" in error.msg else ""
    return ("lone_surrogate" if "surrogate" in error.msg else "malformed_json"), f"{error}{several}"


def kind_of(value: object) -> str:
    """Return the JSON type of a value, with its article."""
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
    """Return the first 200 characters of a row, with undecodable bytes and control characters escaped."""
    text = head[:HEAD_BYTES].decode(errors="backslashreplace")[:EXCERPT_CHARACTERS]
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def excerpt_of(record: Mapping[str, object]) -> str:
    """Return how a record begins, at any depth or size."""
    return excerpt(EXCERPTS.repr(record).encode())
