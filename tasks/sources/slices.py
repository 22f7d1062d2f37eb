"""Cut files into slices, and identify the content of each slice.

Cuts depend only on the file and are about `shard_size` bytes apart: at fixed byte offsets in plain JSON Lines, between row
groups in Parquet. A file of compressed text or a JSON array is one slice, because reading cannot start in the middle. So a file
that grows keeps its full slices and gains new ones at its end.

If a store provides a checksum (an etag, an LFS sha256), nothing is read. Every slice of a local file is hashed once with
xxh3_128, in parallel, and the hash is cached by path, size, modification time and change time, as in git's index: an unchanged
tree is planned only by `stat`, a touched file is hashed again but not tokenized again. A hash covers exactly the bytes of the
rows of its slice. `cp -p`, rsync and archives restore old modification times; the change time, which the kernel sets, reveals
files replaced in this way. Cuts of Parquet files, which take two or three requests to a store each, are cached in the same way.

`change_detection=mtime` trusts path, size and modification time instead of reading: cheaper, but a moved or touched file
counts as new, and a replacement with the same size and time isn't noticed.

A sample is the leading part of each dataset: a share of its bytes or a number of its rows. That is cheap and repeatable, but
not random.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import orjson
import xxhash
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.runtime import Item, Result, in_threads
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.storage import ChangeDetection, is_local

from .files import Require, Slice, SourceFile
from .formats import count_rows, format_of
from .integrity import HASHED, range_blocks, unchanged
from .opening import open_source
from .parquet import require_any

CHUNK_BYTES = 4 << 20
THREADS = min(32, (os.cpu_count() or 1) * 2)
REMOTE_THREADS = 32
"""A footer costs a request, which waits for a store and doesn't use a core."""

RACY_NANOSECONDS = 2_000_000_000
"""A file that was modified this recently before it was read may change again within one tick of the clock; its hash is
not cached."""

NOTHING = "empty"
"""The content of a slice without rows (the middle of one enormous row)."""

Cuts = list[tuple[int, int, int]]
"""The slices of a file: start, stop and size of each."""


def cut(file: SourceFile, shard_size: int, fields: Sequence[str], require: Require = require_any) -> list[Slice]:
    """Return the slices of a file, in order; none for an empty file of plain text.

    `require` checks the columns of a Parquet file. Raises its InputError, and InputError for an empty file that is
    compressed or columnar, as neither can be empty.
    """
    source_format = format_of(file)
    if file.size:
        return source_format.cut(file, shard_size, fields, require)
    if file.compression is None and not source_format.columnar:
        return []
    kind = file.compression or file.format
    raise InputError(
        f"{file.uri}: is empty (0 bytes), so it is not a {kind} file; fetch it or write it again, or remove it from the blend"
    )


def leading_share(slices: list[Slice], share: float) -> list[Slice]:
    """Return the leading `share` (0 to 1) of the bytes of a dataset; at least one slice if there is one.

    The last slice is shortened if its format can be cut anywhere, else kept whole.
    """
    # Rounded up, so that a share of a dataset with rows is never empty.
    budget = math.ceil(sum(part.size for part in slices) * share)
    kept: list[Slice] = []
    for part in slices:
        if budget <= 0:
            break
        # What cannot be cut is taken whole: a sample may be larger than its share, never smaller.
        kept.append(part if part.size <= budget else format_of(part.file).shortened(part, budget))
        budget -= part.size
    return kept


def leading_rows(slices: Iterable[Slice], rows: int) -> list[Slice]:
    """Return the slices that hold the first `rows` rows of a dataset, the last one limited to the rest of them."""
    kept: list[Slice] = []
    for part in slices:
        if rows <= 0:
            break
        found = count_rows(part, rows + 1)  # one more, which shows whether the slice has others
        kept.append(replace(part, rows=rows) if found > rows else part)
        rows -= found
    return kept


