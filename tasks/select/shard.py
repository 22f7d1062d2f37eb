"""Build one shard of a selection: the rows of one final shard, in their pools, and as candidates.

    pool-000.parquet …     the rows of each pool, with all their columns; no file for an empty pool
    candidates.parquet     a text per row to embed, and columns for interpreting the result
    survey.json            behaviors of a sample of the candidates, for the report on collapse

Scores are joined to the rows first: predicates may name them, and the rows of pools have them as columns. The receipt counts
every row as a candidate or as dropped, with a reason. Pools may share rows; their counts are the receipt's `facts`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.columns import SCHEMA as ROWS
from tokenmill.tasks.harmony.shard import FILE
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store

from .candidates import SCHEMA as CANDIDATES
from .candidates import Candidates, Sample, candidates, sampled
from .collapse import Survey, survey
from .pools import Pool, Pools, Tally, assign, tally
from .predicates import Predicate, masks, parse_predicate
from .scores import read_scores, with_scores, without_score
from .settings import SelectionRecipe

PART = "candidates"
SURVEY = "survey.json"


def pool_part(number: int) -> str:
    """The name of a pool's file in a shard; names of pools may hold dots."""
    return f"pool-{number:03d}"


def select_shard(shard: PlannedShard, recipe: SelectionRecipe, store: Store, scores: Mapping[str, str]) -> Receipt:
    """Build one shard from the final shard whose key is the slice's content.

    `scores` maps the content hashes in its identity to places. Raises RunError if a source is missing or damaged, OSError from
    the storage.
    """
    source = store.receipt(shard.identity["source"]["content"])
    if source is None:
        raise RunError(f"{shard.place}: the shard of rows is missing; run the same command again to build it")
    sides = read_scores(recipe.scores, shard.identity["source"].get("scores", ()), scores)
    file = pq.ParquetFile(pa.BufferReader(store.read(source, FILE)))
    with building(shard, store) as builder:
        selected = _Selected(recipe, sides, builder)
        for number in range(file.num_row_groups):
            selected.take(file.read_row_group(number, use_threads=False))
        builder.open(SURVEY).write(orjson.dumps(selected.survey.record()))
        builder.rows_in, builder.facts = source.documents, selected.facts
    return builder.receipt


def parsed(recipe: SelectionRecipe) -> Pools:
    """The pools of a recipe."""
    pools = [Pool(name, "", parse_predicate(text, f"pool {name!r}")) for name, text in recipe.pools]
    return Pools(tuple(parse_predicate(text, "base") for text in recipe.base), tuple(pools))


@dataclass(slots=True)
class _Selected:
    """Select rows of a shard, and count pools and candidates."""

    recipe: SelectionRecipe
    sides: Sequence[pa.Table]
    builder: ShardBuilder
    tally: Tally | None = None
    without_score: Counter[int] = field(default_factory=Counter[int])
    survey: Survey = field(default_factory=Survey)

    def take(self, rows: pa.Table) -> None:
        """Assign rows to pools, and write candidates."""
        self.without_score.update({number: without_score(rows, side) for number, side in enumerate(self.sides)})
        rows = with_scores(rows, self.sides)
        pools = parsed(self.recipe)
        if pools.pools:
            found = assign(rows, pools, ROWS.names)
            taken = found.unique() if self.recipe.unique else found
            counts = tally(rows, found, taken)
            self.tally = counts if self.tally is None else self.tally + counts
            for number, mask in enumerate(taken.pools):
                self._write(pool_part(number), rows.filter(pa.array(mask)))
        found = self._shown(rows)
        self._write(PART, found.rows)
        self.builder.drops.update(found.drops)
        if found.rows.num_rows:
            self.builder.keep(PART, found.rows.num_rows)
        required = rows.filter(pa.array(masks(rows, [self._require.on(rows.schema, ROWS.names)])[0]))
        surveyed = sampled(required["id"].to_pylist(), Sample(*self.recipe.survey))
        self.survey += survey(required["text"].filter(pa.array(surveyed)).to_pylist())

    def _shown(self, rows: pa.Table) -> Candidates:
        if self.recipe.view is None:
            return Candidates(CANDIDATES.empty_table(), Counter(no_view=rows.num_rows))
        return candidates(rows, self.recipe.view, self._require, Sample(*self.recipe.sample), ROWS.names)

    @property
    def _require(self) -> Predicate:
        return parse_predicate(self.recipe.require, "selection.require")

    def _write(self, part: str, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self.builder.table(f"{part}.parquet", rows.schema).write_table(rows)

    @property
    def facts(self) -> dict[str, Any]:
        """The counts of the pools, and the number of rows without a score of each folder."""
        missing = [self.without_score[number] for number in range(len(self.sides))]
        pools = {"tally": self.tally.record()} if self.tally else {}
        return {**pools, "without_score": missing} if self.sides else pools
