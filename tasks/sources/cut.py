"""Cutting files into slices at fixed places, about `shard_size` bytes each.

Cuts depend on the file alone: byte offsets that are multiples of `shard_size` for plain JSONL, runs of row groups for
Parquet, whole files for compressed text and JSON arrays (neither can be entered in the middle). So a file that grows
keeps its full slices and gains new ones at its end, and no other file is touched.

A sample takes the leading part of each data set: a share of its bytes, or a number of its rows. That reads little and
is repeatable; it is a look at the data, not a statistical sample.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tokenmill.tasks.errors import InputError

from .files import Slice, SourceFile
from .opening import open_source
from .parquet import Require, open_parquet, require_any, row_groups
from .read import count_rows


def cut(file: SourceFile, shard_size: int, fields: Sequence[str], require: Require = require_any) -> list[Slice]:
    """The slices of a file, in order; none for an empty file of plain JSON.

    `require` says what a Parquet file must have of the `fields` that will be read: one at least, or what
    `parquet.require_text` asks of columns of text.

    Raises InputError when it has not, and for an empty file of a kind that never is: compressed text and Parquet.
    """
    if file.size == 0:
        return _cut_empty(file)
    if file.format == "parquet":
        return list(_cut_row_groups(file, shard_size, fields, require))
    if file.format == "json" or file.compression:
        return [Slice(file, 0, file.size, size=file.size)]
    starts = range(0, file.size, shard_size)
    stops = [*starts[1:], file.size]
    return [Slice(file, start, stop, size=stop - start) for start, stop in zip(starts, stops, strict=True)]


def _cut_empty(file: SourceFile) -> list[Slice]:
    if file.compression is None and file.format != "parquet":
        return []
    kind = file.compression or file.format
    raise InputError(
        f"{file.uri}: is empty (0 bytes), which no {kind} file is; fetch it or write it again, or take it out of the blend"
    )


def _cut_row_groups(file: SourceFile, shard_size: int, fields: Sequence[str], require: Require) -> Iterator[Slice]:
    with open_source(file) as stream:
        metadata = open_parquet(file, stream).metadata
    require(metadata, fields, file.uri)
    groups = row_groups(metadata, fields)
    start = size = 0
    for number, group in enumerate(groups, 1):
        size += group.size
        if size >= shard_size or number == len(groups):
            yield Slice(file, start, number, size=size)
            start, size = number, 0


def leading_share(slices: list[Slice], share: float) -> list[Slice]:
    """The leading `share` (0 to 1) of the bytes of a data set; at least one slice when there is one.

    Plain JSONL is cut to the byte, Parquet and whole files to the slice.
    """
    budget = math.ceil(sum(part.size for part in slices) * share)
    kept: list[Slice] = []
    for part in slices:
        if budget <= 0:
            break
        kept.append(_trimmed(part, budget))
        budget -= part.size
    return kept


def _trimmed(part: Slice, budget: int) -> Slice:
    divisible = part.file.format == "jsonl" and part.file.compression is None
    if not divisible or part.size <= budget:
        return part
    return replace(part, stop=part.start + budget, size=budget)


def leading_rows(slices: Iterable[Slice], rows: int) -> list[Slice]:
    """The slices that hold the first `rows` rows of a data set, the last one limited to what is left of them."""
    kept: list[Slice] = []
    for part in slices:
        if rows <= 0:
            break
        found = count_rows(part, rows + 1)
        kept.append(replace(part, rows=rows) if found > rows else part)
        rows -= found
    return kept