class ContentIndex:
    """A cache of the hashes in local slices and of the cuts of Parquet files.

    `entries` maps path, size, times, range and fields, as one string, to the content; `cuts` maps a file and all that decides
    where it is cut to the `(start, stop, size)` of its slices. If the index is lost or damaged, files are read again.
    """

    def __init__(self, entries: dict[str, str] | None = None, cuts: dict[str, Cuts] | None = None) -> None:
        self.entries = entries or {}
        self.cuts = cuts or {}
        self.changed = False

    @classmethod
    def load(cls, data: bytes) -> "ContentIndex":
        """Return the index in `data`; an empty one if it is damaged."""
        try:
            document = unsealed(data)
            return cls(document["entries"], document["cuts"])
        except (ValueError, KeyError):  # files are read again, which costs time and no correctness
            return cls()

    def dump(self) -> bytes:
        """Return the index as sealed JSON; equal indexes give equal bytes."""
        return sealed({"entries": self.entries, "cuts": self.cuts, "volatile": {}})

    def slices(
        self, files: Sequence[SourceFile], shard_size: int, fields: Sequence[str], require: Require = require_any
    ) -> list[Slice]:
        """Return the slices of files, in order. Raises as `cut` does."""

        def tag(file: SourceFile) -> str:
            state = file.version or f"{file.size}:{file.modified_ns}:{file.changed_ns}"
            return ":".join([file.uri, state, str(shard_size), require.__name__, *fields])

        def known(file: SourceFile) -> list[Slice] | None:
            if not format_of(file).columnar:  # its size decides, so it isn't opened
                return cut(file, shard_size, fields, require)
            cuts = self.cuts.get(tag(file))
            return None if cuts is None else [Slice(file, start, stop, size=size) for start, stop, size in cuts]

        def read(file: SourceFile) -> list[Slice]:
            read_at = time.time_ns()
            parts = cut(file, shard_size, fields, require)
            if file.version is not None or _is_settled(file, read_at):
                self.cuts[tag(file)] = [(part.start, part.stop, part.size) for part in parts]
                self.changed = True
            return parts

        threads = THREADS if all(is_local(file.uri) for file in files) else REMOTE_THREADS
        found = _completed([known(file) for file in files], files, read, threads)
        return [part for parts in found for part in parts]

    def identify(self, slices: Iterable[Slice], fields: Sequence[str], identity: ChangeDetection) -> list[Slice]:
        """Return the slices with their contents, in order; slices without rows are omitted."""

        def tag(part: Slice) -> str:
            file, is_columnar = part.file, format_of(part.file).columnar
            places = [file.uri, str(file.size), str(file.modified_ns), str(part.start), str(part.stop)]
            where = [part.where] if part.where and is_columnar else []
            keys = [orjson.dumps([part.keys, part.filters]).decode()] if part.keys and is_columnar else []
            return ":".join([*places, *_columns(file, fields), *where, *keys])

        def known(part: Slice) -> str | None:
            if part.file.version is not None:
                return f"{part.file.version}[{part.start}:{part.stop}]"  # changes with every byte, so nothing is read
            if not is_local(part.file.uri):
                return None
            # With the change time, which no program can set back, no later content of the file has the same tag.
            found = tag(part)
            return f"stat:{found}" if identity == "mtime" else self.entries.get(f"{found}@{part.file.changed_ns}")

        def read(part: Slice) -> str:
            read_at = time.time_ns()
            content = content_hash(part, fields)
            if _is_settled(part.file, read_at):
                self.entries[f"{tag(part)}@{part.file.changed_ns}"] = content
                self.changed = True
            return content

        parts = list(slices)
        contents = _completed([known(part) for part in parts], parts, read, THREADS)
        return [
            replace(part, content=content, fields=tuple(_columns(part.file, fields)))
            for part, content in zip(parts, contents, strict=True)
            if content != NOTHING
        ]


def _completed(
    known: Sequence[Result | None], items: Sequence[Item], read: Callable[[Item], Result], threads: int
) -> list[Result]:
    """The known results of items, and the missing ones, which are read in threads."""
    # An index of 100,000 known files is answered without a task for each.
    missing = [item for item, result in zip(items, known, strict=True) if result is None]
    found = in_threads(read, missing, threads)
    return [next(found) if result is None else result for result in known]


def _is_settled(file: SourceFile, read_at: int) -> bool:
    """Whether a local file is old enough for its size and times to reveal every change since `read_at`."""
    return is_local(file.uri) and read_at - (file.modified_ns or 0) >= RACY_NANOSECONDS


def _columns(file: SourceFile, fields: Sequence[str]) -> Sequence[str]:
    """The fields that are part of the identity in a file's slices."""
    return fields if format_of(file).columnar else ()


def content_hash(part: Slice, fields: Sequence[str]) -> str:
    """Return `xxh3_128:…` of exactly the bytes of the slice's rows, or NOTHING without rows.

    Raises RunError if the file changes while it is read, and InputError if a Parquet file has none of `fields`.
    """
    # `unchanged` compares size and times before and after, so that no hash is of two versions.
    with open_source(part.file) as stream, unchanged(part.file, stream):
        prefix, ranges = format_of(part.file).owned(part, stream, fields)
        hasher = xxhash.xxh3_128(prefix)
        for _, block in range_blocks(stream, ranges, CHUNK_BYTES):
            hasher.update(block)
    # Row groups that a `where` excludes are rows too: their number is in the prefix.
    has_rows = any(stop > start for start, stop in ranges) or (prefix and (part.where or part.keys))
    return f"{HASHED}{hasher.hexdigest()}" if has_rows else NOTHING
