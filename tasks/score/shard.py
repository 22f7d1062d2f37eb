"""One shard of scores: a slice of rows becomes a Parquet file with a score for each, a quarantine file, and a receipt.

Rows are read a few megabytes at a time and scored together, so that an engine can sort them by length; each such batch is a row
group of the file. Unscored rows are counted by reason. A non-finite score fails the shard, with file and row, before anything
of it is published.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.plan import WHOLE, PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import RecordBatch, Slice
from tokenmill.tasks.sources.formats import first_row
from tokenmill.tasks.storage import open_binary

from .conversations import Conversations, text_at
from .embed import LENGTH_TOLERANCE, Embedder, as_stored
from .nll import Scorer, summed
from .settings import EmbedRecipe, NllRecipe
from .tables import NLL, PERCENTILE, SCHEMA, Place, assembled, embeddings

FILE = f"{WHOLE}.parquet"
IDS = ("row_id", "id")
NAMED = (*IDS, "dataset", "split")
"""The fields that identify a row, if present."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of some rows: a table of the score columns, and the indices of the rows that have one."""

    table: pa.Table
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class NllScoring:
    """The NLL of completions. `tokens` is the column with a row's number of tokens; columns `added` are summed in the facts."""

    recipe: NllRecipe
    conversations: Conversations
    scorer: Scorer
    tokens: str = "total_token_count"
    added: Sequence[str] = ("completion_token_count", "nll_sum")

    @property
    def schema(self) -> pa.Schema:
        return NLL

    @property
    def same(self) -> dict[str, str | None]:
        recipe = self.recipe
        return {
            "loss_mode": recipe.policy.name, "model": recipe.model, "model_revision": recipe.model_revision,
            "engine": recipe.engine, "dtype": recipe.precision,
        }  # fmt: skip

    @property
    def fields(self) -> Sequence[str]:
        return self.conversations.fields

    def read(self, record: Mapping[str, Any]) -> object | Rejected:
        return self.conversations.read(record)

    def scored(self, read: Sequence[Any], place: Place) -> Scored:
        """Return the scores of these inputs. Raises NonFiniteError, naming the place of the row.

        Rows without tokens to score don't get a score; rows truncated before the first one have nulls.
        """
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
        return embeddings(self.embedder.dimensions)

    @property
    def same(self) -> dict[str, str | None]:
        recipe = self.recipe
        return {
            "model": recipe.model, "model_revision": recipe.model_revision, "engine": recipe.engine,
            "pooling": recipe.pooling,
        }  # fmt: skip

    @property
    def fields(self) -> Sequence[str]:
        return self.recipe.fields

    def read(self, record: Mapping[str, Any]) -> str | Rejected:
        found = next((text for name in self.recipe.fields if (text := text_at(record, name)) is not None), None)
        if found is None:
            return Rejected("no_text", f"text not found under {' or '.join(map(repr, self.recipe.fields))}")
        return found if found.strip() else Rejected("empty_text", "the text is empty")

    def scored(self, read: Sequence[Any], place: Place) -> Scored:
        counts = self.embedder.token_counts(read)
        limit = self.embedder.max_tokens
        columns = {
            "embedding": as_stored(self.embedder.encode(read), place),
            "token_count": pa.array(counts, pa.int32()),
            "truncated": pa.array(counts > (np.inf if limit is None else limit)),
        }
        return Scored(pa.table(columns), np.arange(len(read)))


Scoring = NllScoring | EmbedScoring
Inputs = Conversations | Scoring
"""The scored part of a row: `fields` to read from a record, and `read`, which gives the input or the reason for a rejection."""


