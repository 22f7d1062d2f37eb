"""What a file is, from its name; and for `.json`, which people use for two things, from its first byte.

A `.jsonl` or `.ndjson` is always lines and a `.parquet` always Parquet: the name is believed, and a wrong name shows up as bad
rows. A `.json` file is an array of rows when its first non-blank byte is `[`, else lines of objects. Finding that out
costs one read of at most 1 MiB per `.json` file; other names cost nothing.
"""

from collections.abc import Iterator
from dataclasses import replace

from .files import Compression, Format, SourceFile
from .opening import blocks, open_source

ENDINGS: dict[str, tuple[Format, Compression | None]] = {
    ".jsonl": ("jsonl", None),
    ".jsonl.gz": ("jsonl", "gzip"),
    ".jsonl.zst": ("jsonl", "zstd"),
    ".ndjson": ("jsonl", None),
    ".ndjson.gz": ("jsonl", "gzip"),
    ".ndjson.zst": ("jsonl", "zstd"),
    ".json": ("json", None),
    ".json.gz": ("json", "gzip"),
    ".json.zst": ("json", "zstd"),
    ".parquet": ("parquet", None),
}

METADATA = frozenset({"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"})
"""Files that describe a data set and hold no rows; the names that the `datasets` library gives them."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def describe(name: str) -> tuple[Format, Compression | None] | None:
    """Format and compression that the ending of `name` promises, case ignored; None when it is not one of ours."""
    lowered = name.lower()
    return next((kind for ending, kind in ENDINGS.items() if lowered.endswith(ending)), None)


def without_ending(name: str) -> str:
    """`name` less the ending that `describe` knows it by."""
    ending = next((ending for ending in ENDINGS if name.lower().endswith(ending)), "")
    return name[: len(name) - len(ending)]


def sniff(file: SourceFile) -> SourceFile:
    """A `.json` file with its true format: `json` for an array, `jsonl` for lines of objects or nothing at all.

    Raises RunError when the file is not compressed the way its name says.
    """
    if file.format != "json":
        return file
    if file.size == 0:
        return replace(file, format="jsonl")
    with open_source(file, cache="none") as stream:
        first = _first_byte(blocks(file, stream))
    return replace(file, format="json" if first == b"[" else "jsonl")


def _first_byte(content: Iterator[bytes]) -> bytes:
    """The first byte that is no white space, after a byte order mark; empty when there is none."""
    head = next(content, b"").removeprefix(BYTE_ORDER_MARK).lstrip()
    while not head and (block := next(content, b"")):
        head = block.lstrip()
    return head[:1]
