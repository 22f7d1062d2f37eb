"""What a trainer reads: rows of tokens as arrays, from whatever they are stored in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows, all of the same length; every array is [rows, length].

    `tokens` (int64) are read, `labels` (int64) are what follows each, and `loss_mask` (bool) says which labels are trained
    on. `segments` (int32) numbers the sequences in a row: a token sees those before it in its own; None where a row is
    one. `padding` is how many tokens only fill rows up.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    segments: np.ndarray | None
    padding: int = 0

    @property
    def positions(self) -> np.ndarray:
        """The place of each token in its sequence, int64."""
        rows, length = self.tokens.shape
        places = np.broadcast_to(np.arange(length, dtype=np.int64), (rows, length))
        if self.segments is None:
            return places
        begins = np.ones((rows, length), bool)
        begins[:, 1:] = self.segments[:, 1:] != self.segments[:, :-1]
        return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


class Rows(Protocol):
    """Rows to train on, by number. `row(n)` is the n-th that is trained on: the order is theirs, and seeded."""

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The rows of these numbers, each from 0 on, without end."""
        ...
