"""One shard of scores: a slice of rows becomes a Parquet file with a score for each, a quarantine file, and a receipt.

Rows are read a few megabytes at a time and scored together, so that an engine can sort them by length; a group of rows
in the file is what was scored in one go. What cannot be scored is counted with a reason. A number that is none stops the
shard, with file and row, before anything of it is published.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.shards.books import Books, OnBadRow
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import PartCount, Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import BadRow, Slice
from tokenmill.tasks.sources.filters import RowFilter
from tokenmill.tasks.sources.locate import first_row
from tokenmill.tasks.sources.records import RecordBatch, excerpt_of, read_records

from .conversations import Conversations, text_at
from .embed import Embedder, as_stored
from .nll import Scorer, summed
from .settings import EmbedRecipe, NllRecipe
from .tables import NLL, Place, assembled, embeddings

FILE = f"{WHOLE}.parquet"
IDS = ("row_id", "id")
NAMED = (*IDS, "dataset", "split")
"""The fields that name a row, where it has them."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of some rows: a table of the columns that are scores, and the numbers of the rows that have one."""

    table: pa.Table
    rows: np.ndarray


class Scoring(Protocol):
    """What is made of rows."""

    @property
    def tokens(self) -> str:
        """The column that counts the tokens of a row."""
        ...

    @property
    def added(self) -> Sequence[str]:
        """The columns that are added up in the facts of the shard."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """The columns of the file."""
        ...

    @property
    def same(self) -> Mapping[str, str | None]:
        """Columns with one value."""
        ...

    @property
    def fields(self) -> Sequence[str]:
        """The fields of a record that are looked at."""
        ...

    def read(self, record: Mapping[str, Any]) -> object | Rejected:
        """What of a record is scored, or why nothing."""
        ...

    def scored(self, read: Sequence[Any], place: Place) -> Scored:
        """The scores of what was read. Raises NonFiniteError, naming the place of the row."""
        ...


@dataclass(frozen=True, slots=True)
class NllScoring:
    """How surprised a model is by completions."""

    recipe: NllRecipe
    conversations: Conversations
    scorer: Scorer
    tokens: str = "total_token_count"
    added: Sequence[str] = ("completion_token_count", "nll_sum")

    @property
    def schema(self) -> pa.Schema:
        """See Scoring."""
        return NLL

    @property
    def same(self) -> dict[str, str | None]:
        """See Scoring."""
        recipe = self.recipe
        return {
            "loss_mode": recipe.loss_mode, "model": recipe.model, "model_revision": recipe.model_revision,
            "engine": recipe.engine, "dtype": recipe.precision,
        }  # fmt: skip

    @property
    def fields(self) -> Sequence[str]:
        """See Scoring."""
        return self.conversations.fields

    def read(self, record: Mapping[str, Any]) -> object | Rejected:
        """See Scoring."""
        return self.conversations.read(record)

    def scored(self, read: Sequence[Any], place: Place) -> Scored:
        """See Scoring: rows of which nothing was to be scored have none, those that were cut before it have nulls."""
        found = self.conversations.sequenced(read)
        table = self.scorer.score(found.completions, lambda number: place(int(found.owners[number])))
        table = summed(table, found.owners, len(read))
        some = (table["completion_token_count"].to_numpy() > 0) | (table["cut_token_count"].to_numpy() > 0)
        rows = np.flatnonzero(some)
        return Scored(table.take(pa.array(rows)), rows)


@dataclass(frozen=True, slots=True)
class EmbedScoring:
    """Where a text lies among others."""

    recipe: EmbedRecipe
    embedder: Embedder
    tokens: str = "token_count"
    added: Sequence[str] = ()

    @property
    def schema(self) -> pa.Schema:
        """See Scoring."""
        return embeddings(self.embedder.dimensions)

    @property
    def same(self) -> dict[str, str | None]:
        """See Scoring."""
        recipe = self.recipe
        return {
            "model": recipe.model, "model_revision": recipe.model_revision, "engine": recipe.engine,
            "pooling": recipe.pooling,
        }  # fmt: skip

    @property
    def fields(self) -> Sequence[str]:
        """See Scoring."""
        return self.recipe.fields

    def read(self, record: Mapping[str, Any]) -> str | Rejected:
        """See Scoring."""
        found = next((text for name in self.recipe.fields if (text := text_at(record, name)) is not None), None)
        if found is None:
            return Rejected("no_text", f"there is no text under {' or '.join(map(repr, self.recipe.fields))}")
        return found if found.strip() else Rejected("empty_text", "the text says nothing")

    def scored(self, read: Sequence[Any], place: Place) -> Scored:
        """See Scoring."""
        counts = self.embedder.token_counts(read)
        limit = self.embedder.max_tokens
        columns = {
            "embedding": as_stored(self.embedder.encode(read), place),
            "token_count": pa.array(counts, pa.int32()),
            "truncated": pa.array(counts > (np.inf if limit is None else limit)),
        }
        return Scored(pa.table(columns), np.arange(len(read)))


@dataclass(slots=True)
class _Rows:
    """Rows to be scored: what names each, what was read of it, and its number in the slice."""

    names: dict[str, list[str | None]] = field(default_factory=lambda: {name: [] for name in NAMED})
    read: list[object] = field(default_factory=list[object])
    numbers: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Written:
    """The file, and what it holds."""

    writer: pq.ParquetWriter | None = None
    documents: int = 0
    tokens: int = 0
    truncated: int = 0
    sums: Counter[str] = field(default_factory=Counter[str])


def score_shard(
    shard: PlannedShard, recipe: NllRecipe | EmbedRecipe, scoring: Scoring, store: Store, on_bad_row: OnBadRow
) -> Receipt:
    """Build one shard in its folder of the store and publish its receipt.

    Raises NonFiniteError for a score that is no number, BadRowError when a row is bad and the policy is `fail`, RunError
    when the source changed since the plan, OSError from the storage. Nothing is proven by then, and the next attempt
    starts afresh.
    """
    started, cpu = time.time(), time.process_time()
    chosen, written = RowFilter(recipe.filters), _Written()
    with ExitStack() as stack:
        books = Books(shard.part, store.folder(shard.key), stack, on_bad_row)
        for batch in read_records(shard.part, [*NAMED, *scoring.fields, *chosen.fields]):
            rows = _taken(batch, chosen, recipe, scoring, books)
            if rows.read:
                _write(rows, scoring, written, books)
    return store.issue(
        shard.identity,
        outputs=books.outputs,
        rows_in=books.rows_in,
        parts={WHOLE: PartCount(written.documents, written.tokens)} if written.documents else {},
        drops=books.drops,
        quarantined=books.quarantined,
        truncated=written.truncated,
        facts=dict(written.sums),
        volatile={
            "built_at": started, "seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu,
            "host": gethostname(), "source": shard.part.file.uri, "source_bytes": shard.part.size,
        },
    )  # fmt: skip


def _taken(
    batch: RecordBatch, chosen: RowFilter, recipe: NllRecipe | EmbedRecipe, scoring: Scoring, books: Books
) -> _Rows:
    """The rows of a batch that are to be scored, keeping the books."""
    books.rows_in += batch.consumed
    books.drop("blank_line", batch.blank)
    bad, rows = list(batch.bad), _Rows()
    for number, record in zip(batch.rows.tolist(), batch.records, strict=True):
        if not chosen.keeps(record):
            books.drop("filtered")
            continue
        found = scoring.read(record) if _identifier(record) else _nameless(record)
        if isinstance(found, Rejected):
            bad.append(BadRow(number, found.reason, found.detail, excerpt_of(record)))
            continue
        rows.read.append(found)
        rows.numbers.append(number)
        for name, value in _names(record, recipe).items():
            rows.names[name].append(value)
    books.set_aside(sorted(bad, key=lambda row: row.row))
    return rows


def _identifier(record: Mapping[str, Any]) -> str | None:
    """What a row is joined by: its `row_id`, else its `id`."""
    return next((str(record[name]) for name in IDS if isinstance(record.get(name), str | int)), None)


def _nameless(record: Mapping[str, Any]) -> Rejected:
    found = {name: record.get(name) for name in IDS}
    return Rejected(
        "no_id", f"a score is joined by row_id or id, of which the row has neither as text or number: {found}"
    )


def _names(record: Mapping[str, Any], recipe: NllRecipe | EmbedRecipe) -> dict[str, str | None]:
    given = record.get("id")
    return {
        "row_id": _identifier(record),
        "id": None if given is None else str(given),
        "dataset": text_at(record, "dataset") or recipe.dataset,
        "split": text_at(record, "split") or recipe.split,
    }


def _write(rows: _Rows, scoring: Scoring, written: _Written, books: Books) -> None:
    """Score rows, and append those that have a score to the file."""
    found = scoring.scored(rows.read, lambda number: _place(books.part, rows, number))
    books.drop("no_completion", len(rows.read) - len(found.rows))
    if not len(found.rows):
        return
    names = {name: [values[row] for row in found.rows] for name, values in rows.names.items()}
    table = assembled(scoring.schema, names, found.table, scoring.same)
    if written.writer is None:
        file = cast("BinaryIO", books.open(FILE))
        written.writer = books.stack.enter_context(pq.ParquetWriter(file, table.schema, compression="zstd"))
    written.writer.write_table(table)
    written.documents += table.num_rows
    written.tokens += _total(table, scoring.tokens)
    written.truncated += _total(table, "truncated")
    written.sums.update({name: _total(table, name) for name in scoring.added})


def _total(table: pa.Table, name: str) -> Any:  # noqa: ANN401 - a number of the column's type
    return compute.call_function("sum", [table[name]]).as_py() or 0


def _place(part: Slice, rows: _Rows, number: int) -> str:
    """Where a row of a slice is, in words: counted from 1, as lines are."""
    return f"{part.file.uri}: row {first_row(part) + rows.numbers[number] + 1} (row_id {rows.names['row_id'][number]})"
