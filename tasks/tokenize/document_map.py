"""The document map: which source row every document of a shard came from, and what became of every row.

A shard stores the outcome of each row in 2 bits, four rows to a byte, the first row in the lowest bits:

    0  dropped      1  train, or the whole shard      2  valid      3  test

Documents keep the order of their rows. So document 17 of `valid` came from the 18th row with outcome 2, and a row's document is
the number of earlier rows with its outcome. Both are counted with NumPy: 4 ms for a million rows. A map of row numbers would
need 4 bytes per document.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from tokenmill.tasks.shards.holdout import PARTS
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store

from .documents import WHOLE

FILE = "rows.map"

DROPPED = 0
OUTCOMES = {WHOLE: 1, **{part: number for number, part in enumerate(PARTS, 1)}}
"""The outcome of a row that became a document of a part."""

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
        """The map of `rows` rows in `content`. Raises ValueError for a map of another number of rows."""
        outcomes = (np.frombuffer(content, np.uint8)[:, None] >> SHIFTS & 3).ravel()
        if len(content) != -(-rows // 4) or outcomes[rows:].any():
            raise ValueError(f"the map of {len(content):,} bytes is not one of {rows:,} rows")
        return cls(outcomes[:rows])

    def documents(self, part: str) -> int:
        """The number of documents in a part."""
        return int(np.count_nonzero(self.outcomes == OUTCOMES[part]))

    def row(self, part: str, document: int) -> int:
        """The row, from 0, that a document of a part came from. Raises IndexError for a document that is not in the part."""
        return int(np.flatnonzero(self.outcomes == OUTCOMES[part])[document])

    def document(self, row: int) -> int | None:
        """The number of a row's document in its part, None for a dropped row."""
        outcome = self.outcomes[row]
        return None if outcome == DROPPED else int(np.count_nonzero(self.outcomes[:row] == outcome))


def read_map(store: Store, receipt: Receipt) -> DocumentMap | None:
    """The document map of a shard; None if the shard was built before shards had one.

    Raises RunError, and withdraws the receipt, if the file has changed.
    """
    if not any(output.path == FILE for output in receipt.outputs):
        return None
    return DocumentMap.load(store.read(receipt, FILE), receipt.rows_in)
