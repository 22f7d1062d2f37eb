"""Replace columns of a Parquet file, and copy all others without decoding them.

The pages of a column do not depend on other columns; only the footer says where they are. So the new file is the pages of both
files in the order of the columns, and a footer with their places: the bytes that Arrow would write. Conversations are nearly
all text, which takes long to decode and compress, so copying them takes a fifth of the time.
"""

from collections.abc import Iterator
from typing import Any

from .thrift import LONG, Struct, read_struct, written

MAGIC, SIZE = b"PAR1", 4

ROW_GROUPS = 4
COLUMNS, GROUP_BYTES, GROUP_PLACE, GROUP_SIZE = 1, 2, 5, 6
METADATA, PATH, BYTES, PAGE_SIZE, PAGES, DICTIONARY = 3, 3, 6, 7, 9, 11
"""Numbers of fields in `parquet.thrift`: of a file, of a row group, of a column and of its metadata."""


def with_columns(file: bytes, columns: bytes) -> Iterator[bytes]:
    """The parts of a Parquet file in which the columns of another one, with the same rows in each group, replace its own.

    Both files are written by Arrow, without indexes and filters.
    """
    footer = _footer(file)
    yield MAGIC
    place = len(MAGIC)
    for group, fresh in zip(_listed(footer, ROW_GROUPS), _listed(_footer(columns), ROW_GROUPS), strict=True):
        replaced = {_path(chunk): chunk for chunk in _listed(fresh, COLUMNS)}
        chunks = _listed(group, COLUMNS)
        group[GROUP_PLACE] = LONG, place
        for number, old in enumerate(chunks):
            chunks[number] = chunk = replaced.get(_path(old), old)
            pages = _pages(file if chunk is old else columns, chunk)
            _move(chunk, place)
            place += len(pages)
            yield pages
        found = [_metadata(chunk) for chunk in chunks]
        group[GROUP_BYTES] = LONG, sum(each[BYTES][1] for each in found)
        group[GROUP_SIZE] = LONG, sum(each[PAGE_SIZE][1] for each in found)
    end = written(footer)
    yield end + len(end).to_bytes(SIZE, "little") + MAGIC


def _footer(file: bytes) -> Struct:
    end = len(file) - SIZE - len(MAGIC)
    size = int.from_bytes(file[end : end + SIZE], "little")
    return read_struct(file[end - size : end])


def _listed(struct: Struct, number: int) -> list[Struct]:
    """The list of structs in a field."""
    _, (_, items) = struct[number]
    return items


def _metadata(chunk: Struct) -> Struct:
    return chunk[METADATA][1]


def _path(chunk: Struct) -> tuple[Any, ...]:
    _, (_, names) = _metadata(chunk)[PATH]
    return tuple(names)


def _begin(metadata: Struct) -> int:
    """The place of the first page of a column."""
    return metadata.get(DICTIONARY, metadata[PAGES])[1]


def _pages(file: bytes, chunk: Struct) -> bytes:
    begin = _begin(_metadata(chunk))
    return file[begin : begin + _metadata(chunk)[PAGE_SIZE][1]]


def _move(chunk: Struct, place: int) -> None:
    """Let a column begin at another place."""
    metadata = _metadata(chunk)
    moved = place - _begin(metadata)
    for number in metadata.keys() & {PAGES, DICTIONARY}:
        metadata[number] = LONG, metadata[number][1] + moved
