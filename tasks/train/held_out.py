"""The held-out documents of a preparation, as sequences that can be scored.

A document of a .bin/.idx is a sequence of its own, of which all tokens but the first are scored. Of packs every sequence
comes out alone, without its padding, and exactly the tokens are scored that training would learn: the stored mask stands
one token before the token it speaks of, and is moved back here. So a loss on held-out data is one of the same tokens as
a loss in training, but each document is read from its own beginning, where a row of training may begin in the middle of
one: that makes it comparable between runs with rows of unlike lengths.

A million tokens of .bin/.idx or 64 packs are in memory at once, some 20 MB. On one core 250 million tokens of a .bin or
40 million of packs are read a second, hundreds of times what a model scores.
"""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import BinaryIO, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.pack.parquet import PADDING
from tokenmill.tasks.score.nll import Completions
from tokenmill.tasks.shards.store import read_bytes, size_of
from tokenmill.tasks.storage import filesystem
from tokenmill.tasks.tokenize.binidx import BinIdxError, Index, read_index

from .job import Source, TrainData

HeldOut = Literal["valid", "test"]

WINDOW = 1 << 20
"""Documents that begin within so many tokens of a .bin are read at once."""

PACKS = 64
"""Read at once."""

COLUMNS = ["input_ids", "loss_mask", "seq_start_id", "role_start", "role"]


def held_out(data: TrainData, split: HeldOut, max_tokens: int | None = None) -> Iterator[tuple[str, Completions]]:
    """The documents of a split in batches, each with the name of its data set; data sets in the order of the blend.

    Of each data set whole documents are taken from the beginning while they fit into `max_tokens`, the first one always.
    Raises InputError when nothing was held out, and for files that are missing or damaged.
    """
    sources = data.of(split)
    if not sources:
        raise InputError(
            f"{data.path}: no documents are in split {split}; prepare it with holdout.{split} above 0, or evaluate "
            "on the other split"
        )
    for source in sources:
        for batch in _first(_read(source, data), max_tokens):
            yield source.dataset, batch


def _read(source: Source, data: TrainData) -> Iterator[Completions]:
    read = _documents if data.kind == "pretrain" else _sequences
    return chain.from_iterable(map(read, source.files))


def _first(batches: Iterator[Completions], max_tokens: int | None) -> Iterator[Completions]:
    """Whole documents from the beginning, of `max_tokens` at most, but one in any case."""
    if max_tokens is None:
        yield from batches
        return
    left, least = max_tokens, 1
    for batch in batches:
        fitting = int(np.searchsorted(batch.offsets, left, side="right")) - 1
        if fitting < len(batch.lengths):
            yield _beginning(batch, max(fitting, least))
            return
        yield batch
        left -= len(batch.ids)
        least = 0 if len(batch.lengths) else least


def _beginning(batch: Completions, documents: int) -> Completions:
    end = int(batch.offsets[documents])
    return Completions(batch.ids[:end], batch.offsets[: documents + 1], batch.loss[:end], batch.parts[:end])


def _documents(prefix: str) -> Iterator[Completions]:
    """The documents of a .bin/.idx, in batches."""
    index = _index(prefix)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(index.lengths, dtype=np.int64)])
    borders = np.flatnonzero(np.diff(offsets[:-1] // WINDOW)) + 1
    system, place = filesystem(f"{prefix}.bin")
    with cast("BinaryIO", system.open(place, "rb")) as stream:
        for first, stop in pairwise([0, *borders.tolist(), index.documents]):
            inside = offsets[first : stop + 1] - offsets[first]
            content = stream.read(int(inside[-1]) * index.dtype.itemsize)
            ids = np.frombuffer(content, index.dtype).astype(np.int32)
            yield Completions(ids, inside, np.ones(len(ids), np.int8), np.zeros(len(ids), np.int8))


def _index(prefix: str) -> Index:
    content, size = read_bytes(f"{prefix}.idx"), size_of(f"{prefix}.bin")
    if content is None or size is None:
        raise InputError(
            f"{prefix}: its .bin or .idx is missing; run the preparation again, which makes what is missing"
        )
    try:
        return read_index(content, size)
    except BinIdxError as error:
        raise InputError(f"{prefix}.idx: {error}") from error


def _sequences(path: str) -> Iterator[Completions]:
    """The sequences of packed Parquet, in batches."""
    system, place = filesystem(path)
    try:
        with cast("BinaryIO", system.open(place, "rb")) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(PACKS, columns=COLUMNS, use_threads=False):
                yield _unpacked(batch)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: cannot be read as packed Parquet: {error}; run the preparation again") from error


def _unpacked(batch: pa.RecordBatch) -> Completions:
    """The sequences of some packs without padding, and the mask of each moved to the tokens it speaks of."""
    columns = {name: batch.column(name) for name in COLUMNS}
    ids, mask = (columns[name].flatten().to_numpy() for name in ("input_ids", "loss_mask"))
    borders = columns["input_ids"].offsets.to_numpy()
    borders = borders - borders[0]
    begins, runs = (_placed(columns[name], borders) for name in ("seq_start_id", "role_start"))
    is_text = np.repeat(columns["role"].flatten().to_numpy() != PADDING, np.diff(runs, append=len(ids)))
    loss = np.zeros(len(ids), np.int8)
    loss[1:] = mask[:-1]
    loss[begins] = 0
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_text)])
    offsets = before[np.append(begins, len(ids))]
    return Completions(ids[is_text], offsets, loss[is_text], np.zeros(int(offsets[-1]), np.int8))


def _placed(places: pa.ListArray, borders: np.ndarray) -> np.ndarray:
    """Places within packs as places in the batch, int64, given where packs begin."""
    counts = np.diff(places.offsets.to_numpy())
    return places.flatten().to_numpy().astype(np.int64) + np.repeat(borders[:-1], counts)
