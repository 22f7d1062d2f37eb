"""One shard of scores: a slice of rows becomes a Parquet file with a score for each, a quarantine file, and a receipt.

Rows are read a few megabytes at a time and scored together, so that an engine can sort them by length; each such batch is a row
group of the file. Unscored rows are counted by reason. A non-finite score fails the shard, with file and row, before anything
of it is published.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import RecordBatch, Slice
from tokenmill.tasks.sources.formats import first_row

from .conversations import Conversations, text_at
from .embed import Embedder, as_stored
from .nll import Scorer, summed
from .settings import EmbedRecipe, NllRecipe
from .tables import NLL, Place, assembled, embeddings

FILE = f"{WHOLE}.parquet"
IDS = ("row_id", "id")
NAMED = (*IDS, "dataset", "split")
"""The fields that identify a row, if present."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of some rows: a table of the score columns, and the indices of the rows that have one."""

    table: pa.Table
    rows: np.ndarray


class Inputs(Protocol):
    """What is scored of a row."""

    @property
    def fields(self) -> Sequence[str]:
        """The fields to read of a record."""
        ...

    def read(self, record: Mapping[str, Any], /) -> object | Rejected:
        """The input to score in a record, or the reason why there is none."""
        ...


class Scoring(Inputs, Protocol):
    """A kind of score."""

    @property
    def tokens(self) -> str:
        """The column with a row's number of tokens."""
        ...

    @property
    def added(self) -> Sequence[str]:
        """The columns summed in the facts of the shard."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """The columns of the file."""
        ...

    @property
    def same(self) -> Mapping[str, str | None]:
        """Columns with a single value."""
        ...

    def scored(self, read: Sequence[Any], place: Place) -> Scored:
        """The scores of these inputs. Raises NonFiniteError, naming the place of the row."""
        ...


@dataclass(frozen=True, slots=True)
class NllScoring:
    """The NLL of completions."""

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
            "loss_mode": recipe.policy.name, "model": recipe.model, "model_revision": recipe.model_revision,
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
        """See Scoring. Rows without tokens to score have no score; rows truncated before the first one have nulls."""
        found = self.conversations.sequenced(read)
        table = self.scorer.score(found.completions, lambda number: place(int(found.owners[number])))
        table = summed(table, found.owners, len(read))
        some = (table["completion_token_count"].to_numpy() > 0) | (table["cut_token_count"].to_numpy() > 0)
        rows = np.flatnonzero(some)
        return Scored(table.take(pa.array(rows)), rows)


@dataclass(frozen=True, slots=True)
class EmbedScoring:
    """The embeddings of texts."""

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
    """Rows to score: their names by field, their inputs, and their row numbers in the slice."""

    names: dict[str, list[str | None]]
    read: list[object]
    numbers: list[int]

    @classmethod
    def of(cls, batch: RecordBatch, read: Mapping[int, object], recipe: NllRecipe | EmbedRecipe) -> "_Rows":
        """The rows of a batch that were `read`, by index."""
        named = [_names(batch.records[index], recipe) for index in read]
        names = {name: [each[name] for each in named] for name in NAMED}
        return cls(names, list(read.values()), batch.rows[list(read)].tolist())


def score_shard(
    shard: PlannedShard, recipe: NllRecipe | EmbedRecipe, scoring: Scoring, store: Store, on_bad_row: OnBadRow
) -> Receipt:
    """Build a shard of scores.

    Raises NonFiniteError for a non-finite score, BadRowError for a bad row if the policy is `fail`, RunError if the source
    changed since the plan, OSError from the storage.
    """
    sums = Counter[str]()
    with building(shard, store, on_bad_row) as builder:
        for batch, found in _read(builder, scoring):
            if found:
                sums.update(_write(_Rows.of(batch, found, recipe), scoring, builder))
        builder.facts.update(sums)
    return builder.receipt


def read_shard(shard: PlannedShard, inputs: Inputs, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build a shard that counts the rows to score. Raises as `score_shard` does."""
    with building(shard, store, on_bad_row) as builder:
        for _, found in _read(builder, inputs):
            builder.keep(WHOLE, len(found))
    return builder.receipt


def _read(builder: ShardBuilder, inputs: Inputs) -> Iterator[tuple[RecordBatch, dict[int, object]]]:
    """Each batch of rows, with the inputs in it by index."""

    def read(batch: RecordBatch, index: int) -> object | Rejected:
        record = batch.records[index]
        return inputs.read(record) if _identifier(record) else _without_id(record)

    return builder.records([*NAMED, *inputs.fields], read)


def _identifier(record: Mapping[str, Any]) -> str | None:
    """The id to join a row by: its `row_id`, otherwise its `id`."""
    return next((str(record[name]) for name in IDS if isinstance(record.get(name), str | int)), None)


def _without_id(record: Mapping[str, Any]) -> Rejected:
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


def _write(rows: _Rows, scoring: Scoring, builder: ShardBuilder) -> dict[str, Any]:
    """Score rows and append those with a score to the file; return the sums of their columns."""
    found = scoring.scored(rows.read, lambda number: _place(builder.shard.part, rows, number))
    builder.drop("no_completion", len(rows.read) - len(found.rows))
    if not len(found.rows):
        return {}
    names = {name: [values[row] for row in found.rows] for name, values in rows.names.items()}
    table = assembled(scoring.schema, names, found.table, scoring.same)
    builder.table(FILE, table.schema).write_table(table)
    builder.keep(WHOLE, table.num_rows, _total(table, scoring.tokens))
    builder.truncated += _total(table, "truncated")
    return {name: _total(table, name) for name in scoring.added}


def _total(table: pa.Table, name: str) -> Any:  # noqa: ANN401 - a number of the column's type
    return compute.call_function("sum", [table[name]]).as_py() or 0


def _place(part: Slice, rows: _Rows, number: int) -> str:
    """Describe a row's position in a slice; rows count from 1, like lines."""
    return f"{part.file.uri}: row {first_row(part) + rows.numbers[number] + 1} (row_id {rows.names['row_id'][number]})"
