"""The held-out documents of a preparation, as sequences to score.

A document of a .bin/.idx is one sequence, and all of its tokens but the first are scored. Packs are split into their sequences
without padding, and the tokens that training would learn are scored: the stored mask is shifted by one token, and is shifted
back here. So the loss covers the same tokens as in training, but reads each document from its own beginning, which makes runs
with rows of different lengths comparable.

A million tokens of .bin/.idx or 64 packs are in memory at once, some 20 MB. One core reads 250 million tokens of a .bin or 40
million of packs per second, hundreds of times faster than a model scores them.
"""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.models import Split
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.pack.parquet import PADDING
from tokenmill.tasks.score.nll import Completions
from tokenmill.tasks.shards.store import read_bytes, size_of
from tokenmill.tasks.storage import filesystem
from tokenmill.tasks.tokenize.binidx import BinIdxError, Index, read_index

from .job import TrainData

WINDOW = 1 << 20
"""Tokens of a .bin to read at once: all documents that begin among them."""

PACKS_AT_ONCE = 64

COLUMNS = ["input_ids", "loss_mask", "seq_start_id", "role_start", "role"]


def held_out(data: TrainData, split: Split, max_tokens: int | None = None) -> Iterator[tuple[str, Completions]]:
    """The documents of a split in batches, each with the name of its dataset; datasets in the order of the blend.

    Each dataset gives its first document, and more whole documents while they fit into `max_tokens`. Raises InputError when
    nothing was held out, and for missing or damaged files.
    """
    sources = data.of(split)
    if not sources:
        raise InputError(
            f"{data.path}: split {split} has no documents; prepare it with holdout.{split} above 0, or evaluate "
            "on the other split"
        )
    read = _documents if data.kind == "pretrain" else _sequences
    for source in sources:
        for batch in _first(chain.from_iterable(map(read, source.files)), max_tokens):
            yield source.dataset, batch


def _first(batches: Iterator[Completions], max_tokens: int | None) -> Iterator[Completions]:
    """The first documents, of `max_tokens` in all, but at least one."""
    if max_tokens is None:
        yield from batches
        return
    left, least = max_tokens, 1
    for batch in batches:
        fitting = int(np.searchsorted(batch.offsets, left, side="right")) - 1
        if fitting < len(batch.lengths):
            documents = max(fitting, least)
            end = int(batch.offsets[documents])
            yield Completions(batch.ids[:end], batch.offsets[: documents + 1], batch.loss[:end], batch.parts[:end])
            return
        yield batch
        left -= len(batch.ids)
        least = 0 if len(batch.lengths) else least


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
            f"{prefix}: its .bin or .idx is missing; run the preparation again, which builds what is missing"
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
            for batch in pq.ParquetFile(stream).iter_batches(PACKS_AT_ONCE, columns=COLUMNS, use_threads=False):
                yield _unpacked(batch)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: cannot be read as packed Parquet: {error}; run the preparation again") from error


def _unpacked(batch: pa.RecordBatch) -> Completions:
    """The sequences of packs without padding, each with its mask shifted to the scored tokens."""
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
    """Positions within packs as positions in the batch, int64; `borders` are where packs begin."""
    counts = np.diff(places.offsets.to_numpy())
    return places.flatten().to_numpy().astype(np.int64) + np.repeat(borders[:-1], counts)
