"""The document map: the source row of every document in a shard.

A shard stores the outcome of each row in 2 bits, four rows to a byte, the first row in the lowest bits:

    0  dropped      1  train, or the whole shard      2  valid      3  test

Documents keep the order of their rows, so document 17 of `valid` is the 18th row with outcome 2. Loading the map of a
million rows and finding a row takes 4 ms. A list of row numbers would need 4 bytes per document.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.holdout import PARTS
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store, read_bytes
from xxhash import xxh3_128_hexdigest

from .documents import WHOLE

FILE = "rows.map"

OUTCOMES = {WHOLE: 1, **{part: number for number, part in enumerate(PARTS, 1)}}
"""The outcome of a row that became a document of a part; 0 is a dropped row."""

SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class DocumentMap:
    """The outcome of every row of a slice (uint8 [rows], 0 to 3)."""

    outcomes: np.ndarray

    def dump(self) -> bytes:
        """The map in 2 bits per row."""
        padded = np.zeros(-(-len(self.outcomes) // 4) * 4, np.uint8)
        padded[: len(self.outcomes)] = self.outcomes
        return np.bitwise_or.reduce(padded.reshape(-1, 4) << SHIFTS, axis=1).tobytes()

    @classmethod
    def load(cls, content: bytes, rows: int) -> Self:
        """The map of `rows` rows in `content`."""
        return cls((np.frombuffer(content, np.uint8)[:, None] >> SHIFTS & 3).ravel()[:rows])

    def documents(self, part: str) -> int:
        return int(np.count_nonzero(self.outcomes == OUTCOMES[part]))

    def place(self, row: int, parts: Iterable[str]) -> tuple[str, int] | None:
        """The part, one of the shard's `parts`, and the number of the document that a row became; None if it was dropped.

        Raises IndexError for a row that is not in the slice.
        """
        outcome = int(self.outcomes[row])
        if not outcome:
            return None
        part = next(part for part in parts if OUTCOMES[part] == outcome)
        return part, int(np.count_nonzero(self.outcomes[:row] == outcome))

    def rows(self, part: str) -> np.ndarray:
        """Return the row (int64 [documents]), from 0, of each document in a part."""
        return np.flatnonzero(self.outcomes == OUTCOMES[part])


@dataclass
class RowOutcomes:
    """Collects the outcomes of the rows of a slice, one byte per row; a row is dropped until it is kept."""

    outcomes: bytearray = field(default_factory=bytearray)

    def keep(self, part: str, rows: np.ndarray) -> None:
        """Note the rows (int64 [n]) that became documents of a part."""
        if rows.size:
            self._extend(int(rows.max()) + 1)
            np.frombuffer(self.outcomes, np.uint8)[rows] = OUTCOMES[
                part
            ]  # a view, so that NumPy writes into the bytearray

    def dump(self, rows: int) -> bytes:
        """The map of a slice of `rows` rows."""
        self._extend(rows)
        return DocumentMap(np.frombuffer(self.outcomes, np.uint8)).dump()

    def _extend(self, rows: int) -> None:
        self.outcomes += bytes(max(0, rows - len(self.outcomes)))


def read_map(store: Store, receipt: Receipt) -> DocumentMap | None:
    """The document map of a shard; None if the shard was built before shards had one.

    Raises RunError if the file is missing or has changed.
    """
    recorded = next((output.xxh3_128 for output in receipt.outputs if output.path == FILE), None)
    if recorded is None:
        return None
    place = store.path(receipt.key, FILE)
    content = read_bytes(place)
    if content is None or xxh3_128_hexdigest(content) != recorded:
        raise RunError(f"{place}: missing or damaged; run tokenmill verify on the folder, then prepare it again")
    return DocumentMap.load(content, receipt.rows_in)


def map_problems(store: Store, receipt: Receipt) -> list[str]:
    """Parts whose documents a shard's map and its receipt count differently. Raises RunError as `read_map` does."""
    rows = read_map(store, receipt)
    return [
        f"{store.path(receipt.key, FILE)}: has {rows.documents(part):,} documents of {part}, but its receipt records "
        f"{count.documents:,}"
        for part, count in receipt.parts.items()
        if rows and rows.documents(part) != count.documents
    ]
