"""A source file as a stream of bytes, decompressed when it is compressed.

Local files are opened unbuffered, because readers ask for a mebibyte at a time and a second copy would be waste;
remote ones read ahead by 8 MiB, because every request to an object store costs some tens of milliseconds. Gzip and
zstd go through pyarrow, as a stream: several members or frames in one file are read one after the other, and memory
does not grow with the file.

pyarrow reports a stream that ends too early or does not decompress, and gzip's checksum is verified. zstd carries one
only when its writer put it in, so that a flipped bit in a zstd file without checksums may pass.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from tasks.errors import RunError
from tasks.sources.files import SourceFile
from tasks.storage import filesystem, is_local

BLOCK_BYTES = 1 << 20
"""What is read and parsed at a time. Rows of 1 MiB still lie in the processor's cache when they are parsed and copied:
640 MB/s from file to Arrow on one core, against 430 with 4 MiB and 240 with 16 MiB."""

REMOTE_BLOCK_BYTES = 8 << 20


class SourceCorrupt(RunError):  # noqa: N818 - it names what is found, as a source is corrupt
    """A source file is cut short or damaged, so that its rows cannot all be read."""


def open_source(file: SourceFile, *, cache: str = "readahead") -> BinaryIO:
    """The file as it is stored, seekable; `cache` is fsspec's name of how a remote one is buffered."""
    system, path = filesystem(file.uri)
    if is_local(file.uri):
        return Path(path).open("rb", buffering=0)
    return cast("BinaryIO", system.open(path, "rb", block_size=REMOTE_BLOCK_BYTES, cache_type=cache))


def blocks(file: SourceFile, stream: BinaryIO) -> Iterator[bytes]:
    """The content of the whole file, decompressed, in blocks of at most BLOCK_BYTES.

    Raises SourceCorrupt when compressed content ends too early or cannot be decompressed.
    """
    if file.compression is None:
        while block := stream.read(BLOCK_BYTES):
            yield block
        return
    if file.size == 0:
        raise SourceCorrupt(f"{file.uri}: is empty, and so no {file.compression} file; fetch it or write it again")
    content = pa.CompressedInputStream(stream, file.compression)  # closed with `stream`, whose place errors tell
    while block := _decompressed(file, stream, content):
        yield block


def _decompressed(file: SourceFile, stream: BinaryIO, content: pa.CompressedInputStream) -> bytes:
    """The next block of content, empty at its end."""
    try:
        return content.read(BLOCK_BYTES)
    except OSError as error:
        if not is_decoder_error(error):
            raise
        raise SourceCorrupt(
            f"{file.uri}: {error}, near byte {stream.tell():,} of {file.size:,} ({file.compression}); "
            "the file is cut short or damaged: fetch it or write it again, or take it out of the blend"
        ) from error


def is_decoder_error(error: Exception) -> bool:
    """Whether pyarrow found the content wrong, rather than the store failing to deliver it.

    pyarrow says so with its own exceptions or a plain OSError; one from a disk or an object store has an errno or a
    class of its own.
    """
    return isinstance(error, pa.ArrowException) or (type(error) is OSError and error.errno is None)
