"""Holding what is read against what was planned, so that no shard's key stands for other rows than it holds.

A slice of a local file is known by a hash of its bytes, and they are hashed once more as a reader gets them. So a file
that is replaced, overwritten or written through a memory map is noticed, whatever its times say, even if the first file
is back before the reading ends. JSON is hashed as it goes by. Parquet is read column by column, out of order: its slices
are hashed once before, in blocks, and each block is compared when it is read. xxh3 hashes some 30 GB/s.

Where there is no such hash, the file is held to what its store says. A local one (`source_identity=stat`, and a sample,
which ends before its slice does) is held to size, modification time and change time of the open file, before and after;
an object to its version. On S3 every request names the version that was opened (`If-Match`); on Google Cloud Storage the
generation must be the same before and after. A file of the hub is pinned by its commit.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import SEEK_END, RawIOBase
from typing import Any, BinaryIO

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.storage import filesystem, is_local
from xxhash import xxh3_64_intdigest, xxh3_128

from .files import Slice, SourceFile

CHECKSUMS = ("md5Hash", "ETag", "etag", "generation")
"""What stores call the checksum of an object: of the content where they give one, else of the object's version."""

HASHED = "xxh3_128:"
"""How the content of a slice begins if it is a hash of its bytes."""

BLOCK_BYTES = 256 << 10
"""Parquet is compared in blocks of this size; its reader asks for some megabytes at a time."""

Ranges = Sequence[tuple[int, int]]
"""Start and stop of each of several parts of a file."""


def stored_version(entry: Mapping[str, Any]) -> str | None:
    """What a store says of an object's content in a listing entry, or None when it says nothing."""
    return next((str(entry[key]).strip('"') for key in CHECKSUMS if entry.get(key)), None)


def is_hashed(part: Slice) -> bool:
    """Whether all bytes of the slice will be read and are known by their hash."""
    return part.rows is None and part.content.startswith(HASHED)


@contextmanager
def as_planned(part: Slice, stream: BinaryIO) -> Generator[xxh3_128]:
    """A hasher for the bytes of a slice that is read from `stream`, its open file; whoever reads must feed it.

    Raises RunError at the start if the file is not the one that was planned, and at the end if it has changed or other
    bytes were read. A reader that stops early learns nothing.
    """
    hasher, hashed = xxh3_128(), is_hashed(part)
    with unchanged(part.file, stream, hashed=hashed):
        yield hasher
    if hashed:
        require_content(part, hasher)


def require_content(part: Slice, hasher: xxh3_128) -> None:
    """Raises RunError unless the bytes that a hasher was given are those of the slice."""
    if part.content != HASHED + hasher.hexdigest():
        raise _changed(part.file.uri)


@contextmanager
def unchanged(file: SourceFile, stream: BinaryIO, *, hashed: bool = False) -> Generator[None]:
    """Raises RunError at the start or the end unless the open file is the one that was planned.

    `hashed` says that its bytes are compared too: then a new owner or a new link, which change no byte, do no harm.
    """
    if file.uri.startswith("hf://"):
        yield
    elif is_local(file.uri):
        yield from _unchanged_local(file, stream, hashed=hashed)
    else:
        yield from _unchanged_object(file, stream)


def _unchanged_local(file: SourceFile, stream: BinaryIO, *, hashed: bool) -> Iterator[None]:
    """The number of the inode is not compared: some network file systems give another to every machine."""
    compared = 2 if hashed else 3
    planned, before = (file.size, file.modified_ns, file.changed_ns), _times(stream)
    if file.modified_ns is not None and before[:compared] != planned[:compared]:
        raise _changed(file.uri)
    yield
    if _times(stream)[:compared] != before[:compared]:
        raise _changed(file.uri)


def _times(stream: BinaryIO) -> tuple[int, int, int]:
    now = os.fstat(stream.fileno())
    return now.st_size, now.st_mtime_ns, now.st_ctime_ns


def _unchanged_object(file: SourceFile, stream: BinaryIO) -> Iterator[None]:
    system, path = filesystem(file.uri)
    before = _object_state(getattr(stream, "details", None) or system.info(path))
    if before[:2] != (file.size, file.version or before[1]):
        raise _changed(file.uri)
    yield
    system.invalidate_cache()
    if _object_state(system.info(path)) != before:
        raise _changed(file.uri)


def _object_state(entry: Mapping[str, Any]) -> tuple[int, str | None, Any]:
    return entry["size"], stored_version(entry), entry.get("generation")


def _changed(uri: str) -> RunError:
    return RunError(
        f"{uri}: changed while it was being prepared; run the same command again (if nobody writes to the file and this "
        "comes back, check its disk, and `touch` the file to accept what it holds now)"
    )


def hashing(blocks: Iterator[bytes], hasher: xxh3_128) -> Iterator[bytes]:
    """Blocks as they are, each hashed before it is handed on."""
    for block in blocks:
        hasher.update(block)
        yield block


@dataclass
class HashingStream:
    """A stream that is read forwards and hashed on the way."""

    stream: BinaryIO
    hasher: xxh3_128

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size` of them; none at the end."""
        data = self.stream.read(size)
        self.hasher.update(data)
        return data

    def tell(self) -> int:
        """How many bytes were read."""
        return self.stream.tell()


def range_blocks(stream: BinaryIO, ranges: Ranges, size: int) -> Iterator[tuple[int, bytes]]:
    """The bytes of some ranges of a file, in order, in blocks of at most `size`, each with its place."""
    for start, stop in ranges:
        place = stream.seek(start)
        while place < stop and (block := stream.read(min(size, stop - place))):
            yield place, block
            place += len(block)


class ComparedStream(RawIOBase):
    """A file whose `ranges` are read and hashed at once, so that a later read of them gives the same bytes or fails.

    What lies outside of the ranges is passed on as it is. The stream below stays open.
    """

    def __init__(self, stream: BinaryIO, ranges: Ranges, hasher: xxh3_128, uri: str) -> None:
        self._stream, self._uri = stream, uri
        self._hashes: dict[tuple[int, int], int] = {}
        for start, block in range_blocks(stream, ranges, BLOCK_BYTES):
            hasher.update(block)
            self._hashes[start, start + len(block)] = xxh3_64_intdigest(block)
        self._blocks = sorted(self._hashes)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._stream.tell()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move, as in any file."""
        return self._stream.seek(offset, whence)

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, at most `size` of them. Raises RunError if they are not those that were hashed."""
        place = self._stream.tell()
        stop = place + size if size >= 0 else self._stream.seek(0, SEEK_END)
        touched = self._touched(place, stop)
        begin = min([place, *(first for first, _ in touched)])
        end = max([stop, *(last for _, last in touched)])
        self._stream.seek(begin)
        data = self._stream.read(end - begin)
        for first, last in touched:
            if xxh3_64_intdigest(data[first - begin : last - begin]) != self._hashes[first, last]:
                raise _changed(self._uri)
        wanted = data[place - begin : stop - begin]
        self._stream.seek(place + len(wanted))
        return wanted

    def _touched(self, place: int, stop: int) -> list[tuple[int, int]]:
        """The blocks that have a byte in `[place, stop)`."""
        first = bisect_right(self._blocks, (place, place))
        if first and self._blocks[first - 1][1] > place:
            first -= 1
        return self._blocks[first : bisect_left(self._blocks, (stop, stop))]
