"""What a slice contains, named by content: the part of identity that comes from the data.

Stores that know their content say so themselves (an etag, an LFS sha256), and nothing is read. For local files every
slice is hashed once with xxh3_128, in parallel, at the speed of the disk (the hash itself runs at some 30 GB/s a
core), and remembered by path, size and the times of modification and change, the way git's index does: an unchanged tree
is planned by `stat` alone, a touched file is hashed again but not tokenized again, and a file that grew keeps its full
slices, because a slice's hash covers exactly the bytes of the rows it owns. The time of change is the kernel's own: `cp -p`,
rsync and archives set the other back, and a file that they put in the place of another of the same size is seen.

Where a Parquet file may be cut, its footer says, two or three requests to a store each. Footers are read in threads, and
the cuts remembered likewise: an unchanged tree of them costs its listing as well.

`source_identity=stat` trusts path, size and modification time instead of reading: cheaper, but a moved or touched
file then counts as new, and one that was replaced between two runs by another of its size and time does not.

Whoever reads a slice later is told if it holds other bytes than these (`planned`).
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import BinaryIO

import xxhash
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.storage import SourceIdentity, is_local
from tokenmill.tasks.threads import in_threads

from .cut import cut
from .files import Slice, SourceFile
from .json_lines import row_start
from .opening import open_source
from .parquet import Require, layout, open_parquet, require_any, slice_ranges
from .planned import HASHED, Ranges, range_blocks, unchanged

CHUNK_BYTES = 4 << 20
THREADS = min(32, (os.cpu_count() or 1) * 2)

RACY_NANOSECONDS = 2_000_000_000
"""A file that was modified this recently when its reading began may have changed since within one tick of its clock;
its hash is not remembered."""

NOTHING = "empty"
"""The content of a slice that owns no rows (the middle of one enormous row)."""

Cuts = list[tuple[int, int, int]]
"""The slices of a file: start, stop and size of each."""


class ContentIndex:
    """Hashes of local slices, remembered by `(path, size, times, range, fields)`, and cuts of Parquet files.

    `entries` maps that tuple, as one string, to the content; `cuts` maps a file and all that decides where it is cut to
    the `(start, stop, size)` of its slices. `load` and `dump` turn both into JSON bytes. A lost or damaged index costs one
    read of the data and nothing else.
    """

    def __init__(self, entries: dict[str, str] | None = None, cuts: dict[str, Cuts] | None = None) -> None:
        self.entries = entries or {}
        self.cuts = cuts or {}
        self.changed = False

    @classmethod
    def load(cls, data: bytes) -> "ContentIndex":
        """The index in `data`; a damaged one is an empty one."""
        try:
            document = unsealed(data)
            return cls(document["entries"], document["cuts"])
        except (ValueError, KeyError):
            return cls()

    def dump(self) -> bytes:
        """The index as sealed JSON; equal indexes are equal bytes."""
        return sealed({"entries": self.entries, "cuts": self.cuts, "volatile": {}})

    def slices(
        self, files: Sequence[SourceFile], shard_size: int, fields: Sequence[str], require: Require = require_any
    ) -> list[Slice]:
        """The slices of files, in order, as `cut` makes them, which also says what is raised."""
        known = [self._cuts_known(file, shard_size, fields, require) for file in files]
        unknown = [file for file, parts in zip(files, known, strict=True) if parts is None]
        read = in_threads(lambda file: self._cut(file, shard_size, fields, require), unknown, THREADS)
        return [part for parts in known for part in (next(read) if parts is None else parts)]

    def _cuts_known(
        self, file: SourceFile, shard_size: int, fields: Sequence[str], require: Require
    ) -> list[Slice] | None:
        """The slices of a file as far as they can be told without opening it."""
        if file.format != "parquet":
            return cut(file, shard_size, fields, require)
        cuts = self.cuts.get(_cut_tag(file, shard_size, fields, require))
        return None if cuts is None else [Slice(file, start, stop, size=size) for start, stop, size in cuts]

    def _cut(self, file: SourceFile, shard_size: int, fields: Sequence[str], require: Require) -> list[Slice]:
        """The slices as the footer has them, remembered where a change of the file would be seen."""
        read_at = time.time_ns()
        parts = cut(file, shard_size, fields, require)
        if file.version is not None or _left_alone(file, read_at):
            tag = _cut_tag(file, shard_size, fields, require)
            self.cuts[tag] = [(part.start, part.stop, part.size) for part in parts]
            self.changed = True
        return parts

    def identify(self, slices: Iterable[Slice], fields: Sequence[str], identity: SourceIdentity) -> list[Slice]:
        """The slices with their contents filled in, in order; slices that own no rows are left out."""
        parts = list(slices)
        known = [self._known(part, fields, identity) for part in parts]
        unknown = [part for part, content in zip(parts, known, strict=True) if content is None]
        read = in_threads(lambda part: self._read(part, fields), unknown, THREADS)
        contents = (next(read) if content is None else content for content in known)
        return [
            replace(part, content=content, fields=tuple(fields) if part.file.format == "parquet" else ())
            for part, content in zip(parts, contents, strict=True)
            if content != NOTHING
        ]

    def _known(self, part: Slice, fields: Sequence[str], identity: SourceIdentity) -> str | None:
        """The content as far as it can be told without reading."""
        if part.file.version is not None:
            return f"{part.file.version}[{part.start}:{part.stop}]"
        if not is_local(part.file.uri):
            return None
        tag = _tag(part, fields)
        return f"stat:{tag}" if identity == "stat" else self.entries.get(_now(part, tag))

    def _read(self, part: Slice, fields: Sequence[str]) -> str:
        """The content as the data has it, remembered for a local file that was left alone for a while."""
        read_at = time.time_ns()
        content = content_hash(part, fields)
        if _left_alone(part.file, read_at):
            self.entries[_now(part, _tag(part, fields))] = content
            self.changed = True
        return content


def _left_alone(file: SourceFile, read_at: int) -> bool:
    """Whether a local file is old enough that size and modification time tell of every change since `read_at`."""
    return is_local(file.uri) and read_at - (file.modified_ns or 0) >= RACY_NANOSECONDS


def _cut_tag(file: SourceFile, shard_size: int, fields: Sequence[str], require: Require) -> str:
    state = file.version or f"{file.size}:{file.modified_ns}:{file.changed_ns}"
    return ":".join([file.uri, state, str(shard_size), require.__name__, *fields])


def _tag(part: Slice, fields: Sequence[str]) -> str:
    file = part.file
    places = [file.uri, str(file.size), str(file.modified_ns), str(part.start), str(part.stop)]
    return ":".join([*places, *(fields if file.format == "parquet" else [])])


def _now(part: Slice, tag: str) -> str:
    """A tag that no other content has later."""
    return f"{tag}@{part.file.changed_ns}"


def content_hash(part: Slice, fields: Sequence[str]) -> str:
    """`xxh3_128:…` of exactly the bytes that the slice owns, or NOTHING when it owns no rows.

    Of Parquet these are the bytes of `fields`, after their names and types where more is read than a column of text.

    Raises RunError when the file changes while it is read, and InputError when a Parquet file has none of `fields`.
    """
    with open_source(part.file) as stream, unchanged(part.file, stream):
        meaning, ranges = _owned(part, stream, fields)
        hasher = xxhash.xxh3_128(meaning)
        for _, block in range_blocks(stream, ranges, CHUNK_BYTES):
            hasher.update(block)
    return f"{HASHED}{hasher.hexdigest()}" if any(stop > start for start, stop in ranges) else NOTHING


def _owned(part: Slice, stream: BinaryIO, fields: Sequence[str]) -> tuple[bytes, Ranges]:
    """The places of the slice's bytes, and what has to be known to read them."""
    if part.file.format == "parquet":
        metadata = open_parquet(part.file, stream).metadata
        require_any(metadata, fields, part.file.uri)
        return layout(metadata, fields), slice_ranges(part, metadata, fields)
    if part.file.format == "json" or part.file.compression:
        return b"", [(part.start, part.stop)]
    return b"", [(row_start(stream, part.start), row_start(stream, part.stop))]
