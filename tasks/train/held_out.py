"""The held-out documents of a preparation, as sequences to score.

A document of a .bin/.idx is one sequence, and all of its tokens but the first are scored. Packs are split into their sequences
without padding, and the tokens that training would learn are scored. So the loss covers the same tokens as in training, but reads each document from its own beginning, which makes runs
with different row lengths comparable.

A million tokens of .bin/.idx or 64 packs are in memory at once, about 20 MB. One core reads 250 million tokens of a .bin or 40
million of packs per second, hundreds of times faster than a model scores them.
"""

from collections.abc import Iterator

import numpy as np
from tokenmill.tasks.blend.models import Split
from tokenmill.tasks.chat.encoding import ROLE_NUMBERS
from tokenmill.tasks.dataset.parts import WINDOW
from tokenmill.tasks.dataset.stored import PACKS_AT_ONCE, PADDING, TOKENS, StoredDocuments, pack_batches
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.score.nll import Completions

from .job import TrainData


def held_out(data: TrainData, split: Split, max_tokens: int | None = None) -> Iterator[tuple[str, Completions]]:
    """Yield the documents of a split in batches, each with the name of its dataset; datasets in the order of the blend.

    Each dataset gives its first document, and more whole documents while they fit into `max_tokens`. Raises InputError when
    nothing was held out, RunError for missing or damaged files.
    """
    sources = data.of(split)
    if not sources:
        raise InputError(
            f"{data.path}: split {split} doesn't have documents; prepare it with holdout.{split} above 0, or evaluate "
            "on the other split"
        )
    for source in sources:
        batches = (batch for file in source.files for batch in _batches(file, data.kind))
        for batch in _first(batches, max_tokens):
            yield source.dataset, batch


def _first(batches: Iterator[Completions], max_tokens: int | None) -> Iterator[Completions]:
    """The first documents, of `max_tokens` in all, but at least one."""
    if max_tokens is None:
        yield from batches
        return
    left, least = max_tokens, 1  # the first document is read even if it's longer than all of them may be
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


def _batches(file: str, kind: str) -> Iterator[Completions]:
    """All documents of a .bin/.idx pair, or the sequences of packed Parquet without padding."""
    if kind == "pretrain":
        for content, lengths in StoredDocuments(file).batches(WINDOW):
            ids, offsets = content.astype(np.int32), np.append(0, np.cumsum(lengths, dtype=np.int64))
            yield Completions(ids, offsets, np.ones(len(ids), np.int8), np.zeros(len(ids), np.int8))
        return
    for batch in pack_batches(file, TOKENS, PACKS_AT_ONCE):
        is_text = np.repeat(batch.roles != ROLE_NUMBERS[PADDING], np.diff(batch.role_begins, append=len(batch.ids)))
        # How many tokens of text are before each token: the offsets without padding.
        before = np.append(0, np.cumsum(is_text))
        offsets = before[np.append(batch.begins, len(batch.ids))]
        yield Completions(
            batch.ids[is_text], offsets, batch.trained[is_text].astype(np.int8), np.zeros(int(offsets[-1]), np.int8)
        )
