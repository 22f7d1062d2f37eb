"""Embeddings: a text as a vector of length one, whose cosine with another says how alike the texts are.

Engines differ in the model and in how the vectors of a text's tokens become one (`pooling`); what follows is the same for
all. Vectors are checked in float32, where numbers that are none and lengths that are off still show, and stored as
float16, at 2 bytes a dimension: a million vectors of 256 take 0.5 GB. A cosine of two stored vectors is off by some
0.0002.

A model trained for it (Matryoshka) may be cut to its first dimensions; what is left is brought to length one again.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
from tokenmill.tasks.dedup.shingles import Length, Units, normalized, shingles, units_of
from tokenmill.tasks.errors import InputError

from .finite import ROW, NonFiniteError, Place, require_finite

Pooling = Literal["last", "mean"]
"""How the vectors of a text's tokens become one: that of the last token, or the average."""

MAX_TOKENS = 1024
"""Tokens of a text that are read, where nothing else is asked for."""

LENGTH_TOLERANCE = 1e-3
"""How far from 1 the length of a vector may be; float32 is off by 1e-7."""


class Embedder(Protocol):
    """An engine: a model, ready to embed."""

    @property
    def dimensions(self) -> int:
        """Numbers per vector."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """The tokens of a text that are read, those that are added among them; None where all are."""
        ...

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """A vector of length one for every text, float32 [texts, dimensions], in their order.

        Texts longer than the engine reads are cut; `token_counts` tells which. What a model gave that is no number stays
        in the vectors, for `as_stored` to find and name. Some thousand texts at a time are enough: all their tokens are in
        memory at once. Raises RunError when memory runs out.
        """
        ...

    def token_counts(self, texts: Sequence[str]) -> np.ndarray:
        """The tokens of every text before it is cut, int32 [texts]."""
        ...


class HashEmbedder:
    """Words and pairs of words, hashed into `dimensions` numbers. Needs no model and no network.

    Every word and every pair of neighbours adds 1 or -1 to one number, which its hash chooses; where a script has no blanks
    between words, characters and letters stand for them (`units`). Texts that share words are alike; what they mean is not
    seen. The same on every machine. 40 microseconds for a text of 60 words.
    """

    def __init__(self, dimensions: int = 256) -> None:
        self._dimensions = dimensions

    @property
    def dimensions(self) -> int:
        """See Embedder."""
        return self._dimensions

    @property
    def max_tokens(self) -> None:
        """See Embedder: a text is read whole."""
        return

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """See Embedder. A text without words has a 1 in its first place."""
        vectors = np.zeros(len(texts) * self._dimensions)
        units = _units(texts)
        for words in (1, 2):
            found = shingles(units, Length(words))
            cells = np.repeat(np.arange(len(texts)), found.counts) * self._dimensions
            cells += (found.hashes % np.uint64(self._dimensions)).astype(np.int64)
            signs = np.where(found.hashes >> np.uint64(63), 1.0, -1.0)
            vectors += np.bincount(cells, weights=signs, minlength=len(vectors))
        vectors = vectors.reshape(len(texts), self._dimensions)
        vectors[~vectors.any(axis=1), 0] = 1.0
        return unit_vectors(vectors.astype(np.float32), self._dimensions)

    def token_counts(self, texts: Sequence[str]) -> np.ndarray:
        """Words, and characters and letters of scripts without blanks; see Embedder."""
        return np.diff(_units(texts).bounds).astype(np.int32)


def _units(texts: Sequence[str]) -> Units:
    return units_of(normalized(pa.array(texts, pa.large_string())))


def unit_vectors(vectors: np.ndarray, dimensions: int) -> np.ndarray:
    """The first `dimensions` of each vector, brought to length one, float32. A vector of zeros becomes NaN."""
    cut = np.ascontiguousarray(vectors[:, :dimensions], np.float32)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return cut / np.linalg.norm(cut, axis=1, keepdims=True)


def wanted_dimensions(asked: int | None, available: int) -> int:
    """How many dimensions vectors get. Raises InputError for more than the model has."""
    if asked is not None and asked > available:
        raise InputError(f"dimensions={asked}: the model's vectors have {available}; ask for no more than that")
    return asked or available


def as_stored(vectors: np.ndarray, place: Place = ROW) -> pa.FixedSizeListArray:
    """Vectors of length one (float32 [rows, dimensions]) as they are stored: lists of float16.

    Raises NonFiniteError for a number that is none and for a length that is not 1; `place` says where the row is from.
    """
    dimensions = vectors.shape[1]
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))[:1]
    require_finite(vectors[broken].reshape(-1), np.repeat(broken, dimensions), "embedding", place)
    lengths = np.linalg.norm(vectors, axis=1)
    wrong = np.flatnonzero(np.abs(lengths - 1) > LENGTH_TOLERANCE)
    if wrong.size:
        raise NonFiniteError(
            f"{place(int(wrong[0]))}: the embedding has the length {lengths[wrong[0]]:.6g} and must have 1; the engine does "
            "not normalise its vectors"
        )
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.astype(np.float16).reshape(-1)), dimensions)


def as_vectors(stored: pa.ChunkedArray) -> np.ndarray:
    """Stored vectors as float32 [rows, dimensions], brought to length one again.

    Raises InputError where a row has none.
    """
    if stored.null_count:
        raise InputError(f"{stored.null_count} rows have no embedding; embed them, or leave them out")
    dimensions = stored.type.list_size
    flat = [np.empty(0, np.float16), *(chunk.flatten().to_numpy() for chunk in stored.chunks)]
    return unit_vectors(np.concatenate(flat).reshape(-1, dimensions), dimensions)
