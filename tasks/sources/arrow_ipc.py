"""Arrow IPC, as files (Feather V2) and as streams (what `datasets` writes): a row becomes the JSON object of its fields.

One record batch is in memory at a time, and a file is one slice. A file begins with a magic number and ends with a footer that records
where its batches are; compressed, as `.arrow.gz`, it is read forwards as the stream that it most often also is. Rows are as from Parquet: maps are objects, and fields of structs that are null are omitted. Times and decimals
become text, and so does binary that is UTF-8; other binary is null.

Reasons for bad rows: the reasons of JSON, and unreadable_value.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import chain
from typing import Any, BinaryIO, cast

import orjson
import pyarrow as pa
from pyarrow import ipc

from .files import Refused, Row, Slice, leading
from .integrity import VerifiedStream, is_hashed, require_content, verified
from .json_lines import MAX_ROW_BYTES
from .json_rows import BrokenContentError, RowFormat
from .opening import BLOCK_BYTES, SourceCorrupt, Stored, is_decoder_error, open_source
from .parquet_batches import decoded_bytes, drop_nulls, only_row, python_rows

MAGIC = b"ARROW1"
FEATHER_V1 = b"FEA1"

PADDED = 8
"""The length of the magic number at the beginning of a file."""

PIECE_BYTES = 4 << 20


class ArrowIpc(RowFormat):
    """`.arrow`, `.feather` and `.ipc`."""

    name = "arrow"
    endings = (".arrow", ".feather", ".ipc")
    rank = 1
    is_text = False

    def split(self, content: Iterator[bytes]) -> Iterator[list[Row]]:
        first = next(content, b"")
        if first.startswith(FEATHER_V1):
            raise BrokenContentError("is Feather V1; write it again with pyarrow.feather.write_feather, as version 2")
        is_file = first.startswith(MAGIC)
        stream = BufferedReader(Stored(chain([first[PADDED:] if is_file else first], content)), BLOCK_BYTES)
        with _explained():
            for batch in ipc.open_stream(stream):
                yield from _rows(batch)
        end = b""  # of a file, the footer, whose last bytes are the magic number again
        while block := stream.read(BLOCK_BYTES):
            end = (end + block)[-len(MAGIC) :]
        if is_file and end != MAGIC:
            raise BrokenContentError("doesn't have a footer, so the file is truncated or damaged")

    def rows(self, part: Slice) -> Iterator[list[Row]]:
        with open_source(part.file) as stream:
            if part.file.compression or stream.read(len(MAGIC)) != MAGIC:
                yield from super().rows(part)
                return
            with verified(part, stream) as hasher:
                content = stream
                if is_hashed(part):
                    ranges = [(part.start, part.stop)]
                    content = cast("BinaryIO", VerifiedStream(stream, ranges, hasher, part.file.uri))
                    require_content(part, hasher)
                try:
                    with _explained():  # the footer says where the batches are, and they are read one by one
                        opened = ipc.open_file(content)
                        batches = map(opened.get_batch, range(opened.num_record_batches))
                        yield from leading(chain.from_iterable(map(_rows, batches)), part.rows)
                except BrokenContentError as error:
                    raise SourceCorrupt(f"{part.file.uri}: {error}") from error


@contextmanager
def _explained() -> Generator[None]:
    """Turn what Arrow finds damaged into a BrokenContentError."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if not is_decoder_error(error):
            raise
        raise BrokenContentError(f"{error}; the file is truncated, damaged or not Arrow IPC") from error


def _rows(batch: pa.RecordBatch) -> Iterator[list[Row]]:
    """The rows of a batch as JSON, some megabytes at a time."""
    twice = next((name for name in batch.schema.names if batch.schema.names.count(name) > 1), None)
    if twice is not None:
        raise BrokenContentError(f"several columns are called {twice!r}; write the file again with distinct names")
    at_once = max(1, PIECE_BYTES * len(batch) // max(1, decoded_bytes(batch)))
    for start in range(0, len(batch), at_once):
        piece = batch[start : start + at_once]
        try:
            yield _objects(piece)
        except (ValueError, OverflowError):  # text that is not UTF-8, or a time outside the range of `datetime`
            yield [only_row(piece[row : row + 1], _objects) for row in range(len(piece))]


def _objects(batch: pa.RecordBatch) -> list[Row]:
    rows: list[Row] = []
    for record in python_rows(batch):
        drop_nulls([*record.values()])  # a column that is null is counted by its reader
        row = orjson.dumps(record, default=_plain)
        if len(row) > MAX_ROW_BYTES:
            detail = f"{len(row):,} bytes; at most {MAX_ROW_BYTES:,} are read"
            rows.append(Refused("row_too_long", detail, row[:BLOCK_BYTES]))
        else:
            rows.append(row)
    return rows


def _plain(value: Any) -> str | None:  # noqa: ANN401 - whatever Arrow holds and JSON does not
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
