"""A source file as a stream of bytes, decompressed if needed.

Local files are opened unbuffered, because readers ask for a mebibyte at a time; remote ones read ahead by 8 MiB, because a
request to an object store costs tens of milliseconds. Gzip, zstd, bzip2, xz and LZ4 are decompressed as streams, one member or
frame after frame, in bounded memory. zstd needs memory for the writer's window: at most 8 MiB up to level 19, more with `--ultra` and
`--long`, and 2 GiB, the maximum, with `--long=31`.

A stream that is truncated or does not decompress is an error. Gzip always has a checksum; zstd has one only if its writer added
it, so a flipped bit in a zstd file without checksums may go unnoticed. Zero bytes after a gzip member are padding (from tapes
and block devices). Other bytes that are not gzip are an error: gzip(1) warns and ignores them, but here they may be rows.
"""

import re
import zlib
from bz2 import BZ2Decompressor
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from io import BufferedReader, RawIOBase
from lzma import LZMADecompressor, LZMAError
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.runtime import in_threads
from tokenmill.tasks.storage import filesystem, is_local, is_web
from xxhash import xxh3_128
from zstandard import ZstdDecompressor, ZstdError, get_frame_parameters

from .files import MAX_PLACES, PLACES, Compression, Slice, SourceFile, files_of
from .integrity import hashing

BLOCK_BYTES = 1 << 20
"""Unit of reading and parsing. 1 MiB remains in the processor's cache until it is parsed and copied: 640 MB/s from file to
Arrow on one core, against 430 with 4 MiB and 240 with 16 MiB."""

REMOTE_BLOCK_BYTES = 8 << 20
SMALL = "small"

CONNECTIONS = 8

DIGEST = 64
"""Digits of the SHA-256 that is the version of a large file of the hub; a small one has the id of a blob of git."""

MAX_WINDOW_BYTES = 1 << 31
"""The largest zstd window (ZSTD_WINDOWLOG_MAX on 64 bits, `--long=31`), and the memory that it takes."""

ZSTD_INPUT_BYTES = 2 << 10
"""4 bytes may encode a block of 128 KiB (RFC 8878, RLE_Block), so this much input gives at most 64 MiB."""

FRAME_HEADER_BYTES = 18
"""The longest zstd frame header, including its magic number."""

GZIP = 16 + zlib.MAX_WBITS
GZIP_MAGIC = b"\x1f"


UNPACK = "unpack it, and name its content"
UNENCRYPTED = "write it again without encryption"
ONE_A_LINE = "write one object a line, as `jq -c .` does"
REWRITE = "write its rows as Parquet or JSON Lines"

