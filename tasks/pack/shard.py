"""Build an SFT shard: stored sequences, the fates of rows, quarantined rows and a receipt from a slice of chat rows.

Rows become conversations, conversations become sequences of segments, and a few megabytes of text are encoded in one call. Nothing
here depends on packs. A document is a conversation: it counts as kept if at least one of its sequences has trained tokens, else it
is dropped with a reason.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenmill.tasks.chat.conversation import rejecting, required
from tokenmill.tasks.chat.encoding import Batch, Filled, Segments, Sequences, Tokenized
from tokenmill.tasks.chat.shapes import given_of
from tokenmill.tasks.chat.tokenized import tokenized
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.plan import WHOLE, PlannedShard, part_of
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import RecordBatch, Rejected
from tokenmill.tasks.tokenize.encoders import Encoder
from xxhash import xxh3_64_intdigest

from .formats import Rows
from .sequences import RoleRuns, SequenceWriter
from .settings import SftRecipe

BATCH_CHARACTERS = 2_000_000
"""Text encoded in one call."""

Rendered = Iterable[Segments | Filled | Tokenized]
"""The sequences of a row."""


@dataclass(slots=True)
class _Part:
    """One part of the shard: sequences that wait for the encoder, with the row of each, and stored sequences.

    `seen` are the numbers of rows with any sequence that are not counted yet, `kept` those with a stored one.
    """

    writer: SequenceWriter
    batch: Batch = field(default_factory=Batch)
    rows: list[int] = field(default_factory=list[int])
    seen: set[int] = field(default_factory=set[int])
    kept: set[int] = field(default_factory=set[int])
    documents: int = 0


@dataclass(slots=True)
class SequenceShard:
    """Builds one shard with its recipe's `rows` and `encoder`."""

    shard: PlannedShard
    recipe: SftRecipe
    rows: Rows[Any]
    encoder: Encoder
    store: Store
    _parts: dict[str, _Part] = field(default_factory=dict[str, _Part])
    _counts: Counter[str] = field(default_factory=Counter[str])

    def build(self, on_bad_row: OnBadRow) -> Receipt:
        """Write the shard and its receipt.

        Raises BadRowError for a bad row if the policy is `fail`, RunError if the source changed since the plan, OSError from
        the storage.
        """
        with building(self.shard, self.store, on_bad_row) as builder:
            for batch, found in builder.records(self.rows.fields, self._rendered):
                for index, (conversation, sequences) in found.items():
                    self._add(int(batch.rows[index]), conversation, sequences, builder)
            for part in self._parts.values():
                self._encode(part, builder)
            # By name, because the order in which parts first occur depends on the rows.
            for name, part in sorted(self._parts.items()):
                if part.documents:
                    part.writer.write_index()
                    builder.facts[name] = {"sequences": part.writer.sequences, "longest": part.writer.longest}
                    builder.keep(name, part.documents, part.writer.tokens)
            builder.facts["straddled_tokens"] = self._counts["straddled"]
            builder.facts["flagged_messages"] = self._counts["flagged"]
            builder.write_fates()
        return builder.receipt

    @rejecting
    def _rendered(self, batch: RecordBatch, index: int) -> tuple[Any, Rendered]:
        """A conversation and its sequences; a row that is tokenized already is both."""
        found, recipe = self.rows.read(batch.records[index]), self.recipe
        if isinstance(found, Rejected) and found.reason == "already_tokenized":
            given = given_of(recipe.fields)
            found = tokenized(batch.records[index], recipe.vocabulary_size, recipe.tools_field, given)
        conversation = required(found)
        ready = isinstance(conversation, Tokenized)
        return conversation, [conversation] if ready else required(self.rows.sequences(conversation))

    def _add(self, row: int, conversation: Any, sequences: Rendered, builder: ShardBuilder) -> None:  # noqa: ANN401 - as the format reads it
        """Queue the sequences of a row for the encoder."""
        name, recipe, ready = WHOLE, self.recipe, isinstance(conversation, Tokenized)
        if recipe.holdout_seed is not None:
            # By the texts, so that a conversation is in the same part in any format; ids have no texts.
            said = [conversation.ids.tobytes().hex()] if ready else self.rows.said(conversation)
            name = part_of(digest(said, recipe.holdout_seed), recipe.holdout_valid, recipe.holdout_test)
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = _Part(SequenceWriter(builder, name))
        self._counts["flagged"] += 0 if ready else self.rows.flagged(conversation)
        for name in conversation.unread if ready else self.rows.unread(conversation):
            builder.unread[name] += 1
        for sequence in sequences:
            part.batch.add(sequence)
            part.rows.append(row)
            if part.batch.characters >= BATCH_CHARACTERS:
                self._encode(part, builder, unfinished=row)

    def _encode(self, part: _Part, builder: ShardBuilder, unfinished: int | None = None) -> None:
        """Encode the queue of a part and count its rows, except the `unfinished` one, which continues with more sequences."""
        batch, rows = part.batch, np.asarray(part.rows, np.int64)
        part.batch, part.rows = Batch(), []
        if rows.size:
            sequences = batch.encode(self.encoder)
            check_ids(sequences, self.recipe.vocabulary_size)
            # Without the first token, because nothing predicts it.
            starts = sequences.offsets[:-1]
            trained = np.add.reduceat(sequences.trained, starts, dtype=np.int64) - sequences.trained[starts]
            chosen = np.flatnonzero(trained > 0)
            part.seen.update(rows.tolist())
            part.kept.update(rows[chosen].tolist())
            self._counts["straddled"] += int(sequences.straddled[chosen].sum())
            if chosen.size:
                _append(part.writer, sequences, chosen, rows[chosen])
        # A row whose sequences are in several batches is kept if any of them has a trained token.
        done = part.seen - {unfinished}
        kept, dropped = (np.array(sorted(some), np.int64) for some in (done & part.kept, done - part.kept))
        builder.fates.keep(part.writer.part, kept)
        builder.drop("nothing_trained", dropped)
        part.documents += len(kept)
        part.seen, part.kept = part.seen - done, part.kept - done


