"""The fate of every row of a shard: the part of the shard that its document is in, or the reason for dropping it.

A shard has a byte for each row, in `rows.map`:

    1  train, or the whole shard      2  valid      3  test      4 and more  the receipt's drops, in the order of their names

Documents keep the order of their rows, so document 17 of `valid` is the 18th row with a 2. Loading the fates of a million rows
and finding a row takes 1 ms. A list of row numbers would need 4 bytes per document.

Earlier versions wrote 2 bits per row, the first row in the lowest bits of a byte, with 0 for a dropped row. The size shows which it
is. The fate of a single row reads alike in both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenmill.tasks.errors import RunError
from xxhash import xxh3_128_hexdigest

from .plan import PARTS, WHOLE
from .receipt import PartCount, Receipt
from .store import Store, read_bytes

FATES = "rows.map"

CODES = {WHOLE: 1, **{part: number for number, part in enumerate(PARTS, 1)}}
"""The byte of a row that became a document of a part."""

FIRST_REASON = 1 + len(PARTS)

SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)

NOT_RECORDED = "the reason isn't recorded; prepare the data again with force=true to record it"


@dataclass(frozen=True, slots=True)
class RowFates:
    """The byte of every row of a slice (uint8 [rows]), and the reasons for drops."""

    codes: np.ndarray
    reasons: Sequence[str]

    @classmethod
    def load(cls, content: bytes, rows: int, reasons: Iterable[str]) -> "RowFates":
        """Return the fates of `rows` rows in `content`."""
        codes = np.frombuffer(content, np.uint8)
        if len(codes) != rows:  # of an earlier version
            codes = (codes[:, None] >> SHIFTS & 3).ravel()[:rows]
        return cls(codes, sorted(reasons))

    def documents(self, part: str) -> int:
        return int(np.count_nonzero(self.codes == CODES[part]))

    def place(self, row: int, parts: Iterable[str]) -> tuple[str, int] | None:
        """Return the part, one of the shard's `parts`, and the number of the document that a row became; None if it was dropped.

        Raises IndexError for a row that is not in the slice.
        """
        code = int(self.codes[row])
        if not 0 < code < FIRST_REASON:
            return None
        part = next(part for part in parts if CODES[part] == code)
        return part, int(np.count_nonzero(self.codes[:row] == code))

    def rows(self, part: str) -> np.ndarray:
        """Return the row (int64 [documents]), from 0, of each document in a part."""
        return np.flatnonzero(self.codes == CODES[part])

    def why(self) -> np.ndarray:
        """Return the reason why each row was dropped (objects [rows]); None for a kept row, and where it isn't recorded."""
        return np.array([*[None] * FIRST_REASON, *self.reasons], object)[self.codes]

    def problems(self, parts: Mapping[str, PartCount], drops: Mapping[str, int]) -> list[str]:
        """Return the counts that differ from the receipt's."""
        counts = np.bincount(self.codes, minlength=256)
        told = [(f"documents of {part}", CODES[part], count.documents) for part, count in parts.items()]
        if len(self.codes) and self.codes.max() >= FIRST_REASON:
            told += [
                (f"rows of {reason}", code, drops[reason]) for code, reason in enumerate(self.reasons, FIRST_REASON)
            ]
        return [
            f"has {counts[code]:,} {what}, but its receipt records {count:,}"
            for what, code, count in told
            if counts[code] != count
        ]


@dataclass
class FateRecorder:
    """Collects the fate of each row in a slice, as a byte; reasons have numbers in the order of their first rows."""

    codes: bytearray = field(default_factory=bytearray)
    reasons: dict[str, int] = field(default_factory=dict[str, int])

    def keep(self, part: str, rows: np.ndarray) -> None:
        """Note the rows (int64 [n]) that became documents of a part."""
        self._mark(rows, CODES[part])

    def drop(self, reason: str, rows: np.ndarray) -> None:
        """Note the rows (int64 [n]) that were dropped."""
        if len(rows):
            self._mark(rows, self.reasons.setdefault(reason, FIRST_REASON + len(self.reasons)))

    def fates(self) -> RowFates:
        """Return the fates, with reasons in the order of their names."""
        order = np.arange(256, dtype=np.uint8)
        order[[self.reasons[reason] for reason in sorted(self.reasons)]] = FIRST_REASON + np.arange(len(self.reasons))
        return RowFates(order[np.frombuffer(self.codes, np.uint8)], sorted(self.reasons))

    def _mark(self, rows: np.ndarray, code: int) -> None:
        np.frombuffer(self.codes, np.uint8)[rows] = code  # a view, so that NumPy writes into the bytearray


def read_fates(store: Store, receipt: Receipt) -> RowFates | None:
    """Return the fates of a shard's rows; None if the shard was built before shards of its kind had them.

    Raises RunError if the file is missing or has changed.
    """
    recorded = next((output.xxh3_128 for output in receipt.outputs if output.path == FATES), None)
    if recorded is None:
        return None
    place = store.path(receipt.key, FATES)
    content = read_bytes(place)
    if content is None or xxh3_128_hexdigest(content) != recorded:
        raise RunError(f"{place}: missing or damaged; run tokenmill verify on the folder, then prepare it again")
    return RowFates.load(content, receipt.rows_in, receipt.drops)


def fate_problems(store: Store, receipt: Receipt) -> list[str]:
    """Return the counts of a shard's fates that differ from its receipt. Raises RunError as `read_fates` does."""
    fates, place = read_fates(store, receipt), store.path(receipt.key, FATES)
    return [f"{place}: {problem}" for problem in (fates.problems(receipt.parts, receipt.drops) if fates else [])]