KINDS = (
    (rb"\x1f\x8b", "gzip", "name it {0}.gz"),
    (rb"\x28\xb5\x2f\xfd", "zstd", "name it {0}.zst"),
    (rb"\xfd7zXZ\x00", "xz", "name it {0}.xz"),
    (rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", "bzip2", "name it {0}.bz2"),
    (rb"\x04\x22\x4d\x18", "LZ4", "name it {0}.lz4"),
    (rb"PAR1[^ -~]", "Parquet", "name it {1}.parquet"),
    (rb"(?s:PARE(?:[^ -~]|.{3}\x00))", "encrypted Parquet", UNENCRYPTED),
    (rb"ARROW1\x00\x00|\xff{4}", "Arrow IPC", "name it {1}.arrow"),
    (rb"(?s:.{257})ustar", "a tar archive", UNPACK),
    (rb"PK(?:\x03\x04|\x05\x06)", "a zip archive", UNPACK),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (rb"Obj\x01", "Avro", REWRITE),
    (rb"SQLite format 3\x00", "an SQLite database", REWRITE),
    (rb"\x89HDF", "HDF5", REWRITE),
    (rb"%PDF-\d\.\d", "a PDF file", "extract its text"),
    (rb"\{\\rtf1", "an RTF file", "extract its text"),
    (rb"%!PS-Adobe-\d", "a PostScript file", "extract its text"),
    (rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff|[^\x00]\x00{3}|\x00{3}[^\x00]", "UTF-32", "convert it: iconv -f UTF-32 -t UTF-8"),
    (rb"\xff\xfe|\xfe\xff|(?:[^\x00]\x00){2}|(?:\x00[^\x00]){2}", "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    (rb"version https://git-lfs\.github\.com/spec/", "a pointer of Git LFS", "fetch its content: git lfs pull"),
)  # fmt: skip
"""Patterns of the first bytes of files, what such files hold, and the remedy; {0} is the name, {1} without its ending."""

KIND_BYTES = 512
"""Bytes that the patterns of KINDS look at, and more."""

NOT_LINES = (
    (rb"\s*\[\s*\{", "a JSON array", "end its name in .json instead"),
    (rb'\s*\{\s*\n\s*"', "an object over several lines", ONE_A_LINE),
    (rb'(?:[^\n]*?\}[ \t\r]*\{"\w[^"\\\n]*"[ \t]*:){2}', "several objects in one line", ONE_A_LINE),
    (rb"(?i)\s*<(?:!doctype|html)", "an HTML page", "fetch the file again"),
)
"""The same for text that should be JSON Lines, of which a whole file may be a single bad row."""

JSON_LINES = "jsonl"


class BrokenStreamError(ValueError):
    """Compressed content that is incomplete or followed by other bytes."""


class UnsupportedFrameError(ValueError):
    """Compressed content that needs more memory, or a dictionary, to be decompressed."""


class SourceCorrupt(RunError):  # noqa: N818 - describes the source
    """A source file is truncated or damaged, so some of its rows cannot be read."""


def open_source(file: SourceFile, *, cache: str = "readahead") -> BinaryIO:
    """Return the file as it is stored, seekable; `cache` is the fsspec cache type for a remote file.

    With the cache `small`, a remote file of a block is fetched at once, and a larger one is not cached.
    """
    if cache == SMALL:
        cache = "all" if file.size <= REMOTE_BLOCK_BYTES else "none"
    if file.uri.startswith("hf://"):
        from .hub_client import HubStream  # noqa: PLC0415 - the hub's client takes 0.15 s to import

        return cast("BinaryIO", HubStream(file, REMOTE_BLOCK_BYTES, cache))
    if is_web(file.uri):
        from .web import WebStream  # noqa: PLC0415 - same

        return cast("BinaryIO", WebStream(file, REMOTE_BLOCK_BYTES, cache))
    system, path = filesystem(file.uri)
    if is_local(file.uri):
        return Path(path).open("rb", buffering=0)  # readers ask for a mebibyte, which a buffer would only copy
    return cast("BinaryIO", system.open(path, "rb", block_size=REMOTE_BLOCK_BYTES, cache_type=cache))


def find_places(parts: Iterable[Slice]) -> None:
    """Ask the hub once for the place of each large file of slices that other processes will read (see `places`).

    Raises RunError as reading does.
    """
    files = {file.uri: file for file in files_of(parts) if file.uri.startswith("hf://") and file.uri not in PLACES}
    large = [file for file in files.values() if len(file.version or "") == DIGEST]
    if len(large) + len(PLACES) > MAX_PLACES:  # workers ask for themselves, rather than get megabytes with every shard
        return
    # Reading a byte makes the Hub say where the file is stored.
    for _ in in_threads(lambda file: open_source(file, cache="none").read(1), large, CONNECTIONS):
        pass


def blocks(file: SourceFile, stream: BinaryIO, hasher: xxh3_128 | None = None) -> Iterator[bytes]:
    """Yield the content of the whole file, decompressed, in blocks of BLOCK_BYTES; the last may be shorter.

    `hasher` gets the bytes as they are stored. Raises SourceCorrupt if compressed content is truncated or cannot be
    decompressed, and InputError if it is intact but needs a dictionary or too large a window.
    """
    stored = iter(lambda: stream.read(BLOCK_BYTES), b"")
    if hasher is not None:
        stored = hashing(stored, hasher)
    if file.compression is None:
        yield from stored
        return
    if file.size == 0:
        raise SourceCorrupt(f"{file.uri}: is empty, so it is not a {file.compression} file; fetch it or write it again")
    try:
        yield from _reblocked(DECODERS[file.compression](stored))
    except UnsupportedFrameError as error:
        raise InputError(f"{file.uri}: {error}") from error
    except (BrokenStreamError, zlib.error, ZstdError, LZMAError, pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and not is_decoder_error(error):
            raise  # of the disk or the store
        place = stream.tell()
        require_stored(file, stream, file.compression)
        raise SourceCorrupt(
            f"{file.uri}: {error}, near byte {place:,} of {file.size:,} ({file.compression}); "
            f"the file is truncated, damaged or not {file.compression} throughout: fetch it or write it again, or remove it "
            "from the blend"
        ) from error


def text_blocks(file: SourceFile, content: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content of a file in text from its beginning. Raises as `require_text_head`."""
    head = next(content, b"")
    require_text_head(file, head)
    yield head
    yield from content


def require_text_head(file: SourceFile, head: bytes) -> None:
    """Raise InputError if the first bytes of a text file belong to a different format, with the remedy."""
    found = known_kind(head, file.uri.rpartition("/")[2])
    if found is None and file.format == JSON_LINES:
        for pattern, kind, remedy in NOT_LINES:
            if re.match(pattern, head.removeprefix(BOM_UTF8)):
                raise InputError(f"{file.uri}: holds {kind}, not JSON Lines; {remedy}")
    if found is None:
        return
    kind, remedy = found
    if file.compression:
        raise InputError(f"{file.uri}: holds {kind} inside {file.compression}, not text; unpack it twice")
    raise InputError(f"{file.uri}: holds {kind}, not UTF-8 text; {remedy}")


def require_stored(file: SourceFile, stream: BinaryIO, expected: str) -> None:
    """Raise InputError if the first bytes of an unreadable file belong to a different format than expected."""
    stream.seek(0)
    name = file.uri.rpartition("/")[2]
    found = known_kind(stream.read(KIND_BYTES), name.rpartition(".")[0] if file.compression else name)
    if found and found[0].lower()[:2] != expected.lower()[:2]:  # bz2 is bzip2
        # A packed Parquet file can't be read under any name, because Parquet is read from its end.
        is_packed_parquet = expected == "Parquet" and found[1].startswith(f"name it {name}.")
        raise InputError(
            f"{file.uri}: holds {found[0]}, not {expected}; {'unpack it' if is_packed_parquet else found[1]}"
        )


def known_kind(head: bytes, name: str) -> tuple[str, str] | None:
    """Return the format of a file by its first bytes, and the remedy if it should be different; None if unknown."""
    stem = name.rpartition(".")[0]
    return next(((kind, remedy.format(name, stem)) for pattern, kind, remedy in KINDS if re.match(pattern, head)), None)


def _reblocked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks of BLOCK_BYTES, so that block boundaries do not depend on how the file was compressed."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= BLOCK_BYTES:
            data, size = b"".join(held), size % BLOCK_BYTES
            yield from (data[start : start + BLOCK_BYTES] for start in range(0, len(data) - size, BLOCK_BYTES))
            held = [data[len(data) - size :]]  # less than a block
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
                    raise BrokenStreamError(
                        "bytes that are not gzip follow the last gzip member (gzip(1) would ignore them)"
                    )
                member = zlib.decompressobj(wbits=GZIP)
            yield member.decompress(rest, BLOCK_BYTES)
            rest = member.unused_data if member.eof else member.unconsumed_tail
    while piece := member.decompress(b"", BLOCK_BYTES):  # output that did not fit into the last piece
        yield piece
    if not member.eof:
        raise BrokenStreamError("ends inside a gzip member")


def _unzstd(stored: Iterator[bytes]) -> Iterator[bytes]:
    """The content of zstd frames (RFC 8878). Input is fed in small pieces, because they may expand 32,768-fold."""
    decompressor = ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    frame, head = decompressor.decompressobj(), b""
    for block in stored:
        for start in range(0, len(block), ZSTD_INPUT_BYTES):  # a bomb of 4 kB would expand to 128 MB at once
            rest = block[start : start + ZSTD_INPUT_BYTES]
            while rest:
                if frame.eof:
                    frame, head = decompressor.decompressobj(), b""
                # The header may be cut by the end of a block, and an error needs it to name the dictionary.
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
        raise BrokenStreamError("ends inside a zstd frame")


def _unsupported(head: bytes, error: ZstdError) -> UnsupportedFrameError | None:
    """The missing memory or dictionary if `error` is due to that; `head` is the frame's header."""
    if "too much memory" in str(error):
        return UnsupportedFrameError(
            f"has a zstd window of more than {MAX_WINDOW_BYTES:,} bytes; compress it again with "
            "`zstd --long=31` or less"
        )
    try:
        dictionary = get_frame_parameters(head).dict_id
    except ZstdError:
        return None
    if not dictionary:
        return None
    return UnsupportedFrameError(
        f"was compressed with a zstd dictionary (id {dictionary}), which is not part of the file; decompress it with "
        "`zstd -d -D DICTIONARY FILE` and compress it again without one"
    )


def _unpacked(
    new: Callable[[], BZ2Decompressor | LZMADecompressor], kind: str, stored: Iterator[bytes]
) -> Iterator[bytes]:
    """The content of bzip2 or xz streams, in pieces of at most BLOCK_BYTES. Zero bytes after a stream are padding."""
    decoder = new()
    for block in stored:
        rest = block
        while rest:
            if decoder.eof:
                rest = rest.lstrip(b"\0")
                if not rest:
                    break
                decoder = new()
            yield decoder.decompress(rest, BLOCK_BYTES)
            while not (decoder.eof or decoder.needs_input):  # more output than one piece holds
                yield decoder.decompress(b"", BLOCK_BYTES)
            rest = decoder.unused_data if decoder.eof else b""
    if not decoder.eof:
        raise BrokenStreamError(f"ends inside {kind} stream")


class Stored(RawIOBase):
    """Consecutive blocks as a file, to read forwards."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - a writable buffer
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        piece = self._rest[: len(buffer)]
        buffer[: len(piece)], self._rest = piece, self._rest[len(piece) :]
        return len(piece)


def _unlz4(stored: Iterator[bytes]) -> Iterator[bytes]:
    with pa.CompressedInputStream(pa.PythonFile(BufferedReader(Stored(stored)), mode="r"), "lz4") as stream:
        yield from iter(lambda: stream.read(BLOCK_BYTES), b"")


DECODERS: Mapping[Compression, Callable[[Iterator[bytes]], Iterator[bytes]]] = {
    "gzip": _gunzipped,
    "zstd": _unzstd,
    "bz2": partial(_unpacked, BZ2Decompressor, "a bzip2"),
    "xz": partial(_unpacked, partial(LZMADecompressor, memlimit=MAX_WINDOW_BYTES), "an xz"),
    "lz4": _unlz4,
}


def is_decoder_error(error: Exception) -> bool:
    """Return whether pyarrow found the content damaged, as opposed to a failure of the store or of memory.

    pyarrow raises its own exceptions or a plain OSError; an error of a disk or an object store has an errno or its own class.
    """
    if isinstance(error, MemoryError):  # pyarrow's is a MemoryError and an ArrowException
        return False
    return isinstance(error, pa.ArrowException) or (type(error) is OSError and error.errno is None)
