"""One SFT shard: a slice of chat rows becomes packed Parquet, a quarantine file, and a receipt.

Rows become conversations, conversations sequences of pieces, and a few megabytes of text at a time are encoded in one
call. Tokens wait in a spool until the lengths of the whole shard are known; then packs are chosen and written. A
document is a conversation: it is counted where at least one of its sequences is kept, and dropped, with a reason, where
none is.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any

import numpy as np
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.encoding import Batch, Sequences
from tokenmill.tasks.chat.sequences import Pieces
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.books import Books, OnBadRow
from tokenmill.tasks.shards.holdout import part_of
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import PartCount, Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import BadRow, RecordBatch
from tokenmill.tasks.sources.formats import first_row, read_records
from tokenmill.tasks.sources.json_rows import excerpt_of
from tokenmill.tasks.sources.selection import RowFilter
from tokenmill.tasks.tokenize.encoders import Encoder
from xxhash import xxh3_64_intdigest

from .algorithms import pack
from .formats import Rows
from .parquet import FORMAT, PackWriter, padded
from .settings import SftRecipe
from .spool import Runs, Spool, spool_folder

WHOLE = "all"
"""The one part of a shard of which nothing is held out."""

BATCH_CHARACTERS = 2_000_000
"""Of text that is encoded in one call."""


@dataclass(slots=True)
class _Waiting:
    """Sequences that wait for the encoder, and the row that each is of."""

    batch: Batch = field(default_factory=Batch)
    rows: list[int] = field(default_factory=list[int])

    def add(self, row: int, pieces: Pieces) -> None:
        self.batch.add(pieces)
        self.rows.append(row)


@dataclass(slots=True)
class _Fates:
    """What became of conversations, as sets of rows: of which there were sequences, of which at least one was kept,
    was too long (also where a cut left nothing to learn), was cut and kept.
    """

    seen: set[int] = field(default_factory=set[int])
    kept: set[int] = field(default_factory=set[int])
    too_long: set[int] = field(default_factory=set[int])
    truncated: set[int] = field(default_factory=set[int])

    def split(self, unfinished: int | None) -> tuple["_Fates", "_Fates"]:
        """Those of all rows but one, and those of that row."""
        row = set[int]() if unfinished is None else {unfinished}
        sets = (self.seen, self.kept, self.too_long, self.truncated)
        return _Fates(*(each - row for each in sets)), _Fates(*(each & row for each in sets))


@dataclass(slots=True)
class _Part:
    """What goes to one part of the shard: conversations that wait, sequences in the spool, and how many documents."""

    spool: Spool
    waiting: _Waiting = field(default_factory=_Waiting)
    fates: _Fates = field(default_factory=_Fates)
    documents: int = 0


class ShardBuilder:
    """Builds one shard; `rows` and `encoder` are those of its recipe."""

    def __init__(self, shard: PlannedShard, recipe: SftRecipe, rows: Rows[Any], encoder: Encoder, store: Store) -> None:
        self._shard, self._recipe, self._rows, self._encoder, self._store = shard, recipe, rows, encoder, store
        self._filter = RowFilter(dict(recipe.filters))
        self._parts: dict[str, _Part] = {}
        self._counts: Counter[str] = Counter()

    def build(self, on_bad_row: OnBadRow) -> Receipt:
        """Write the shard and its receipt.

        Raises BadRowError when a row is bad and the policy is `fail`, RunError when the source changed since the plan
        or a sequence is too long and the policy is `error`, OSError from the storage. Nothing is proven by then.
        """
        started, cpu = time.time(), time.process_time()
        fields = [*self._rows.fields, *self._filter.fields]
        with ExitStack() as stack:
            books = Books(self._shard.part, self._store.folder(self._shard.key), stack, on_bad_row)
            for batch in read_records(self._shard.part, fields):
                self._take(batch, books, stack)
            for part in self._parts.values():
                self._encode(part, books)
            parts = {name: part for name, part in sorted(self._parts.items()) if part.documents}
            facts = {name: self._write(name, part, books) for name, part in parts.items()}
        return self._store.issue(
            self._shard.identity,
            outputs=books.outputs,
            rows_in=books.rows_in,
            parts={name: PartCount(part.documents, facts[name]["tokens"]) for name, part in parts.items()},
            drops=books.drops,
            quarantined=books.quarantined,
            truncated=self._counts["truncated"],
            facts={
                **facts, "oversize_sequences": self._counts["oversize"],
                "straddled_tokens": self._counts["straddled"], "flagged_messages": self._counts["flagged"],
            },
            volatile={
                "built_at": started, "seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu,
                "host": gethostname(), "source": self._shard.part.file.uri, "source_bytes": self._shard.part.size,
            },
        )  # fmt: skip

    def _take(self, batch: RecordBatch, books: Books, stack: ExitStack) -> None:
        """Render one batch of rows, keeping the books."""
        books.rows_in += batch.consumed
        books.drop("blank_line", batch.blank)
        bad = list(batch.bad)
        for row, record in zip(batch.rows.tolist(), batch.records, strict=True):
            if not self._filter.keeps(record):
                books.drop("filtered")
                continue
            found = self._rendered(record)
            if isinstance(found, Rejected):
                bad.append(BadRow(row, found.reason, found.detail, excerpt_of(record)))
                continue
            part = self._part(found[0], stack)
            self._counts["flagged"] += self._rows.flagged(found[0])
            for pieces in found[1]:
                part.waiting.add(row, pieces)
                if part.waiting.batch.characters >= BATCH_CHARACTERS:
                    self._encode(part, books, unfinished=row)
        books.set_aside(sorted(bad, key=lambda row: row.row))

    def _rendered(self, record: Mapping[str, Any]) -> tuple[Any, list[Pieces]] | Rejected:
        """The conversation of a record with its sequences, or why there are none."""
        found = self._rows.read(record)
        if isinstance(found, Rejected):
            return found
        sequences = self._rows.sequences(found)
        return sequences if isinstance(sequences, Rejected) else (found, sequences)

    def _part(self, found: Any, stack: ExitStack) -> _Part:  # noqa: ANN401 - a conversation, as the format reads it
        """The part that a conversation belongs to, by a hash of it."""
        name, recipe = WHOLE, self._recipe
        if recipe.holdout_seed is not None:
            name = part_of(
                digest(self._rows.said(found), recipe.holdout_seed), recipe.holdout_valid, recipe.holdout_test
            )
        if name not in self._parts:
            self._parts[name] = _Part(Spool(spool_folder(self._store.place)))
            stack.callback(self._parts[name].spool.close)
        return self._parts[name]

    def _encode(self, part: _Part, books: Books, unfinished: int | None = None) -> None:
        """Encode what waits for a part, spool what fits, and begin anew. A conversation of many long sequences is not
        encoded all at once: the row that is `unfinished` is counted when the last of it is.
        """
        waiting, part.waiting = part.waiting, _Waiting()
        if waiting.rows:
            self._spool(part, waiting)
        fates, part.fates = part.fates.split(unfinished)
        oversize = len(fates.too_long - fates.kept)
        books.drop("oversize", oversize)
        books.drop("nothing_trained", len(fates.seen) - len(fates.kept) - oversize)
        part.documents += len(fates.kept)
        self._counts["truncated"] += len(fates.truncated)

    def _spool(self, part: _Part, waiting: _Waiting) -> None:
        """Encode what waits, spool what fits, and note what became of it."""
        sequences = waiting.batch.encode(self._encoder)
        too_long_by_then, learned_by_then = self._too_long(sequences), _learned_tokens(sequences) > 0
        sequences = self._fitted(sequences, np.flatnonzero(too_long_by_then), waiting)
        check_ids(sequences, self._recipe.vocabulary_size)
        learned = _learned_tokens(sequences) > 0
        oversize = self._too_long(sequences) | (learned_by_then & ~learned)
        kept = np.flatnonzero(~oversize & learned)
        rows = np.asarray(waiting.rows, np.int64)
        part.fates.seen.update(waiting.rows)
        part.fates.kept.update(rows[kept].tolist())
        part.fates.too_long.update(rows[oversize].tolist())
        part.fates.truncated.update(rows[kept[too_long_by_then[kept]]].tolist())
        self._counts["oversize"] += int(np.count_nonzero(oversize))
        self._counts["straddled"] += int(sequences.straddled[kept].sum())
        if kept.size:
            _spool(part.spool, sequences, kept, rows[kept])

    def _too_long(self, sequences: Sequences) -> np.ndarray:
        return padded(sequences.lengths, self._recipe.pad_seq_to_mult) > self._recipe.pack_size

    def _fitted(self, sequences: Sequences, long: np.ndarray, waiting: _Waiting) -> Sequences:
        """The sequences, those numbered in `long` cut where the policy is to truncate; raises RunError where it is `error`."""
        if not long.size or self._recipe.oversize == "drop":
            return sequences
        if self._recipe.oversize == "error":
            row = waiting.rows[int(long[0])]
            raise RunError(
                f"{self._shard.part.file.uri}:{first_row(self._shard.part) + row + 1}: a sequence of "
                f"{int(sequences.lengths[long[0]]):,} tokens, but pack_size is {self._recipe.pack_size:,}; raise "
                "pack_size, or set oversize=drop or oversize=truncate"
            )
        return truncated(sequences, self._recipe.capacity)

    def _write(self, name: str, part: _Part, books: Books) -> dict[str, int]:
        """Pack a part and write its file; its facts."""
        recipe = self._recipe
        with part.spool.spooled() as spooled:
            stored = padded(spooled.lengths, recipe.pad_seq_to_mult)
            packs = pack(stored, spooled.content, recipe.pack_size, recipe.packing, recipe.seed)
            metadata = {
                "format": FORMAT, "version": 1, "key": self._shard.key, "part": name, "pack_size": recipe.pack_size,
                "pad_seq_to_mult": recipe.pad_seq_to_mult, "packing": recipe.packing, "loss_on": recipe.loss_on,
                "tokenizer": recipe.tokenizer, "template": recipe.template,
            }  # fmt: skip
            return PackWriter(spooled, packs, recipe).write(books.open(f"{name}.parquet"), metadata)


def digest(said: Iterable[str], seed: int) -> int:
    """A hash of what is said in a conversation, 64 bits."""
    return xxh3_64_intdigest("\x1f".join(said).encode(), seed)


def check_ids(sequences: Sequences, vocabulary_size: int) -> None:
    """Raises RunError, naming the id, unless every id is below `vocabulary_size`."""
    largest = int(sequences.ids.max(initial=0))
    if largest >= vocabulary_size:
        raise RunError(
            f"id {largest} is outside the vocabulary of {vocabulary_size} ids; the tokenizer's files do not fit together"
        )


def _learned_tokens(sequences: Sequences) -> np.ndarray:
    """How many tokens of each sequence are trained on, int64; the first cannot be, for nothing predicts it."""
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
    """True for the places `[start, start + length)` of `size` places."""
    borders = np.zeros(size + 1, np.int8)
    np.add.at(borders, starts, 1)
    np.add.at(borders, starts + lengths, -1)
    return np.cumsum(borders[:-1], dtype=np.int8).astype(np.bool_)


def _spool(spool: Spool, sequences: Sequences, chosen: np.ndarray, rows: np.ndarray) -> None:
    """Add some of the sequences to a spool, their loss shifted to the token before."""
    lengths = sequences.lengths[chosen]
    shifted = np.append(sequences.loss[1:], np.int8(0))
    shifted[sequences.offsets[1:] - 1] = 0
    ids, loss = sequences.ids, shifted
    if len(chosen) < len(sequences.offsets) - 1:
        keep = _inside(sequences.offsets[chosen], lengths, len(ids))
        ids, loss = ids[keep], loss[keep]
    spool.append(ids, loss, lengths, rows, _runs(sequences, chosen))


def _runs(sequences: Sequences, chosen: np.ndarray) -> Runs:
    """The role runs of some of the sequences, counted from the beginning of each."""
    borders = np.searchsorted(sequences.role_starts, sequences.offsets)
    counts = np.diff(borders)
    owners = np.repeat(np.arange(len(counts)), counts)
    kept = np.isin(owners, chosen)
    starts = (sequences.role_starts - sequences.offsets[owners])[kept].astype(np.int32)
    return Runs(counts[chosen], starts, sequences.roles[kept])
