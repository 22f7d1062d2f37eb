"""How long rows are for the reader that they are meant for, in tokens of text.

NeMo-RL does not drop a row that is longer than the model's context: it cuts it to a few tokens and gives it no loss. So
rows that are too long have to go before. What is counted is the text that is read, without what a chat template writes
around it (some ten tokens a message), so leave room for that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from tokenmill.tasks.tokenize.encoders import Encoder

from .record import Record


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Counts the tokens of rows; `texts` are those of a row, `most` is how many tokens it may have."""

    texts: Callable[[Record], Sequence[str]]
    encoder: Encoder
    most: int

    def of(self, records: Sequence[Record]) -> np.ndarray:
        """Tokens per record, int64."""
        texts = [list(self.texts(record)) for record in records]
        owners = np.repeat(np.arange(len(texts)), [len(of_row) for of_row in texts])
        encoded = self.encoder.encode(pa.array([text for of_row in texts for text in of_row], pa.large_string()))
        return np.bincount(owners, encoded.lengths, len(texts)).astype(np.int64)
