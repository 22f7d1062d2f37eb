"""The document map: which source row every document of a shard came from.

A shard stores the outcome of each row in 2 bits, four rows to a byte, the first row in the lowest bits:

    0  dropped      1  train, or the whole shard      2  valid      3  test

Documents keep the order of their rows, so document 17 of `valid` came from the 18th row with outcome 2. Loading the map of a
million rows and finding a row takes 4 ms. A list of row numbers would need 4 bytes per document.
"""

from dataclasses import dataclass
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
        """The number of documents in a part."""
        return int(np.count_nonzero(self.outcomes == OUTCOMES[part]))

    def row(self, part: str, document: int) -> int:
        """The row, from 0, that a document of a part came from. Raises IndexError for a document that is not in the part."""
        return int(np.flatnonzero(self.outcomes == OUTCOMES[part])[document])


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
