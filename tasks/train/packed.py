"""Packs from Parquet as rows to train on, each sequence by itself.

A pack is stored as its sequences back to back, with a mask that is shifted: 1 at i says that the token after i in the same
sequence is trained on. As Megatron-Bridge does, the last token of each sequence is not read and the first not predicted, so
a pack of k sequences gives that many rows less. Nothing crosses from one sequence to the next: neither a label nor, with
`segments`, attention.

Packs are read in another order in every epoch, drawn from the whole split, because a file holds one data set only. Parquet
cannot be read at random (a row costs its whole row group), so all packs are first laid out as flat arrays in the folder of
the training, 5 bytes per token, at some 100 MB/s and once; from there a row is a few microseconds. Whoever is killed at it
loses one column at most.
"""

import hashlib
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.publish import publish, sweep
from tokenmill.tasks.storage import filesystem, join

from .batch import Batch
from .job import TrainData

COLUMNS = {"input_ids": np.int32, "loss_mask": np.int8, "seq_start_id": np.int32}
BOUNDS = {"input_ids": "tokens", "seq_start_id": "sequences"}
"""Where the part of each pack in a column begins: an array of its own, which is written after the column."""

ROWS = 500


@dataclass(frozen=True, slots=True)
class FlatPacks:
    """Packs as flat arrays: `ids` (int32) and `loss` (int8) of all tokens, `starts` (int32) of all sequences within their
    packs, and where the tokens and the sequences of each pack begin, with the end last (int64).
    """

    ids: np.ndarray
    loss: np.ndarray
    starts: np.ndarray
    token_offsets: np.ndarray
    sequence_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.token_offsets) - 1


def layout_folder(data: TrainData, split: str, cache: str) -> str:
    """The folder in `cache` for the flat arrays of a split.

    It is named by the content of the data, weights and order included: what was laid out of any other is never taken for it.
    """
    return f"{cache}/{split}-{data.made_from.partition(':')[2][:16]}"


def lay_out(files: Sequence[str], folder: str) -> None:
    """Write the packs of `files`, in this order, as flat arrays into `folder`. Raises OSError.

    Columns that are there stay: they are whole, as they are published, and of the same packs, as a folder is of no others.
    """
    sweep(folder)  # what whoever was killed at it has left
    for column in COLUMNS:
        if not Path(folder, BOUNDS.get(column, column)).exists():
            _lay_out_column(files, column, folder)


def _lay_out_column(files: Sequence[str], column: str, folder: str) -> None:
    counts = [np.zeros(1, np.int64)]
    with publish(join(folder, column)) as flat:
        for lists in _lists(files, column):
            flat.write(np.ascontiguousarray(lists.flatten().to_numpy(), COLUMNS[column]).data)
            counts.append(np.diff(lists.offsets.to_numpy()).astype(np.int64))
    if column in BOUNDS:
        with publish(join(folder, BOUNDS[column])) as flat:
            flat.write(np.cumsum(np.concatenate(counts)).data)


def _lists(files: Iterable[str], column: str) -> Iterator[pa.ListArray]:
    for uri in files:
        system, path = filesystem(uri)
        with system.open(path, "rb") as stream:
            for batch in pq.ParquetFile(stream).iter_batches(ROWS, columns=[column]):
                yield batch.column(0)


def flat_packs(folder: str) -> FlatPacks:
    """The packs that were laid out in `folder`, mapped into memory."""
    ids, loss, starts = (_mapped(Path(folder, column), kind) for column, kind in COLUMNS.items())
    return FlatPacks(
        ids, loss, starts, _mapped(Path(folder, "tokens"), np.int64), _mapped(Path(folder, "sequences"), np.int64)
    )


def _mapped(path: Path, kind: type[np.generic]) -> np.ndarray:
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, kind)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """See Rows. `length` is that of a row, which is filled up with `pad`; `seed` orders the packs of each epoch."""

    packs: FlatPacks
    length: int
    pad: int
    seed: int

    def batch(self, numbers: Sequence[int]) -> Batch:
        """See Rows. Raises RunError for a pack that does not fit into a row."""
        shape = (len(numbers), self.length)
        tokens, labels = np.full(shape, self.pad, np.int64), np.full(shape, self.pad, np.int64)
        loss, segments = np.zeros(shape, bool), np.full(shape, -1, np.int32)
        filled = 0
        for row, number in enumerate(numbers):
            pack = self._pack(number)
            ids, following, mask, sequence = self._unpacked(pack)
            if len(ids) > self.length:
                raise RunError(
                    f"pack {pack} gives {len(ids)} tokens and does not fit into a row of {self.length}; raise sequence_length"
                )
            row_of = np.s_[row, : len(ids)]
            tokens[row_of], labels[row_of], loss[row_of], segments[row_of] = ids, following, mask, sequence
            filled += len(ids)
        return Batch(tokens, labels, loss, segments, tokens.size - filled)

    def _pack(self, number: int) -> int:
        """Which pack is read as the n-th."""
        epoch, place = divmod(number, len(self.packs))
        return int(_order(len(self.packs), self.seed, epoch)[place])

    def _unpacked(self, pack: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, labels, loss mask and the number of the sequence of each, of one pack."""
        first, stop = self.packs.token_offsets[pack : pack + 2]
        ids, loss = self.packs.ids[first:stop], self.packs.loss[first:stop]
        starts = self.packs.starts[slice(*self.packs.sequence_offsets[pack : pack + 2])]
        ends = np.append(starts[1:], len(ids))
        sequence = np.repeat(np.arange(len(starts), dtype=np.int32), ends - starts)
        read = np.ones(len(ids), bool)
        read[ends - 1] = False
        places = np.flatnonzero(read)
        return ids[places], ids[places + 1], loss[places] > 0, sequence[places]


@lru_cache(maxsize=1)
def _order(packs: int, seed: int, epoch: int) -> np.ndarray:
    """The packs in the order of an epoch; 8 bytes each."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "little"))).permutation(packs)
