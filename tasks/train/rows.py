"""Rows to train on, read from documents (.bin/.idx) or from packs (Parquet).

Documents are read by megatron-core's own GPTDataset: it lays the documents of a source end to end, cuts and shuffles rows,
and mixes sources by the weights in blend.json. Its index arrays are kept in the training run's folder; .bin files on an object
store are read by ranges.

A pack is its sequences back to back. The last token of each sequence is not an input and the first not a label, so a row is shorter
than its pack by the number of sequences. Neither labels nor, with `segments`, attention cross between sequences.

Packs are shuffled over the whole split in every epoch. Parquet cannot be read at random, so all packs are first laid out
as flat arrays in the training run's folder: once, 5 bytes per token, at about 100 MB/s. After that a row takes microseconds.
"""

import hashlib
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from tokenmill.tasks.dataset.stored import IDS, MASK, STARTS, pack_batches
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.publish import publish, sweep
from tokenmill.tasks.storage import is_local, join

from .blocks import BlockChecks
from .job import READ_SPLITS, Skipped, SkippedDocument, TrainData, contents_of
from .order import prepared_indices
from .samples import Pieces, content_numbers, parts_of, pieces_of, sample_hashes, split_samples


@dataclass(frozen=True, slots=True)
class FlatColumn:
    """An array of all packs."""

    columns: tuple[str, ...]  # its source
    kind: type[np.generic]
    borders: str | None = None  # the array with the packs' borders in it, written after it


# The flat arrays by file, named as in `PackBatch`.
COLUMNS = {
    "ids": FlatColumn((IDS,), np.int32, "packs"),
    "trained": FlatColumn((MASK, STARTS), np.int8),
    "starts": FlatColumn((STARTS,), np.int32, "sequences"),
}

