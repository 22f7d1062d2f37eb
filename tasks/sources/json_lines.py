r"""JSON Lines: one object per line; files are cut anywhere, and every line is read exactly once.

A row belongs to the slice that holds its first byte. A slice that starts inside a row leaves that row to the previous
slice, which reads past its own end to finish it. So files are cut at fixed byte offsets, without reading them. A
compressed file is one slice.

Only `\n` ends a line: JSON strings may contain Unicode's other line separators, and a `\r` before `\n` is white space in JSON.
The last line doesn't need `\n`. Rows of up to 256 MiB are read whole; a longer one is skipped and reported. Memory is a few times
the larger of BLOCK_BYTES and the longest row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO

import orjson
from xxhash import xxh3_128

from .files import Ranges, Refused, Require, Row, Slice, SourceFile
from .integrity import hashing
from .json_rows import BYTE_ORDER_MARK, HEAD_BYTES, RowFormat
from .opening import BLOCK_BYTES, JSON_LINES, open_source

MAX_ROW_BYTES = 256 << 20
"""Longer rows are bad rows. At least BLOCK_BYTES."""

PROBE_BYTES = 64 << 10
"""Bytes to read at a time when looking for the end of one row."""

COUNTED_BYTES = 4 << 20
"""Bytes to read at a time when counting lines."""


class JsonLines(RowFormat):
    """`.jsonl` and `.ndjson`. Plain files are cut at multiples of the shard size."""

    name = JSON_LINES
    endings = (".jsonl", ".ndjson")

    def cut(self, file: SourceFile, shard_size: int, fields: Sequence[str], require: Require) -> list[Slice]:
        if file.compression:
            return super().cut(file, shard_size, fields, require)
        starts = range(0, file.size, shard_size)  # at fixed places, so that growth moves none of them
        stops = [*starts[1:], file.size]
        return [Slice(file, start, stop, size=stop - start) for start, stop in zip(starts, stops, strict=True)]

    def shortened(self, part: Slice, size: int) -> Slice:
        return part if part.file.compression else replace(part, stop=part.start + size, size=size)

    def owned(self, part: Slice, stream: BinaryIO, fields: Sequence[str]) -> tuple[bytes, Ranges]:
        if part.file.compression:
            return super().owned(part, stream, fields)
        self.require_text(part, stream)
        return b"", [(row_start(stream, part.start), row_start(stream, part.stop))]

    def content(self, part: Slice, stream: BinaryIO, hasher: xxh3_128) -> Iterator[bytes]:
        if part.file.compression:
            return super().content(part, stream, hasher)
        return hashing(slice_blocks(stream, part.start, part.stop), hasher)

    def split(self, content: Iterator[bytes]) -> Iterator[list[Row]]:
        return split_lines(content)

    def first_row(self, part: Slice) -> int:
        """Return the number of lines before the slice, counted at about 5 GB/s once the file is cached."""
        with open_source(part.file) as stream:
            remaining, lines = row_start(stream, part.start), 0
            stream.seek(0)
            while remaining > 0 and (chunk := stream.read(min(COUNTED_BYTES, remaining))):
                lines += chunk.count(b"\n")
                remaining -= len(chunk)
        return lines


class WholeText(RowFormat):
    """`.txt`. A file is one row, `{"text": …}`."""

    name = "text"
    endings = (".txt",)
    rank = 2

    def split(self, content: Iterator[bytes]) -> Iterator[list[Row]]:
        text = Pending()
        for block in content:  # bounded by MAX_ROW_BYTES, as any row
            text.add(block)
        yield [text_row(text.take())]


class TextLines(JsonLines):
    """`.txt` where `document_per` is `line`: a line is a row."""

    name = "text_lines"
    endings = ()

    def split(self, content: Iterator[bytes]) -> Iterator[list[Row]]:
        for lines in split_lines(content):
            yield [line if isinstance(line, Refused) else text_row(line.removesuffix(b"\r")) for line in lines]


def text_row(text: Row) -> Row:
    """Return a text as a JSON object; a blank or unreadable one as it is."""
    if isinstance(text, Refused) or not (text := text.removeprefix(BYTE_ORDER_MARK)) or text.isspace():
        return text
    try:
        return orjson.dumps({"text": text.decode()})
    except UnicodeDecodeError as error:
        return Refused("invalid_utf8", str(error), text[:HEAD_BYTES])


class Pending:
    """A row that grows from block to block until its end is found; once it is too long, only its head is kept."""

    def __init__(self) -> None:
        self.size = 0
        self._pieces: list[bytes] = []
        self._head = b""

    def add(self, piece: bytes) -> None:
        """Append the next bytes of the row."""
        self.size += len(piece)
        if len(self._head) < HEAD_BYTES:
            self._head += piece[: HEAD_BYTES - len(self._head)]
        if self.size <= MAX_ROW_BYTES:
            self._pieces.append(piece)
        else:  # a row of many gigabytes must not be held
            self._pieces.clear()

    def take(self) -> Row:
        """Return the complete row and begin the next."""
        if self.size > MAX_ROW_BYTES:
            return self.refuse("row_too_long", f"{self.size:,} bytes; at most {MAX_ROW_BYTES:,} are read")
        row = b"".join(self._pieces)
        self.__init__()
        return row

    def refuse(self, reason: str, detail: str) -> Refused:
        """Return the row as unreadable and begin the next."""
        refused = Refused(reason, detail, self._head)
        self.__init__()
        return refused


def row_start(stream: BinaryIO, offset: int) -> int:
    """Return the offset of the first row that begins at or after `offset`; the end of the file if there is none."""
    if offset == 0:
        return 0
    position = stream.seek(offset - 1)  # a row begins at `offset` if the byte before ends a line
    while probe := stream.read(PROBE_BYTES):
        end = probe.find(b"\n") + 1
        if end:
            return position + end
        position += len(probe)
    return stream.seek(0, 2)


def slice_blocks(stream: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes of the rows that begin in `[start, stop)`, in blocks: `[row_start(start), row_start(stop))`."""
    position = stream.seek(row_start(stream, start))
    if position >= stop:
        return
    # Up to the last byte of the slice, then to the end of the line that it belongs to.
    while position < stop - 1:
        block = stream.read(min(BLOCK_BYTES, stop - 1 - position))
        if not block:
            return
        position += len(block)
        yield block
    while probe := stream.read(PROBE_BYTES):
        end = probe.find(b"\n") + 1
        yield probe[:end] if end else probe
        if end:
            return


def split_lines(blocks: Iterator[bytes]) -> Iterator[list[Row]]:
    """Yield the lines in consecutive blocks, without line ends: for each block, a list of the lines that end in it."""
    pending = Pending()
    for block in blocks:
        head, *others = block.split(b"\n")
        pending.add(head)
        if not others:
            continue
        tail = others.pop()
        lines: list[Row] = [pending.take(), *others]
        pending.add(tail)
        yield lines
    if pending.size:
        yield [pending.take()]
