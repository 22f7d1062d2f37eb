"""Verify that a reader gets the planned bytes, so that a shard's key never covers other rows.

A slice of a local file is identified by a hash of its bytes, and a reader hashes them again. So a file that was replaced,
overwritten or changed through a memory map is detected regardless of its times, even if the original is restored before the
reader ends. Row formats are hashed as they are read. Parquet is read out of order: its slices are hashed in blocks first, and
each block is compared when it is read. xxh3 hashes about 30 GB/s.

Without such a hash, the store's metadata must not change. For a local file (`change_detection=mtime`, or a sample, which
ends before its slice) that is size, modification time and change time of the open file, before and after; for an object,
its version. On S3 every request names the version that was opened (`If-Match`); on Google Cloud Storage the generation
must be the same before and after. Hub files are pinned by their commit.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from io import SEEK_END, RawIOBase
from typing import Any, BinaryIO

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.storage import filesystem, is_local, is_web
from xxhash import xxh3_64_intdigest, xxh3_128

from .files import Ranges, Slice, SourceFile

CHECKSUMS = ("md5Hash", "ETag", "etag", "generation")
"""Keys under which stores list the checksum of an object's content or, failing that, its version."""

HASHED = "xxh3_128:"
"""Prefix of the content in a slice that is a hash of its bytes."""

BLOCK_BYTES = 256 << 10
"""Unit of comparison for Parquet, whose reader asks for some megabytes at a time."""


def stored_version(entry: Mapping[str, Any]) -> str | None:
    """Return the checksum or version of an object in a listing entry, None if the store gives none."""
    return next((str(entry[key]).strip('"') for key in CHECKSUMS if entry.get(key)), None)


def is_hashed(part: Slice) -> bool:
    """Return whether the slice is identified by a hash of its bytes and is read to its end."""
    return part.rows is None and part.content.startswith(HASHED)


@contextmanager
def verified(part: Slice, stream: BinaryIO) -> Generator[xxh3_128]:
    """A hasher to update with the bytes of a slice as they are read from `stream`, its open file.

    Raises RunError at the start if the file is not the planned one, and at the end if it has changed or other bytes were read.
    A reader that stops early skips the check at the end. Raises ValueError for a bundle, which doesn't have its own file.
    """
    if part.members:
        raise ValueError(f"{part.file.uri}: begins a bundle; read each of its members")
    hasher, hashed = xxh3_128(), is_hashed(part)
    with unchanged(part.file, stream, hashed=hashed):
        yield hasher
    if hashed:  # after the last byte was read; until then, rows are only in a shard without a receipt
        require_content(part, hasher)


def require_content(part: Slice, hasher: xxh3_128) -> None:
    """Raise RunError unless the hashed bytes equal the slice's."""
    if part.content != HASHED + hasher.hexdigest():
        raise changed(part.file.uri)


@contextmanager
def unchanged(file: SourceFile, stream: BinaryIO, *, hashed: bool = False) -> Generator[None]:
    """Raises RunError at the start or the end unless the open file is the planned one.

    With `hashed`, its bytes are compared too, and the change time is ignored: a new owner or link doesn't change bytes.
    """
    if file.uri.startswith("hf://") or is_web(file.uri):  # their streams read the planned version only
        yield
        return
    system, path = filesystem(file.uri)
    if is_local(file.uri):
        # Inode numbers are not compared: some network file systems number files differently on every machine.
        compared = 2 if hashed else 3
        planned, before = (file.size, file.modified_ns, file.changed_ns)[:compared], _times(stream)[:compared]
        is_planned = file.modified_ns is None or before == planned
    else:
        before = _object_state(getattr(stream, "details", None) or system.info(path))
        # A store without checksums gives no version, so that only the size can be compared.
        is_planned = before[:2] == (file.size, file.version or before[1])
    if not is_planned:
        raise changed(file.uri)
    yield
    system.invalidate_cache()  # which an object store's listing comes from
    after = _times(stream)[: len(before)] if is_local(file.uri) else _object_state(system.info(path))
    if after != before:
        raise changed(file.uri)


def _times(stream: BinaryIO) -> tuple[int, int, int]:
    now = os.fstat(stream.fileno())
    return now.st_size, now.st_mtime_ns, now.st_ctime_ns


def _object_state(entry: Mapping[str, Any]) -> tuple[int, str | None, Any]:
    return entry["size"], stored_version(entry), entry.get("generation")


def changed(uri: str) -> RunError:
    """Return the error for a file that is not the planned one."""
    return RunError(
        f"{uri}: changed while it was being prepared; run the same command again (if nothing writes to "
        "the file and this happens again, check its disk, and `touch` the file to accept its present content)"
    )


def hashing(blocks: Iterator[bytes], hasher: xxh3_128) -> Iterator[bytes]:
    """Yield the same blocks, each hashed before it is passed on."""
    for block in blocks:
        hasher.update(block)
        yield block


def range_blocks(stream: BinaryIO, ranges: Ranges, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of ranges in a file, in order, in blocks of at most `size`, each with its offset."""
    for start, stop in ranges:
        place = stream.seek(start)
        while place < stop and (block := stream.read(min(size, stop - place))):
            yield place, block
            place += len(block)


class VerifiedStream(RawIOBase):
    """A file whose `ranges` are hashed when it is opened, so that a later read of them returns the same bytes or fails.

    Bytes outside the ranges are not checked. Closing it leaves the underlying stream open.
    """

    def __init__(self, stream: BinaryIO, ranges: Ranges, hasher: xxh3_128, uri: str) -> None:
        self._stream, self._uri = stream, uri
        self._hashes: dict[tuple[int, int], int] = {}
        # The whole hash shows that the file is the planned one, and the hash of each block that it remains so.
        for start, block in range_blocks(stream, ranges, BLOCK_BYTES):
            hasher.update(block)
            self._hashes[start, start + len(block)] = xxh3_64_intdigest(block)
        self._blocks = sorted(self._hashes)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._stream.seek(offset, whence)

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, at most `size` of them. Raises RunError if they are not those that were hashed."""
        place = self._stream.tell()
        stop = place + size if size >= 0 else self._stream.seek(0, SEEK_END)
        # The blocks that have a byte in `[place, stop)`: the one before may reach into it.
        first_touched = bisect_right(self._blocks, (place, place))
        if first_touched and self._blocks[first_touched - 1][1] > place:
            first_touched -= 1
        touched = self._blocks[first_touched : bisect_left(self._blocks, (stop, stop))]
        # Whole blocks are read, because a hash of a part of one doesn't exist.
        begin = min([place, *(first for first, _ in touched)])
        end = max([stop, *(last for _, last in touched)])
        self._stream.seek(begin)
        data = self._stream.read(end - begin)
        for first, last in touched:
            if xxh3_64_intdigest(data[first - begin : last - begin]) != self._hashes[first, last]:
                raise changed(self._uri)
        wanted = data[place - begin : stop - begin]
        self._stream.seek(place + len(wanted))
        return wanted