PACKS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Rows with one length; every array but `reads` is [rows, length]."""

    tokens: np.ndarray  # int64, the inputs
    labels: np.ndarray  # int64, the tokens after them
    loss_mask: np.ndarray  # bool, the labels to train on
    segments: np.ndarray | None  # int32, the number of the sequence in its row; None if each row is one
    reads: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # uint64 [rows], hashes of what rows read
    padding: int = 0  # padded tokens

    @property
    def positions(self) -> np.ndarray:
        """The position of each token in its sequence, int64."""
        rows, length = self.tokens.shape
        places = np.broadcast_to(np.arange(length, dtype=np.int64), (rows, length))
        if self.segments is None:
            return places
        begins = np.ones((rows, length), bool)
        begins[:, 1:] = self.segments[:, 1:] != self.segments[:, :-1]
        return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


class TrainRows(Protocol):
    """An endless, seeded sequence of rows."""

    def batch(self, numbers: Sequence[int]) -> TrainBatch:
        """Return the rows with these numbers, from 0 on."""
        ...


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """Rows of megatron-core's dataset; `contents` are its prefixes', from `content_numbers`.

    With `checks`, no row is returned that holds a changed byte.
    """

    samples: Any
    contents: np.ndarray
    checks: BlockChecks | None = None

    def batch(self, numbers: Sequence[int]) -> TrainBatch:
        own = [number % len(self.samples) for number in numbers]
        pieces = pieces_of(self.samples, own)
        if self.checks is not None:
            self.checks.check(pieces)
        reads = sample_hashes(pieces, self.contents)
        samples = [self.samples[number] for number in own]
        tokens, labels, mask = (
            np.stack([np.asarray(sample[name]) for sample in samples]) for name in ("tokens", "labels", "loss_mask")
        )
        return TrainBatch(tokens.astype(np.int64), labels.astype(np.int64), mask > 0, None, reads)


def remove_torn_indices(folder: str) -> None:
    """Remove index arrays that a kill or a full disk has cut off: megatron-core builds missing ones, and fails on these."""
    for path in Path(folder).glob("*.npy"):
        try:
            np.load(path, mmap_mode="r")
        except (ValueError, EOFError):
            path.unlink()


def document_rows(
    data: TrainData, length: int, sizes: Sequence[int], seed: int, folder: str
) -> list[DocumentRows | None]:
    """Return the rows of the splits train and valid, `sizes` of each; None if no rows are requested or the split is empty.

    Indices that `tokenmill order` has built for such rows are used; others are built in `folder`.
    """
    found: list[DocumentRows | None] = []
    for split, size in zip(READ_SPLITS, sizes, strict=True):
        prepared = prepared_indices(data, split, length, size, seed) if size else None
        indices = prepared if prepared and is_local(prepared) else join(folder, "indices")
        samples = split_samples(data, split, length, size, seed, indices, folder) if size else None
        found.append(
            DocumentRows(samples, content_numbers(contents_of(data, split)))
            if samples is not None and len(samples)
            else None
        )
    return found


@dataclass(frozen=True, slots=True)
class FlatPacks:
    """Packs as flat arrays."""

    ids: np.ndarray  # int32, of all tokens
    trained: np.ndarray  # int8, of all tokens
    starts: np.ndarray  # int32, of all sequences within their packs
    token_offsets: np.ndarray  # int64, of each pack's tokens, ending with the total
    sequence_offsets: np.ndarray  # int64, of each pack's sequences, ending with the total

    def __len__(self) -> int:
        return len(self.token_offsets) - 1


def layout_folder(data: TrainData, split: str, cache: str) -> str:
    """Return the folder in `cache` for the flat arrays of a split, named by the content of the data."""
    return f"{cache}/{split}-{data.made_from.partition(':')[2][:16]}"


def lay_out(files: Sequence[str], folder: str) -> None:
    """Write the packs of `files`, in this order, as flat arrays into `folder`. Raises OSError.

    Existing columns are kept: each is published whole, and the folder belongs to these packs only.
    """
    sweep(folder)  # temporary files of a killed process
    for name, column in COLUMNS.items():
        if not Path(folder, column.borders or name).exists():
            counts = [np.zeros(1, np.int64)]
            with publish(join(folder, name)) as flat:
                for batch in chain.from_iterable(pack_batches(file, column.columns, PACKS_AT_ONCE) for file in files):
                    flat.write(np.ascontiguousarray(getattr(batch, name), column.kind).data)
                    counts += [np.diff(getattr(batch, column.borders))] if column.borders else []
            if column.borders:
                with publish(join(folder, column.borders)) as flat:
                    flat.write(np.cumsum(np.concatenate(counts)).data)


def flat_packs(folder: str) -> FlatPacks:
    """Return the packs laid out in `folder`, mapped into memory."""
    columns = (_mapped(Path(folder, name), column.kind) for name, column in COLUMNS.items())
    borders = (_mapped(Path(folder, each.borders), np.int64) for each in COLUMNS.values() if each.borders)
    return FlatPacks(*columns, *borders)


def _mapped(path: Path, kind: type[np.generic]) -> np.ndarray:
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, kind)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of packs, in an order of each epoch."""

    packs: FlatPacks
    length: int  # tokens of a row
    pad: int  # fills it up
    seed: int  # of the order
    content: str = ""  # identifies all packs

    def batch(self, numbers: Sequence[int]) -> TrainBatch:
        """Raises RunError for a pack that does not fit into a row."""
        shape = (len(numbers), self.length)
        tokens, labels = np.full(shape, self.pad, np.int64), np.full(shape, self.pad, np.int64)
        loss, segments = np.zeros(shape, bool), np.full(shape, -1, np.int32)
        filled, packs = 0, [self.pack(number) for number in numbers]
        for row, pack in enumerate(packs):
            first, stop = self.packs.token_offsets[pack : pack + 2]
            ids, trained = self.packs.ids[first:stop], self.packs.trained[first:stop]
            starts = self.packs.starts[slice(*self.packs.sequence_offsets[pack : pack + 2])]
            ends = np.append(starts[1:], len(ids))
            sequence = np.repeat(np.arange(len(starts), dtype=np.int32), ends - starts)
            read = np.ones(len(ids), bool)
            read[ends - 1] = False  # the last token of a sequence is only a label
            places = np.flatnonzero(read)
            if len(places) > self.length:
                raise RunError(
                    f"pack {pack + 1} gives {len(places)} tokens and does not fit into a row of {self.length}; raise sequence_length"
                )
            of_row = np.s_[row, : len(places)]
            tokens[of_row], labels[of_row] = ids[places], ids[places + 1]
            loss[of_row], segments[of_row] = trained[places + 1] > 0, sequence[places]
            filled += len(places)
        return TrainBatch(tokens, labels, loss, segments, self.hashes(packs), tokens.size - filled)

    def hashes(self, packs: Sequence[int]) -> np.ndarray:
        """Return the hashes of packs, as whole documents of one prefix."""
        numbers, count = np.array(packs, np.int64), len(packs)
        offsets = self.packs.token_offsets
        zeros, lengths = np.zeros(count, np.int64), offsets[numbers + 1] - offsets[numbers]
        pieces = Pieces(np.arange(count + 1), zeros, numbers, zeros, lengths)
        return sample_hashes(pieces, content_numbers([self.content] if self.content else []))

    def pack(self, number: int) -> int:
        """Return the pack of row `number`."""
        epoch, place = divmod(number, len(self.packs))
        return int(_order(len(self.packs), self.seed, epoch)[place])

    def numbers_of(self, pack: int, rows: int) -> list[int]:
        """Return the numbers of the packs among the first `rows` rows, ascending."""
        count = len(self.packs)
        epochs = range(-(-rows // count))
        numbers = (epoch * count + int(np.flatnonzero(_order(count, self.seed, epoch) == pack)[0]) for epoch in epochs)
        return [number for number in numbers if number < rows]


@lru_cache(maxsize=1)
def _order(packs: int, seed: int, epoch: int) -> np.ndarray:
    """The packs in the order of an epoch; 8 bytes each."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "little"))).permutation(packs)


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """Rows without the labels of documents that are omitted."""

    rows: DocumentRows | PackedRows
    skipped: frozenset[tuple[int, int, int | None]]

    @classmethod
    def of(cls, rows: DocumentRows | PackedRows, skipped: Iterable[Skipped]) -> "TrainedRows":
        """Return the rows without these documents. Raises InputError for one that the rows do not hold."""
        documents = [each for each in skipped if isinstance(each, SkippedDocument)]
        packed = isinstance(rows, PackedRows)
        counts = (
            [len(rows.packs)] if packed else [len(part.dataset.sequence_lengths) for part in parts_of(rows.samples)]
        )
        for each in documents:
            known = each.source < len(counts) and each.document < counts[each.source]
            if not known or packed == (each.sequence is None):
                raise InputError(
                    f"skip_list: {each.model_dump_json()} doesn't name a document of the training data; list it again with tokenmill step"
                )
        return cls(rows, frozenset((each.source, each.document, each.sequence) for each in documents))

    def batch(self, numbers: Sequence[int]) -> TrainBatch:
        batch = self.rows.batch(numbers)
        mask = batch.loss_mask.copy()
        if isinstance(self.rows, PackedRows):
            for row, number in enumerate(numbers):
                pack = self.rows.pack(number)
                mine = (sequence for _, document, sequence in self.skipped if document == pack)
                sequences = [sequence for sequence in mine if sequence is not None]
                mask[row] &= ~np.isin(cast("np.ndarray", batch.segments)[row], sequences)
            return replace(batch, loss_mask=mask)
        samples = self.rows.samples
        pieces = pieces_of(samples, [number % len(samples) for number in numbers])
        for row in range(len(numbers)):
            place = -1  # label i is token i + 1 of the sample
            for piece in pieces.of(row):
                if (piece.source, piece.document, None) in self.skipped:
                    mask[row, max(0, place) : place + piece.length] = False
                place += piece.length
        return replace(batch, loss_mask=mask)
