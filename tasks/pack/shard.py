"""Build an SFT shard: packed Parquet, quarantined rows and a receipt from a slice of chat rows.

Rows become conversations, conversations become sequences of pieces, and a few megabytes of text are encoded in one call. Tokens
are buffered on disk until all lengths are known; then packs are chosen and written. A document is a conversation: it counts as
kept if at least one of its sequences is kept, else it is dropped with a reason.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenmill.tasks.chat.encoding import Batch, Filled, Sequences
from tokenmill.tasks.chat.sequences import Pieces
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.holdout import part_of
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import RecordBatch, Rejected
from tokenmill.tasks.sources.formats import place_of
from tokenmill.tasks.sources.selection import RowFilter
from tokenmill.tasks.tokenize.encoders import Encoder
from xxhash import xxh3_64_intdigest

from .algorithms import pack
from .buffer import RoleRuns, SequenceBuffer, buffer_folder
from .formats import Rows
from .parquet import FORMAT, PackWriter, padded
from .settings import SftRecipe

BATCH_CHARACTERS = 2_000_000
"""Text encoded in one call."""


@dataclass(slots=True)
class _RowOutcomes:
    """Numbers of rows with any sequence, with a kept one, with one that was too long or lost all trained tokens when it was
    cut, and with one that was cut and kept.
    """

    seen: set[int] = field(default_factory=set[int])
    kept: set[int] = field(default_factory=set[int])
    too_long: set[int] = field(default_factory=set[int])
    truncated: set[int] = field(default_factory=set[int])

    def split(self, unfinished: int | None) -> tuple["_RowOutcomes", "_RowOutcomes"]:
        """The outcomes of all rows but `unfinished`, and of that row."""
        row = set[int]() if unfinished is None else {unfinished}
        sets = (self.seen, self.kept, self.too_long, self.truncated)
        return _RowOutcomes(*(each - row for each in sets)), _RowOutcomes(*(each & row for each in sets))


@dataclass(slots=True)
class _Part:
    """One part of the shard: sequences that wait for the encoder, with the row of each, and encoded sequences."""

    buffer: SequenceBuffer
    batch: Batch = field(default_factory=Batch)
    rows: list[int] = field(default_factory=list[int])
    outcomes: _RowOutcomes = field(default_factory=_RowOutcomes)
    documents: int = 0


@dataclass(slots=True)
class PackedShard:
    """Builds one shard; `rows` and `encoder` are those of its recipe."""

    shard: PlannedShard
    recipe: SftRecipe
    rows: Rows[Any]
    encoder: Encoder
    store: Store
    _parts: dict[str, _Part] = field(default_factory=dict[str, _Part])
    _counts: Counter[str] = field(default_factory=Counter[str])

    def build(self, on_bad_row: OnBadRow) -> Receipt:
        """Write the shard and its receipt.

        Raises BadRowError for a bad row if the policy is `fail`, RunError if the source changed since the plan or a
        sequence is too long and `oversize` is `error`, OSError from the storage.
        """
        chosen = RowFilter(dict(self.recipe.filters))
        with building(self.shard, self.store, on_bad_row) as builder:
            for batch, found in builder.records([*self.rows.fields, *chosen.fields], chosen, self._rendered):
                for index, (conversation, sequences) in found.items():
                    self._add(int(batch.rows[index]), conversation, sequences, builder)
            for part in self._parts.values():
                self._encode(part, builder)
            for name, part in sorted(self._parts.items()):
                if part.documents:
                    builder.facts[name] = self._write(name, part, builder)
                    builder.keep(name, part.documents, builder.facts[name]["tokens"])
            builder.truncated = self._counts["truncated"]
            builder.facts["oversize_sequences"] = self._counts["oversize"]
            builder.facts["straddled_tokens"] = self._counts["straddled"]
            builder.facts["flagged_messages"] = self._counts["flagged"]
        return builder.receipt

    def _rendered(self, batch: RecordBatch, index: int) -> tuple[Any, Iterable[Pieces | Filled]] | Rejected:
        """A conversation and its sequences."""
        found = self.rows.read(batch.records[index])
        if isinstance(found, Rejected):
            return found
        sequences = self.rows.sequences(found)
        return sequences if isinstance(sequences, Rejected) else (found, sequences)

    def _add(self, row: int, conversation: Any, sequences: Iterable[Pieces | Filled], builder: ShardBuilder) -> None:  # noqa: ANN401 - as the format reads it
        """Queue the sequences of a row for the encoder."""
        part = self._part(conversation, builder)
        self._counts["flagged"] += self.rows.flagged(conversation)
        for pieces in sequences:
            part.batch.add(pieces)
            part.rows.append(row)
            if part.batch.characters >= BATCH_CHARACTERS:
                self._encode(part, builder, unfinished=row)

    def _part(self, conversation: Any, builder: ShardBuilder) -> _Part:  # noqa: ANN401 - as the format reads it
        """The part of a conversation, by a hash of it."""
        name, recipe = WHOLE, self.recipe
        if recipe.holdout_seed is not None:
            hashed = digest(self.rows.said(conversation), recipe.holdout_seed)
            name = part_of(hashed, recipe.holdout_valid, recipe.holdout_test)
        if name not in self._parts:
            self._parts[name] = _Part(SequenceBuffer(buffer_folder(self.store.place)))
            builder.stack.callback(self._parts[name].buffer.close)
        return self._parts[name]

    def _encode(self, part: _Part, builder: ShardBuilder, unfinished: int | None = None) -> None:
        """Encode the queue of a part and count its rows, except the `unfinished` one, which has more sequences to come."""
        batch, rows = part.batch, np.asarray(part.rows, np.int64)
        part.batch, part.rows = Batch(), []
        if rows.size:
            self._buffer(part, batch.encode(self.encoder), rows)
        outcomes, part.outcomes = part.outcomes.split(unfinished)
        oversize = len(outcomes.too_long - outcomes.kept)
        builder.drop("oversize", oversize)
        builder.drop("nothing_trained", len(outcomes.seen) - len(outcomes.kept) - oversize)
        part.documents += len(outcomes.kept)
        self._counts["truncated"] += len(outcomes.truncated)

    def _buffer(self, part: _Part, sequences: Sequences, rows: np.ndarray) -> None:
        """Buffer the sequences that fit and have trained tokens, and note the outcome of each row."""
        was_too_long, was_trained = self._too_long(sequences), _trained_tokens(sequences) > 0
        sequences = self._fitted(sequences, np.flatnonzero(was_too_long), rows)
        check_ids(sequences, self.recipe.vocabulary_size)
        trained = _trained_tokens(sequences) > 0
        oversize = self._too_long(sequences) | (was_trained & ~trained)
        kept = np.flatnonzero(~oversize & trained)
        part.outcomes.seen.update(rows.tolist())
        part.outcomes.kept.update(rows[kept].tolist())
        part.outcomes.too_long.update(rows[oversize].tolist())
        part.outcomes.truncated.update(rows[kept[was_too_long[kept]]].tolist())
        self._counts["oversize"] += int(np.count_nonzero(oversize))
        self._counts["straddled"] += int(sequences.straddled[kept].sum())
        if kept.size:
            _append(part.buffer, sequences, kept, rows[kept])

    def _too_long(self, sequences: Sequences) -> np.ndarray:
        return padded(sequences.lengths, self.recipe.pad_seq_to_mult) > self.recipe.pack_size

    def _fitted(self, sequences: Sequences, long: np.ndarray, rows: np.ndarray) -> Sequences:
        """Apply the policy for oversize sequences to those numbered `long`; raises RunError if it is `error`."""
        if not long.size or self.recipe.oversize == "drop":
            return sequences
        if self.recipe.oversize == "error":
            place = place_of(self.shard.part, int(rows[long[0]]))
            raise RunError(
                f"{place}: a sequence of {int(sequences.lengths[long[0]]):,} tokens, "
                f"but pack_size is {self.recipe.pack_size:,}; raise pack_size, or set oversize=drop or oversize=truncate"
            )
        return truncated(sequences, self.recipe.capacity)

    def _write(self, name: str, part: _Part, builder: ShardBuilder) -> dict[str, int]:
        """Pack a part, write its file, and return its facts."""
        recipe = self.recipe
        with part.buffer.sequences() as found:
            stored = padded(found.lengths, recipe.pad_seq_to_mult)
            packs = pack(stored, found.content, recipe.pack_size, recipe.packing, recipe.seed)
            metadata = {
                "format": FORMAT, "version": 1, "key": self.shard.key, "part": name, "pack_size": recipe.pack_size,
                "pad_seq_to_mult": recipe.pad_seq_to_mult, "packing": recipe.packing, "loss_on": recipe.loss_on,
                "tokenizer": recipe.tokenizer, "template": recipe.template,
            }  # fmt: skip
            return PackWriter(found, packs, recipe).write(builder.open(f"{name}.parquet"), metadata)


def digest(said: Iterable[str], seed: int) -> int:
    """A 64-bit hash of the texts of a conversation."""
    return xxh3_64_intdigest("\x1f".join(said).encode(), seed)


def check_ids(sequences: Sequences, vocabulary_size: int) -> None:
    """Raises RunError, naming the id, unless every id is below `vocabulary_size`."""
    largest = int(sequences.ids.max(initial=0))
    if largest >= vocabulary_size:
        raise RunError(
            f"id {largest} is outside the vocabulary of {vocabulary_size} ids; the tokenizer's files do not fit together"
        )


def _trained_tokens(sequences: Sequences) -> np.ndarray:
    """Trained tokens per sequence, int64, without the first token, because nothing predicts it."""
    starts = sequences.offsets[:-1]
    return np.add.reduceat(sequences.loss, starts, dtype=np.int64) - sequences.loss[starts]


def truncated(sequences: Sequences, most: int) -> Sequences:
    """The sequences, each cut after `most` tokens."""
    lengths = np.minimum(sequences.lengths, most)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    keep = _inside(sequences.offsets[:-1], lengths, len(sequences.ids))
    owners = np.searchsorted(sequences.offsets, sequences.role_starts, side="right") - 1
    places = sequences.role_starts - sequences.offsets[owners]
    runs = places < lengths[owners]
    return Sequences(
        ids=sequences.ids[keep],
        loss=sequences.loss[keep],
        offsets=offsets,
        role_starts=(offsets[owners] + places)[runs],
        roles=sequences.roles[runs],
        straddled=sequences.straddled,
    )


def _inside(starts: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """A mask of `size` positions, true in `[start, start + length)`."""
    borders = np.zeros(size + 1, np.int8)
    np.add.at(borders, starts, 1)
    np.add.at(borders, starts + lengths, -1)
    return np.cumsum(borders[:-1], dtype=np.int8).astype(np.bool_)


def _append(buffer: SequenceBuffer, sequences: Sequences, chosen: np.ndarray, rows: np.ndarray) -> None:
    """Buffer the chosen sequences, their loss shifted to the token before, and their role runs."""
    lengths = sequences.lengths[chosen]
    ids, loss = sequences.ids, np.append(sequences.loss[1:], np.int8(0))
    loss[sequences.offsets[1:] - 1] = 0
    if len(chosen) < len(sequences.offsets) - 1:
        keep = _inside(sequences.offsets[chosen], lengths, len(ids))
        ids, loss = ids[keep], loss[keep]
    counts = np.diff(np.searchsorted(sequences.role_starts, sequences.offsets))
    owners = np.repeat(np.arange(len(counts)), counts)
    kept = np.isin(owners, chosen)
    starts = (sequences.role_starts - sequences.offsets[owners])[kept].astype(np.int32)
    buffer.append(ids, loss, lengths, rows, RoleRuns(counts[chosen], starts, sequences.roles[kept]))
