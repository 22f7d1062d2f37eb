"""Rows without the labels of documents that a training leaves out. Nothing else of the rows changes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from tokenmill.tasks.errors import InputError

from .rows import Batch, DocumentRows, PackedRows
from .samples import Pieces, parts_of, pieces_of
from .skips import Skipped, SkippedDocument


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """Rows without the labels of documents that are left out."""

    rows: DocumentRows | PackedRows
    skipped: frozenset[tuple[int, int, int | None]]

    @classmethod
    def of(cls, rows: DocumentRows | PackedRows, skipped: Iterable[Skipped]) -> "TrainedRows":
        """The rows without these documents. Raises InputError for one that the rows do not hold."""
        documents = [each for each in skipped if isinstance(each, SkippedDocument)]
        packed, counts = isinstance(rows, PackedRows), _documents_of(rows)
        for each in documents:
            known = each.source < len(counts) and each.document < counts[each.source]
            if not known or packed == (each.sequence is None):
                raise InputError(
                    f"skip_list: {each.model_dump_json()} names no document of the training data; list it again with tokenmill batch"
                )
        return cls(rows, frozenset((each.source, each.document, each.sequence) for each in documents))

    def batch(self, numbers: Sequence[int]) -> Batch:
        """See Rows."""
        batch = self.rows.batch(numbers)
        mask = batch.loss_mask.copy()
        if isinstance(self.rows, PackedRows):
            for row, number in enumerate(numbers):
                pack = self.rows.pack(number)
                mine = (sequence for _, document, sequence in self.skipped if document == pack)
                sequences = [sequence for sequence in mine if sequence is not None]
                mask[row] &= ~np.isin(cast("np.ndarray", batch.segments)[row], sequences)
        else:
            samples = self.rows.samples
            self._mask(mask, pieces_of(samples, [number % len(samples) for number in numbers]))
        return replace(batch, loss_mask=mask)

    def _mask(self, mask: np.ndarray, pieces: Pieces) -> None:
        """Clear the labels in documents that are left out; label i is token i + 1 of the sample."""
        for row in range(len(mask)):
            place = -1
            for piece in pieces.of(row):
                if (piece.source, piece.document, None) in self.skipped:
                    mask[row, max(0, place) : place + piece.length] = False
                place += piece.length


def _documents_of(rows: DocumentRows | PackedRows) -> list[int]:
    """The number of documents of each prefix, or that of all packs."""
    if isinstance(rows, PackedRows):
        return [len(rows.packs)]
    return [len(part.dataset.sequence_lengths) for part in parts_of(rows.samples)]
