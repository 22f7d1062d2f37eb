"""Build one shard of a selection: the rows in one final shard, in their pools, and as candidates.

    pool-000.parquet …     the list of each pool's rows, or the rows themselves; no file for an empty pool
    candidates.parquet     a text per row to embed, and columns for interpreting the result
    survey.json            behaviors of a sample of the candidates, for the report on collapse

Scores are joined to the rows first: predicates may name them, and pools have them as columns. The receipt counts every row as
a candidate or as dropped, with a reason. Pools may share rows; their counts are the receipt's `facts`.

A row is in two or three of the bundled pools, so copies take as much disk as two or three times the rows, and half of the time of
a selection. Lists are the default; `selection.materialize` asks for copies. Each final shard has one
selection shard.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.predicates import Predicate, parse_predicate
from tokenmill.tasks.dedup.contamination import evaluation_sources, find_evaluations
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.columns import SCHEMA
from tokenmill.tasks.harmony.columns import SCHEMA as ROWS
from tokenmill.tasks.harmony.shard import FILE, inspect_harmony_shard
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.plan import Finished, Plan, PlannedShard
from tokenmill.tasks.shards.planning import require_separate, store_place
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.arrow_predicates import expression
from tokenmill.tasks.sources.parquet import NOTE
from tokenmill.tasks.storage import absolute, open_binary

from .candidates import CARRIED, Candidates, Read, Sample, candidates, reader, required, sampled
from .candidates import SCHEMA as CANDIDATES
from .collapse import Survey
from .pools import BUNDLED, TOKENS, Counts, Pool, Pools, added, assign, load_pools, tally
from .scores import FoundScores, read_scores, score_columns, score_fields, score_folder, with_scores, without_score
from .settings import NormalizationSettings, SelectionChoices, SelectionRecipe

KIND = "harmony-selection"
FORMAT_VERSION = 2
"""Increment it when the same recipe and rows give different bytes."""

SURVEYED_ROWS = 200_000
"""About the maximum number of rows surveyed for the report on collapse, and at least half of it if there are more."""

SHARE_STEPS = 1 << 16


def pools_of(choices: SelectionChoices) -> Pools:
    """Return the requested pools. Raises InputError for an invalid file."""
    if choices.pools == "none":
        return Pools((), ())
    return load_pools(BUNDLED if choices.pools == "bundled" else choices.pools)


def require_selectable(choices: SelectionChoices) -> None:
    """Raises InputError for pools or a predicate that do not fit the columns of Harmony rows and of scores."""
    scored = score_columns([score_folder(place) for place in choices.scores])
    schema = pa.schema([*SCHEMA, *score_fields(scored)])
    pools = pools_of(choices)
    require = parse_predicate(choices.require, "selection.require")
    for predicate in [*pools.base, *(pool.predicate for pool in pools.pools), require]:
        expression(predicate, schema)


def require_fitting(settings: NormalizationSettings, output_dir: str) -> None:
    """Raises InputError, before anything is built, for settings that a later stage would reject."""
    output_dir = absolute(output_dir)
    require_selectable(settings.selection)
    for place in settings.selection.scores:
        if absolute(place) == output_dir:
            raise InputError(
                f"selection.scores: {place} would be replaced by the output; choose a different output folder"
            )
    find_evaluations(settings.dedup.evaluations)
    sources = evaluation_sources(settings.dedup.evaluations)
    require_separate(sources, store_place(settings.store, output_dir), output_dir)


def plan_selection(
    final: Sequence[Finished], choices: SelectionChoices, scores: FoundScores, store: Store, *, rebuild: bool
) -> Plan:
    """Return the shards of the selection, one for each final shard, all of which have rows."""
    recipe = asdict(_recipe(choices, scores, sum(item.receipt.documents for item in final)))
    return Plan.of(store, [_shard(item, recipe, scores) for item in final], rebuild=rebuild)


def _recipe(choices: SelectionChoices, scores: FoundScores, rows: int) -> SelectionRecipe:
    pools = pools_of(choices)
    return SelectionRecipe(
        base=[predicate.text for predicate in pools.base],
        pools=[(pool.name, pool.predicate.text) for pool in pools.pools],
        scores=scores.columns,
        unique=choices.unique,
        materialize=choices.materialize,
        view=None if choices.view == "none" else choices.view,
        require=choices.require,
        sample=(SHARE_STEPS, max(1, round(choices.share * SHARE_STEPS))),
        survey=(1 << ((rows - 1) // SURVEYED_ROWS).bit_length(), 1),
    )


def _shard(item: Finished, recipe: dict[str, object], scores: FoundScores) -> PlannedShard:
    """The selection shard of a final shard and the scores of its rows, at the same position in the plan."""
    source: dict[str, object] = {"content": item.key, "format": "parquet"}
    if files := scores.files.get(item.key):
        source["scores"] = files
    identity = {"kind": KIND, "format_version": FORMAT_VERSION, "recipe": recipe, "source": source}
    return PlannedShard(item.shard.dataset, item.shard.split, item.shard.part, identity, (item.receipt,))


PART = "candidates"
SURVEY = "survey.json"


def pool_part(number: int) -> str:
    """Return the name of a pool's file in a shard; pool names may contain dots."""
    return f"pool-{number:03d}"