@dataclass(slots=True)
class _RowsToScore:
    """Rows to score: their names by field, their inputs, and their row numbers in the slice."""

    names: dict[str, list[str | None]]
    read: list[object]
    numbers: list[int]

    @classmethod
    def of(cls, batch: RecordBatch, read: Mapping[int, object], recipe: NllRecipe | EmbedRecipe) -> "_RowsToScore":
        """Return the rows of a batch that were `read`, by index."""
        records = [batch.records[index] for index in read]
        names: dict[str, list[str | None]] = {
            "row_id": [_identifier(record) for record in records],
            "id": [None if (own := record.get("id")) is None else str(own) for record in records],
            "dataset": [text_at(record, "dataset") or recipe.dataset for record in records],
            "split": [text_at(record, "split") or recipe.split for record in records],
        }
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
                sums.update(_write(_RowsToScore.of(batch, found, recipe), scoring, builder))
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
        if _identifier(record):
            return inputs.read(record)
        found = {name: record.get(name) for name in IDS}
        return Rejected(
            "no_id", f"a score is joined by row_id or id, of which the row has neither as text or number: {found}"
        )

    return builder.records([*NAMED, *inputs.fields], read)


def _identifier(record: Mapping[str, Any]) -> str | None:
    """The id to join a row by: its `row_id`, otherwise its `id`."""
    return next((str(record[name]) for name in IDS if isinstance(record.get(name), str | int)), None)


def _write(rows: _RowsToScore, scoring: Scoring, builder: ShardBuilder) -> dict[str, Any]:
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


def _place(part: Slice, rows: _RowsToScore, number: int) -> str:
    """Describe a row's position in a slice; rows count from 1, like lines."""
    return f"{part.file.uri}: row {first_row(part) + rows.numbers[number] + 1} (row_id {rows.names['row_id'][number]})"


HALF_TOLERANCE = LENGTH_TOLERANCE + 2e-3
"""Allowed deviation of a stored vector's length from 1; float16 is off by 0.05 % per number."""


def inspect_score_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of a shard's file: columns, ids, numbers, and counts against the receipt."""
    if not receipt.parts:
        return []
    place = store.path(receipt.key, FILE)
    try:
        with open_binary(place) as stream:
            table = pq.ParquetFile(stream).read(use_threads=False)
        return [f"{place}: {problem}" for problem in _problems(table, receipt)]
    except (pa.ArrowException, OSError, InputError, RunError) as error:
        return [f"{place}: cannot be read: {error}"]


def _problems(table: pa.Table, receipt: Receipt) -> Iterator[str]:
    nll, stored = receipt.identity["kind"] == "nll", table.schema
    found = stored.field("embedding").type if "embedding" in stored.names else None
    dimensions = found.list_size if found is not None and pa.types.is_fixed_size_list(found) else 1
    if not stored.equals(NLL if nll else embeddings(dimensions)):
        yield f"its columns are {stored.names}, not the columns of scores"
        return
    tokens = table["total_token_count" if nll else "token_count"].to_numpy().sum()
    if (table.num_rows, tokens) != (receipt.documents, receipt.tokens):
        said = f"its receipt records {receipt.documents:,} and {receipt.tokens:,}"
        yield f"holds {table.num_rows:,} rows of {tokens:,} tokens, {said}"
    ids = table["row_id"]
    if ids.null_count or len(ids.unique()) < len(ids):
        yield f"{ids.null_count:,} rows lack a row_id, {len(ids) - len(ids.unique()):,} share one with a different row"
    yield from _nll(table) if nll else _vectors(table)


def _nll(table: pa.Table) -> Iterator[str]:
    for name in [*SCHEMA.names, PERCENTILE]:
        if (
            pa.types.is_floating(table.schema.field(name).type)
            and not np.isfinite(table[name].drop_null().to_numpy()).all()
        ):
            yield f"column {name} holds NaN or infinities"
    missing = table["nll_mean"].is_null().to_numpy() != (table["completion_token_count"].to_numpy() == 0)
    if missing.any() or table["nll_mean"].null_count != table[PERCENTILE].null_count:
        yield "a row with scored tokens lacks a score, or a row without them has one"


def _vectors(table: pa.Table) -> Iterator[str]:
    stored = table["embedding"]
    flat = np.concatenate([np.empty(0, np.float16), *(chunk.flatten().to_numpy() for chunk in stored.chunks)])
    vectors = flat.astype(np.float32).reshape(len(stored), -1)
    if not np.isfinite(vectors).all():
        yield "column embedding holds NaN or infinities"
    elif np.any(np.abs(np.linalg.norm(vectors, axis=1) - 1) > HALF_TOLERANCE):
        yield "column embedding holds a vector whose length is not 1"
