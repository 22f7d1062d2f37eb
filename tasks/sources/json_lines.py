r"""JSON Lines: one object a line, cut anywhere, every line read exactly once.

A row belongs to the slice that its first byte lies in. A slice that starts inside a row leaves that row to the slice
before it, which reads past its own stop to finish it; so files are cut at fixed byte offsets, without reading them.

Only `\n` ends a line (JSON strings may hold the other line ends that Unicode knows, and `\r` before it is white space
to JSON). The last line needs none. Rows of up to 256 MiB are read whole; a longer one is passed over without being
held, and reported. Memory is a few times the larger of BLOCK_BYTES and the longest row.
"""

from collections.abc import Iterator
from typing import BinaryIO

from .json_rows import HEAD_BYTES, Refused, Row
from .opening import BLOCK_BYTES

MAX_ROW_BYTES = 256 << 20
"""Rows longer than this are refused. It is never smaller than BLOCK_BYTES."""

PROBE_BYTES = 64 << 10
"""How much is read at a time to find the end of one row."""


class Pending:
    """A row that grows from block to block until its end is found; kept only as far as it may be read."""

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
        else:
            self._pieces.clear()

    def take(self) -> Row:
        """The row, which is complete, and begin the next."""
        if self.size > MAX_ROW_BYTES:
            return self.refuse("row_too_long", f"{self.size:,} bytes; at most {MAX_ROW_BYTES:,} are read")
        row = b"".join(self._pieces)
        self.__init__()
        return row

    def refuse(self, reason: str, detail: str) -> Refused:
        """The row as one that cannot be read, and begin the next."""
        refused = Refused(reason, detail, self._head)
        self.__init__()
        return refused


def row_start(stream: BinaryIO, offset: int) -> int:
    """The offset of the first row that begins at or after `offset`; the end of the file when there is none."""
    if offset == 0:
        return 0
    position = stream.seek(offset - 1)
    while probe := stream.read(PROBE_BYTES):
        end = probe.find(b"\n") + 1
        if end:
            return position + end
        position += len(probe)
    return stream.seek(0, 2)


def slice_blocks(stream: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """The bytes of the rows that begin in `[start, stop)`, in blocks: `[row_start(start), row_start(stop))`."""
    position = stream.seek(row_start(stream, start))
    if position >= stop:
        return
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
    """The lines of consecutive blocks, without their ends, in lists of those that each block completes."""
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
