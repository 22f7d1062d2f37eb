"""Embeddings: vectors of length one, whose cosine measures the similarity of two texts.

Vectors are checked in float32, where NaN, infinities and wrong lengths still show, and stored as float16, 2 bytes per
dimension: a million vectors of 256 take 0.5 GB. The cosine of two stored vectors is off by about 0.0002.

Vectors of a Matryoshka model may be cut to their first dimensions, which are normalized again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.dedup.shingles import RunLength, Units, normalized, shingles, units_of
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.select.scores import ROW_ID, ScoreFolder, require_joinable, score_folder
from tokenmill.tasks.storage import open_binary

from .tables import ROW, NonFiniteError, Place, require_finite

HASH_DIMENSIONS = 256

LENGTH_TOLERANCE = 1e-3  # allowed deviation of a vector's length from 1; float32 is off by 1e-7


class Embedder(Protocol):
    """A loaded embedding model."""

    @property
    def dimensions(self) -> int:
        """Dimensions of the vectors."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """The maximum number of tokens read per text, special tokens included; None if unlimited."""
        ...

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """One vector of length one per text, float32 [texts, dimensions], in order.

        Truncates texts that are too long; `token_counts` shows which. NaN and infinities remain, for `as_stored` to report. All
        tokens of the texts are in memory at once, so pass some thousand texts at a time. Raises RunError if memory runs out or
        a server fails.
        """
        ...

    def token_counts(self, texts: Sequence[str]) -> np.ndarray:
        """Return the tokens of every text before truncation, int32 [texts]."""
        ...


class HashEmbedder:
    """Hashes words and pairs of words into `dimensions` numbers, without a model or a network.

    Every word and every pair of neighbors adds 1 or -1 to the number that its hash selects; in scripts without blanks,
    characters and letters count as words (`units`). Texts that share words are similar, even with different meanings. Results are the
    same on every machine. A text of 60 words takes 40 microseconds.
    """

    max_tokens = None

    def __init__(self, dimensions: int = HASH_DIMENSIONS) -> None:
        self.dimensions = dimensions

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """See Embedder. The vector of a text without words is 1 in its first dimension."""
        vectors = np.zeros(len(texts) * self.dimensions)
        units = _units(texts)
        for words in (1, 2):
            found = shingles(units, RunLength(words))
            cells = np.repeat(np.arange(len(texts)), found.counts) * self.dimensions
            cells += (found.hashes % np.uint64(self.dimensions)).astype(np.int64)
            signs = np.where(found.hashes >> np.uint64(63), 1.0, -1.0)
            vectors += np.bincount(cells, weights=signs, minlength=len(vectors))
        vectors = vectors.reshape(len(texts), self.dimensions)
        vectors[~vectors.any(axis=1), 0] = 1.0
        return unit_vectors(vectors.astype(np.float32), self.dimensions)

    def token_counts(self, texts: Sequence[str]) -> np.ndarray:
        """Words, and characters and letters of scripts without blanks; see Embedder."""
        return np.diff(_units(texts).bounds).astype(np.int32)


def _units(texts: Sequence[str]) -> Units:
    return units_of(normalized(pa.array(texts, pa.large_string())))


def unit_vectors(vectors: np.ndarray, dimensions: int) -> np.ndarray:
    """Return the first `dimensions` of each vector, normalized to length one, float32. A vector of zeros becomes NaN."""
    cut = np.ascontiguousarray(vectors[:, :dimensions], np.float32)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return cut / np.linalg.norm(cut, axis=1, keepdims=True)


def wanted_dimensions(asked: int | None, available: int) -> int:
    """Return the dimensions of the vectors, by default all of the model's. Raises InputError for more than it has."""
    if asked is not None and asked > available:
        raise InputError(f"dimensions={asked}: the model's vectors have {available}; set at most that many")
    return asked or available


def as_stored(vectors: np.ndarray, place: Place = ROW) -> pa.FixedSizeListArray:
    """Vectors of length one (float32 [rows, dimensions]) as stored: lists of float16.

    Raises NonFiniteError, naming the row with `place`, for NaN, infinities, and a length that is not 1.
    """
    dimensions = vectors.shape[1]
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))[:1]
    require_finite(vectors[broken].reshape(-1), np.repeat(broken, dimensions), "embedding", place)
    lengths = np.linalg.norm(vectors, axis=1)
    wrong = np.flatnonzero(np.abs(lengths - 1) > LENGTH_TOLERANCE)
    if wrong.size:
        raise NonFiniteError(
            f"{place(int(wrong[0]))}: the embedding has length {lengths[wrong[0]]:.6g} instead of 1; the engine does not "
            "normalize its vectors"
        )
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.astype(np.float16).reshape(-1)), dimensions)


def as_vectors(stored: pa.ChunkedArray) -> np.ndarray:
    """Stored vectors as float32 [rows, dimensions], normalized again. Raises InputError for a row without a vector."""
    if stored.null_count:
        raise InputError(f"{stored.null_count} rows don't have an embedding; embed them, or exclude them")
    dimensions = stored.type.list_size
    flat = [np.empty(0, np.float16), *(chunk.flatten().to_numpy() for chunk in stored.chunks)]
    return unit_vectors(np.concatenate(flat).reshape(-1, dimensions), dimensions)


NAMES = (ROW_ID, "dataset", "split")

READ_ROWS = 4096  # rows read at a time


@dataclass(frozen=True, slots=True)
class Embedded:
    """Rows and their vectors: `names` holds row_id, dataset and split, `vectors` are float32 [rows, dimensions]."""

    names: pa.Table
    vectors: np.ndarray


def embeddings_folder(place: str) -> ScoreFolder:
    """Return a published embedding folder. Raises InputError for other folders."""
    folder = score_folder(place)
    if folder.type != "embeddings":
        raise InputError(f"{folder.place}: holds {folder.type}, not embeddings; make them with `tokenmill score embed`")
    return folder


def read_embeddings(folder: ScoreFolder) -> Embedded:
    """Return all rows in an embedding folder, in its order.

    Raises InputError for a row without a vector, RunError for a row embedded twice or a non-finite vector.
    """
    dimensions = folder.schema.field("embedding").type.list_size
    sizes: list[int] = []
    for file in folder.files:
        with open_binary(file.place) as stream:
            sizes.append(pq.read_metadata(stream).num_rows)
    # Allocated once: joining parts would need the memory of all vectors twice.
    vectors = np.empty((sum(sizes), dimensions), np.float32)
    names: list[pa.Table] = []
    row = 0
    for file in folder.files:
        with open_binary(file.place) as stream:
            columns = [*NAMES, "embedding"]
            for read in pq.ParquetFile(stream).iter_batches(READ_ROWS, columns=columns, use_threads=False):
                batch = pa.table(read)
                part = as_vectors(batch["embedding"])
                vectors[row : row + len(part)] = part
                rows = np.repeat(np.arange(len(part)), dimensions)
                require_finite(part.reshape(-1), rows, "embedding", partial(_place, file.place, batch))
                names.append(batch.drop_columns(["embedding"]))
                row += len(part)
    found = pa.concat_tables(names)
    require_joinable(found)
    return Embedded(found, vectors)


def _place(place: str, batch: pa.Table, row: int) -> str:
    return f"{place}: row {batch[ROW_ID][row].as_py()}"