def digest(said: Iterable[str], seed: int) -> int:
    """Return a 64-bit hash of the texts in a conversation."""
    return xxh3_64_intdigest("\x1f".join(said).encode(), seed)


def check_ids(sequences: Sequences, vocabulary_size: int) -> None:
    """Raises RunError, naming the id, unless every id is below `vocabulary_size`."""
    largest = int(sequences.ids.max(initial=0))
    if largest >= vocabulary_size:
        raise RunError(
            f"id {largest} is outside the vocabulary of {vocabulary_size} ids; the tokenizer's files do not fit together"
        )


def _append(writer: SequenceWriter, sequences: Sequences, chosen: np.ndarray, rows: np.ndarray) -> None:
    """Store the chosen sequences, their loss shifted to the token before, and their role runs."""
    lengths = sequences.lengths[chosen]
    ids, loss = sequences.ids, np.append(sequences.trained[1:], np.int8(0))
    loss[sequences.offsets[1:] - 1] = 0  # the token behind is of the next sequence
    if len(chosen) < len(sequences.offsets) - 1:
        # 1 from the beginning of each chosen sequence to its end, by the sum of its borders; neighbors share one.
        borders = np.zeros(len(ids) + 1, np.int8)
        np.add.at(borders, sequences.offsets[chosen], 1)
        np.add.at(borders, sequences.offsets[chosen] + lengths, -1)
        keep = np.cumsum(borders[:-1], dtype=np.int8).astype(np.bool_)
        ids, loss = ids[keep], loss[keep]
    # Runs belong to the sequence that they begin in, and are stored relative to it.
    counts = np.diff(np.searchsorted(sequences.role_starts, sequences.offsets))
    owners = np.repeat(np.arange(len(counts)), counts)
    kept = np.isin(owners, chosen)
    starts = (sequences.role_starts - sequences.offsets[owners])[kept].astype(np.int32)
    writer.append(ids, loss, lengths, rows, RoleRuns(counts[chosen], starts, sequences.roles[kept]))
