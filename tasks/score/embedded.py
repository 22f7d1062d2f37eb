"""Read published embeddings: all rows of a folder with their vectors.

Vectors are held in memory in float32: 1 GB for a million of 256 dimensions, and 100 bytes per row for its names. They are read
a few thousand at a time, directly into place.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.select.scores import ROW_ID, ScoreFolder, require_joinable, score_folder
from tokenmill.tasks.storage import filesystem

from .embed import as_vectors
from .tables import Place, require_finite

NAMES = (ROW_ID, "dataset", "split")

READ_ROWS = 4096
"""Rows read at a time."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Rows and their vectors: `names` holds row_id, dataset and split, `vectors` are float32 [rows, dimensions]."""

    names: pa.Table
    vectors: np.ndarray


def embeddings_folder(place: str) -> ScoreFolder:
    """A published folder of embeddings. Raises InputError for any other folder."""
    folder = score_folder(place)
    if folder.type != "embeddings":
        raise InputError(f"{folder.place}: holds {folder.type}, not embeddings; make them with `tokenmill score embed`")
    return folder


def read_embeddings(folder: ScoreFolder) -> Embedded:
    """All rows of a folder of embeddings, in its order.

    Raises InputError for a row without a vector, RunError for a row embedded twice or a non-finite vector.
    """
    dimensions = folder.schema.field("embedding").type.list_size
    vectors = np.empty((sum(_row_count(file.place) for file in folder.files), dimensions), np.float32)
    names: list[pa.Table] = []
    row = 0
    for file in folder.files:
        for batch in _batches(file.place):
            part = as_vectors(batch["embedding"])
            vectors[row : row + len(part)] = part
            rows = np.repeat(np.arange(len(part)), dimensions)
            require_finite(part.reshape(-1), rows, "embedding", _place(file.place, batch))
            names.append(batch.drop_columns(["embedding"]))
            row += len(part)
    found = pa.concat_tables(names)
    require_joinable(found)
    return Embedded(found, vectors)


def _place(place: str, batch: pa.Table) -> Place:
    return lambda row: f"{place}: row {batch[ROW_ID][row].as_py()}"


def _row_count(place: str) -> int:
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        return pq.read_metadata(stream).num_rows


def _batches(place: str) -> Iterator[pa.Table]:
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        columns = [*NAMES, "embedding"]
        for batch in pq.ParquetFile(stream).iter_batches(READ_ROWS, columns=columns, use_threads=False):
            yield pa.table(batch)
