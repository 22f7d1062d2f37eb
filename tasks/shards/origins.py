"""Lead from a row of a shard to its file and line.

A shard numbers its rows from 0. They are from one slice of a file, or in a bundle from several files, one by one. A
line of a file also counts the rows of the slices before, whose number their receipts hold, so no source is read again.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .manifest import entry_files
from .plan import Finished
from .receipt import ROWS_BY_FILE


@dataclass(frozen=True, slots=True)
class Origin:
    """Consecutive rows of a shard: the `rows` rows of the slice `[start, stop)` of a file.

    `before` counts the rows of the file before the slice. It is None after a missing slice: slices are missing from a partial
    output, and after a row longer than a slice.
    """

    file: str
    start: int
    stop: int
    rows: int
    before: int | None


Slices = Iterable[tuple[str, int, int, int]]
"""Slices and their rows: file, start, stop, rows."""


def origins_of(finished: Iterable[Finished]) -> list[list[Origin]]:
    """The origins of the rows of each shard; the shards are in plan order."""
    return _origins((item.dataset, _slices(item)) for item in finished)


def _slices(item: Finished) -> Slices:
    parts = item.shard.part.members or [item.shard.part]
    for part, rows in zip(parts, item.receipt.rows_by_file, strict=True):
        yield part.file.uri, part.start, part.stop, rows


def origins_in(entries: Iterable[Mapping[str, Any]]) -> list[list[Origin]]:
    """The origins of the rows of each shard of a manifest."""
    return _origins(((entry["split"], entry["dataset"]), _slices_in(entry)) for entry in entries)


def _slices_in(entry: Mapping[str, Any]) -> Slices:
    counts = entry.get("facts", {}).get(ROWS_BY_FILE, [entry["rows"]])
    for file, rows in zip(entry_files(entry), counts, strict=True):
        yield file["file"], file["start"], file["stop"], rows


def _origins(shards: Iterable[tuple[Hashable, Slices]]) -> list[list[Origin]]:
    ends: dict[Hashable, tuple[int, int | None]] = {}

    def located(dataset: Hashable, slices: Slices) -> Iterator[Origin]:
        for file, start, stop, rows in slices:
            end, count = ends.get((dataset, file), (0, 0))
            before = count if end == start else None
            ends[dataset, file] = stop, None if before is None else before + rows
            yield Origin(file, start, stop, rows, before)

    return [list(located(dataset, slices)) for dataset, slices in shards]


def origin_of(origins: Sequence[Origin], row: int) -> tuple[Origin, int]:
    """The origin of a row of a shard, and the number of the row in its slice."""
    starts = list(accumulate((origin.rows for origin in origins[:-1]), initial=0))
    number = bisect_right(starts, row) - 1
    return origins[number], row - starts[number]
