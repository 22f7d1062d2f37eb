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
from tokenmill.tasks.sources.files import RecordBatch
from tokenmill.tasks.sources.formats import first_row
from tokenmill.tasks.storage import open_binary

from .conversations import Conversations, PlainTexts, text_at
from .embed import LENGTH_TOLERANCE, Embedder, as_stored
from .nll import Scorer, summed
from .settings import EmbedRecipe, NllRecipe
from .tables import NLL, PERCENTILE, SCHEMA, Place, assembled, embeddings

FILE = f"{WHOLE}.parquet"
IDS = ("row_id", "id")
NAMED = (*IDS, "dataset", "split")  # the fields that identify a row, if present

# Allowed deviation of a stored vector's length from 1; float16 is off by 0.05 % per number.
HALF_TOLERANCE = LENGTH_TOLERANCE + 2e-3


@dataclass(frozen=True, slots=True)
class NllScoring:
    """The NLL of completions. `tokens` is the column with a row's number of tokens; columns `added` are summed in the facts."""

    recipe: NllRecipe
    inputs: Conversations
    scorer: Scorer
    tokens: str = "total_token_count"
    added: Sequence[str] = ("completion_token_count", "nll_sum")

    @property
    def schema(self) -> pa.Schema:
        return NLL

    @property
    def same(self) -> dict[str, str | None]:
        """The columns with one value for all rows."""
        recipe = self.recipe
        return {
            "loss_mode": recipe.policy.name, "model": recipe.model, "model_revision": recipe.model_revision,
            "engine": recipe.engine, "dtype": recipe.precision,
        }  # fmt: skip

    def scored(self, read: Sequence[Any], place: Place) -> tuple[pa.Table, np.ndarray]:
        """Return the score columns, and the indices of the rows that have a score. Raises NonFiniteError, naming the row."""
        found = self.inputs.sequenced(read)
        table = self.scorer.score(found.completions, lambda number: place(int(found.owners[number])))
        table = summed(table, found.owners, len(read))
        # A row truncated before its first scored token stays, with nulls; a row without tokens to score doesn't.
        some = (table["completion_token_count"].to_numpy() > 0) | (table["cut_token_count"].to_numpy() > 0)
        rows = np.flatnonzero(some)
        return table.take(pa.array(rows)), rows


@dataclass(frozen=True, slots=True)
class EmbedScoring:
    """The embeddings of texts; `tokens` and `added` are as in `NllScoring`."""

    recipe: EmbedRecipe
    inputs: PlainTexts
    embedder: Embedder
    tokens: str = "token_count"
    added: Sequence[str] = ()

    @property
    def schema(self) -> pa.Schema:
        return embeddings(self.embedder.dimensions)

    @property
    def same(self) -> dict[str, str | None]:
        """The columns with one value for all rows."""
        recipe = self.recipe
        return {
            "model": recipe.model, "model_revision": recipe.model_revision, "engine": recipe.engine,
            "pooling": recipe.pooling,
        }  # fmt: skip

    def scored(self, read: Sequence[Any], place: Place) -> tuple[pa.Table, np.ndarray]:
        """Return the score columns, and the indices of all rows. Raises NonFiniteError, naming the row."""
        counts = self.embedder.token_counts(read)
        limit = self.embedder.max_tokens
        columns = {
            "embedding": as_stored(self.embedder.encode(read), place),
            "token_count": pa.array(counts, pa.int32()),
            "truncated": pa.array(counts > (np.inf if limit is None else limit)),
        }
        return pa.table(columns), np.arange(len(read))


Scoring = NllScoring | EmbedScoring


def score_shard(shard: PlannedShard, scoring: Scoring, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build a shard of scores.

    Raises NonFiniteError for a non-finite score, BadRowError for a bad row if the policy is `fail`, RunError if the source
    changed since the plan, OSError from the storage.
    """
    sums = Counter[str]()
    with building(shard, store, on_bad_row) as builder:
        for batch, read in _read(builder, scoring.inputs):
            if read:
                sums.update(_score_batch(batch, read, scoring, builder))
        builder.facts.update(sums)
    return builder.receipt


def read_shard(shard: PlannedShard, inputs: Conversations | PlainTexts, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build a shard that counts the rows to score. Raises as `score_shard` does."""
    with building(shard, store, on_bad_row) as builder:
        for _, read in _read(builder, inputs):
            builder.keep(WHOLE, len(read))
    return builder.receipt


def _read(builder: ShardBuilder, inputs: Conversations | PlainTexts) -> Iterator[tuple[RecordBatch, dict[int, object]]]:
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


def _score_batch(
    batch: RecordBatch, read: Mapping[int, object], scoring: Scoring, builder: ShardBuilder
) -> dict[str, Any]:
    """Score the rows of a batch that were `read`, append those with a score to the file, and return the sums of columns."""
    recipe, records = scoring.recipe, [batch.records[index] for index in read]
    names = {
        "row_id": [_identifier(record) for record in records],
        "id": [None if (own := record.get("id")) is None else str(own) for record in records],
        "dataset": [text_at(record, "dataset") or recipe.dataset for record in records],
        "split": [text_at(record, "split") or recipe.split for record in records],
    }
    part, numbers = builder.shard.part, batch.rows[list(read)].tolist()

    def place(row: int) -> str:
        number = first_row(part) + numbers[row] + 1  # counts from 1, like lines
        return f"{part.file.uri}: row {number} (row_id {names['row_id'][row]})"

    def total(name: str) -> Any:  # noqa: ANN401 - a number of the column's type
        return compute.call_function("sum", [table[name]]).as_py() or 0

    scores, rows = scoring.scored(list(read.values()), place)
    builder.drop("no_completion", len(records) - len(rows))
    if not len(rows):
        return {}
    scored = {name: [values[row] for row in rows] for name, values in names.items()}
    table = assembled(scoring.schema, scored, scores, scoring.same)
    builder.table(FILE, table.schema).write_table(table)
    builder.keep(WHOLE, table.num_rows, total(scoring.tokens))
    builder.truncated += total("truncated")
    return {name: total(name) for name in scoring.added}


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
    if nll:
        for name in [*SCHEMA.names, PERCENTILE]:
            floating = pa.types.is_floating(stored.field(name).type)
            if floating and not np.isfinite(table[name].drop_null().to_numpy()).all():
                yield f"column {name} holds NaN or infinities"
        missing = table["nll_mean"].is_null().to_numpy() != (table["completion_token_count"].to_numpy() == 0)
        if missing.any() or table["nll_mean"].null_count != table[PERCENTILE].null_count:
            yield "a row with scored tokens lacks a score, or a row without them has one"
        return
    # Concatenating with an empty array keeps the type where the column doesn't have chunks.
    flat = np.concatenate(
        [np.empty(0, np.float16), *(chunk.flatten().to_numpy() for chunk in table["embedding"].chunks)]
    )
    vectors = flat.astype(np.float32).reshape(table.num_rows, -1)
    if not np.isfinite(vectors).all():
        yield "column embedding holds NaN or infinities"
    elif np.any(np.abs(np.linalg.norm(vectors, axis=1) - 1) > HALF_TOLERANCE):
        yield "column embedding holds a vector whose length is not 1"