LISTED = pa.schema(
    [ROWS.field("row_id"), ROWS.field("source_row")],
    {NOTE: "It lists the rows of a pool; to get the rows themselves, use selection.materialize=true."},
)
"""A list of rows, without the columns of scores."""


def select_shard(shard: PlannedShard, recipe: SelectionRecipe, store: Store, scores: Mapping[str, str]) -> Receipt:
    """Build one shard from the final shard whose key is the slice's content.

    `scores` maps the content hashes in its identity to places. Raises RunError if a source is missing or damaged, OSError from
    the storage.
    """
    (source,) = shard.inputs
    sides = read_scores(recipe.scores, shard.identity["source"].get("scores", ()), scores)
    file = pq.ParquetFile(pa.BufferReader(store.read(source, FILE)))
    columns = None if recipe.materialize else columns_read(recipe)
    with building(shard, store) as builder:
        selected = _Selected.of(recipe, sides, builder)
        for number in range(file.num_row_groups):
            selected.take(file.read_row_group(number, columns, use_threads=False))
        builder.open(SURVEY).write(orjson.dumps(selected.survey.record()))
        builder.rows_in, builder.facts = source.documents, selected.facts
    return builder.receipt


def columns_read(recipe: SelectionRecipe) -> list[str]:
    """Return the columns of rows that a selection without copies needs."""
    pools = parsed(recipe)
    predicates = [*pools.base, *(pool.predicate for pool in pools.pools), parse_predicate(recipe.require)]
    needed = {"id", "text", TOKENS, *LISTED.names, *CARRIED.names}.union(*(each.columns for each in predicates))
    return [name for name in ROWS.names if name in needed]


def _listed(rows: pa.Table) -> pa.Table:
    """Rows as a list of them: the columns of LISTED, and the scores."""
    scores = [name for name in rows.column_names if name not in ROWS.names]
    return rows.select([*LISTED.names, *scores]).replace_schema_metadata(LISTED.metadata)


def parsed(recipe: SelectionRecipe) -> Pools:
    """Return the pools of a recipe."""
    pools = [Pool(name, "", parse_predicate(text, f"pool {name!r}")) for name, text in recipe.pools]
    return Pools(tuple(parse_predicate(text, "base") for text in recipe.base), tuple(pools))


