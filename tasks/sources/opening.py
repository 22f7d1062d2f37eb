"""A source file as a stream of bytes, decompressed if it is compressed.

Local files are opened unbuffered, because readers ask for a mebibyte at a time and a second copy would be waste;
remote ones read ahead by 8 MiB, because every request to an object store costs some tens of milliseconds. Gzip and zstd
are decompressed as streams: several members or frames in one file are read one after the other, and memory does not grow
with the file. zstd remembers a window of what it wrote, as long as the writer chose: 8 MiB at most up to level 19, more
with `--ultra` and `--long`, and 2 GiB with `--long=31`, the most there is. A worker that reads such a file needs that memory.

A stream that ends too early or does not decompress is an error. Gzip always carries a checksum; zstd only if its writer
put one in, so that a flipped bit in a zstd file without checksums may pass. Zero bytes after a gzip member are padding
(tapes and block devices leave them), and other bytes that are no gzip are an error: gzip(1) warns and leaves them out, but
nobody knows whether they were rows.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import pyarrow as pa
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.storage import filesystem, is_local
from zstandard import ZstdDecompressor, ZstdError, get_frame_parameters

from .files import SourceFile

BLOCK_BYTES = 1 << 20
"""What is read and parsed at a time. Rows of 1 MiB still lie in the processor's cache when they are parsed and copied:
640 MB/s from file to Arrow on one core, against 430 with 4 MiB and 240 with 16 MiB."""

REMOTE_BLOCK_BYTES = 8 << 20

MAX_WINDOW_BYTES = 1 << 31
"""The longest window that zstd makes (ZSTD_WINDOWLOG_MAX on 64 bits, `--long=31`), and the memory that reading it takes."""

ZSTD_INPUT_BYTES = 2 << 10
"""A block of 128 KiB may be spelled by 4 bytes (RFC 8878, RLE_Block), so that this gives 64 MiB at most."""

FRAME_HEADER_BYTES = 18
"""The longest header of a zstd frame, with its magic number."""

GZIP = 16 + zlib.MAX_WBITS
GZIP_MAGIC = b"\x1f"


class Stream(Protocol):
    """What is read forwards."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most `size` of them; none at the end."""
        ...

    def tell(self) -> int:
        """How many bytes were read."""
        ...


class BrokenStream(ValueError):  # noqa: N818 - it names what is found
    """Compressed content that is not whole."""


class UnsupportedFrame(ValueError):  # noqa: N818 - it names what is found
    """Compressed content that may be whole, and needs more than the file to be decompressed."""


class SourceCorrupt(RunError):  # noqa: N818 - it names what is found, as a source is corrupt
    """A source file is cut short or damaged, so that its rows cannot all be read."""


def open_source(file: SourceFile, *, cache: str = "readahead") -> BinaryIO:
    """The file as it is stored, seekable; `cache` is fsspec's name of how a remote one is buffered."""
    system, path = filesystem(file.uri)
    if is_local(file.uri):
        return Path(path).open("rb", buffering=0)
    return cast("BinaryIO", system.open(path, "rb", block_size=REMOTE_BLOCK_BYTES, cache_type=cache))


def blocks(file: SourceFile, stream: Stream) -> Iterator[bytes]:
    """The content of the whole file, decompressed, in blocks of BLOCK_BYTES; the last may be shorter.

    Raises SourceCorrupt when compressed content ends too early or cannot be decompressed, and InputError when it is
    intact and needs a dictionary or too long a window.
    """
    stored = iter(lambda: stream.read(BLOCK_BYTES), b"")
    if file.compression is None:
        yield from stored
        return
    if file.size == 0:
        raise SourceCorrupt(f"{file.uri}: is empty, and so no {file.compression} file; fetch it or write it again")
    try:
        yield from _reblocked(_gunzipped(stored) if file.compression == "gzip" else _unzstd(stored))
    except UnsupportedFrame as error:
        raise InputError(f"{file.uri}: {error}") from error
    except (BrokenStream, zlib.error, ZstdError) as error:
        raise SourceCorrupt(
            f"{file.uri}: {error}, near byte {stream.tell():,} of {file.size:,} ({file.compression}); "
            f"the file is cut short, damaged or not {file.compression} throughout: fetch it or write it again, or take it out "
            "of the blend"
        ) from error


def _reblocked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks of BLOCK_BYTES: where a block ends must not depend on how the file was compressed."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= BLOCK_BYTES:
            data, size = b"".join(held), size % BLOCK_BYTES
            yield from (data[start : start + BLOCK_BYTES] for start in range(0, len(data) - size, BLOCK_BYTES))
            held = [data[len(data) - size :]]
    if size:
        yield b"".join(held)


def _gunzipped(stored: Iterator[bytes]) -> Iterator[bytes]:
    """The content of gzip members (RFC 1952), in pieces of at most BLOCK_BYTES."""
    member = zlib.decompressobj(wbits=GZIP)
    for block in stored:
        rest = block
        while rest:
            if member.eof:
                rest = rest.lstrip(b"\0")
                if not rest:
                    break
                if not rest.startswith(GZIP_MAGIC):
                    raise BrokenStream("bytes that are no gzip follow the last gzip member (gzip(1) would ignore them)")
                member = zlib.decompressobj(wbits=GZIP)
            yield member.decompress(rest, BLOCK_BYTES)
            rest = member.unused_data if member.eof else member.unconsumed_tail
    while piece := member.decompress(b"", BLOCK_BYTES):  # what did not fit into the last piece
        yield piece
    if not member.eof:
        raise BrokenStream("ends inside a gzip member")


def _unzstd(stored: Iterator[bytes]) -> Iterator[bytes]:
    """The content of zstd frames (RFC 8878). A piece of input is short, because it may become 32,768 times as long."""
    decompressor = ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    frame, head = decompressor.decompressobj(), b""
    for block in stored:
        for start in range(0, len(block), ZSTD_INPUT_BYTES):
            rest = block[start : start + ZSTD_INPUT_BYTES]
            while rest:
                if frame.eof:
                    frame, head = decompressor.decompressobj(), b""
                head = head if len(head) >= FRAME_HEADER_BYTES else (head + rest)[:FRAME_HEADER_BYTES]
                try:
                    piece = frame.decompress(rest)
                except ZstdError as error:
                    if unsupported := _unsupported(head, error):
                        raise unsupported from error
                    raise
                yield piece
                rest = frame.unused_data
    if not frame.eof:
        raise BrokenStream("ends inside a zstd frame")


def _unsupported(head: bytes, error: ZstdError) -> UnsupportedFrame | None:
    """What a frame whose header is `head` asks for and cannot be given, if that is why it failed."""
    if "too much memory" in str(error):
        return UnsupportedFrame(
            f"needs more than {MAX_WINDOW_BYTES:,} bytes of memory to decompress, its zstd window; compress it again with "
            "`zstd --long=31` or less"
        )
    try:
        dictionary = get_frame_parameters(head).dict_id
    except ZstdError:
        return None
    if not dictionary:
        return None
    return UnsupportedFrame(
        f"was compressed with a zstd dictionary (id {dictionary}), which is not part of the file; decompress it with "
        "`zstd -d -D DICTIONARY FILE` and compress it again without one"
    )


def is_decoder_error(error: Exception) -> bool:
    """Whether pyarrow found the content wrong, rather than the store failing to deliver it.

    pyarrow says so with its own exceptions or a plain OSError; one from a disk or an object store has an errno or a
    class of its own. Memory that runs out is no damage either.
    """
    if isinstance(error, MemoryError):
        return False
    return isinstance(error, pa.ArrowException) or (type(error) is OSError and error.errno is None)