@dataclass(slots=True)
class _Selected:
    """Select rows of a shard, and count pools and candidates."""

    recipe: SelectionRecipe
    pools: Pools
    require: Predicate
    sides: Sequence[pa.Table]
    builder: ShardBuilder
    tallies: list[Counts] = field(default_factory=list[Counts])
    without_score: Counter[int] = field(default_factory=Counter[int])
    survey: Survey = field(default_factory=Survey)

    @classmethod
    def of(cls, recipe: SelectionRecipe, sides: Sequence[pa.Table], builder: ShardBuilder) -> "_Selected":
        """Nothing selected yet."""
        return cls(recipe, parsed(recipe), parse_predicate(recipe.require, "selection.require"), sides, builder)

    def take(self, rows: pa.Table) -> None:
        """Assign rows to pools, and write candidates."""
        self.without_score.update({number: without_score(rows, side) for number, side in enumerate(self.sides)})
        rows = with_scores(rows, self.sides)
        if self.pools.pools:
            self._assign(rows)
        read = reader(rows)
        found = self._shown(rows, read)
        self.builder.drops.update(found.drops)
        if found.rows.num_rows:
            self.builder.table(f"{PART}.parquet", CANDIDATES).write_table(found.rows)
            self.builder.keep(PART, found.rows.num_rows)
        asked = required(rows, self.require, ROWS.names)
        surveyed = sampled(rows["id"].take(pa.array(asked)).to_pylist(), Sample(*self.recipe.survey))
        self.survey.add_all(map(read, asked[surveyed].tolist()))

    def _shown(self, rows: pa.Table, read: Read) -> Candidates:
        if self.recipe.view is None:
            return Candidates(CANDIDATES.empty_table(), Counter(no_view=rows.num_rows))
        return candidates(rows, self.recipe.view, self.require, Sample(*self.recipe.sample), ROWS.names, read)

    def _assign(self, rows: pa.Table) -> None:
        """Count and write the rows of each pool."""
        found = assign(rows, self.pools, ROWS.names)
        taken = found.unique() if self.recipe.unique else found
        self.tallies.append(tally(rows, found, taken))
        shown = rows if self.recipe.materialize else _listed(rows)
        for number in np.flatnonzero(taken.pools.any(axis=1)).tolist():
            writer = self.builder.table(f"{pool_part(number)}.parquet", shown.schema)
            writer.write_table(shown.filter(pa.array(taken.pools[number])))

    @property
    def facts(self) -> dict[str, Any]:
        """The counts of the pools, and the number of rows without a score of each folder."""
        missing = [self.without_score[number] for number in range(len(self.sides))]
        pools = {"tally": added(self.tallies, len(self.pools.pools))} if self.tallies else {}
        return {**pools, "without_score": missing} if self.sides else pools


def inspect_normalization_shard(store: Store, receipt: Receipt) -> list[str]:
    """Report problems beyond sizes and hashes of a shard, either of rows or of a selection."""
    if receipt.identity["kind"] != KIND:
        return inspect_harmony_shard(store, receipt)
    return list(_problems_of(store, receipt))


def _problems_of(store: Store, receipt: Receipt) -> Iterator[str]:
    """Check that the files hold the recorded numbers of rows."""
    pools = receipt.facts.get("tally", {}).get("pool_rows", [])
    counts = {PART: receipt.documents, **{pool_part(number): rows for number, rows in enumerate(pools)}}
    files = {output.path.partition(".")[0] for output in receipt.outputs}
    for part, count in counts.items():
        place = store.path(receipt.key, f"{part}.parquet")
        if part not in files:
            found = 0
        else:
            try:
                found = _count_rows(place)
            except (pa.ArrowException, OSError) as error:
                yield f"{place}: cannot be read as Parquet: {error}"
                continue
        if found != count:
            yield f"{place}: holds {found:,} rows, its receipt records {count:,}"


def _count_rows(place: str) -> int:
    """Read every row of a file."""
    with open_binary(place) as stream:
        return sum(len(batch) for batch in pq.ParquetFile(stream).iter_batches(use_threads=False))
