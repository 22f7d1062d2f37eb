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
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.predicates import parse_predicate
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

from .candidates import CARRIED, Candidates, Sample, candidates, reader, required, sampled
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
    for predicate in [*pools.base, *(pool.predicate for pool in pools.pools), require]:  # raises for what doesn't fit
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
    pools, rows = pools_of(choices), sum(item.receipt.documents for item in final)
    recipe = asdict(
        SelectionRecipe(
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
    )
    shards: list[PlannedShard] = []
    for item in final:
        source: dict[str, object] = {"content": item.key, "format": "parquet"}
        if files := scores.files.get(item.key):  # so that scores of other rows rebuild nothing
            source["scores"] = files
        identity = {"kind": KIND, "format_version": FORMAT_VERSION, "recipe": recipe, "source": source}
        shards.append(PlannedShard(item.shard.dataset, item.shard.split, item.shard.part, identity, (item.receipt,)))
    return Plan.of(store, shards, rebuild=rebuild)


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


def select_shard(shard: PlannedShard, store: Store, scores: Mapping[str, str]) -> Receipt:
    """Build one planned shard of a selection from the final shard whose key is the slice's content.

    `scores` maps the content hashes in its identity to places. Raises RunError if a source is missing or damaged, OSError from
    the storage.
    """
    (source,), recipe = shard.inputs, SelectionRecipe(**shard.identity["recipe"])
    sides = read_scores(recipe.scores, shard.identity["source"].get("scores", ()), scores)
    file = pq.ParquetFile(pa.BufferReader(store.read(source, FILE)))
    pools, require = parsed(recipe), parse_predicate(recipe.require, "selection.require")
    tallies, unscored, survey, columns = list[Counts](), Counter[int](), Survey(), None
    if not recipe.materialize:  # the text and what predicates, lists and candidates name
        predicates = [*pools.base, *(pool.predicate for pool in pools.pools), require]
        needed = {"id", "text", TOKENS, *LISTED.names, *CARRIED.names}.union(*(each.columns for each in predicates))
        columns = [name for name in ROWS.names if name in needed]
    with building(shard, store) as builder:
        for number in range(file.num_row_groups):
            rows = file.read_row_group(number, columns, use_threads=False)
            unscored.update({folder: without_score(rows, side) for folder, side in enumerate(sides)})
            rows = with_scores(rows, sides)
            if pools.pools:
                tallies.append(_write_pools(builder, rows, pools, recipe))
            read = reader(rows)  # candidates and the survey share it, so that each text is parsed once
            found = Candidates(CANDIDATES.empty_table(), Counter(no_view=rows.num_rows))
            if recipe.view is not None:
                found = candidates(rows, recipe.view, require, Sample(*recipe.sample), ROWS.names, read)
            builder.drops.update(found.drops)
            if found.rows.num_rows:
                builder.table(f"{PART}.parquet", CANDIDATES).write_table(found.rows)
                builder.keep(PART, found.rows.num_rows)
            asked = required(rows, require, ROWS.names)
            surveyed = sampled(rows["id"].take(pa.array(asked)).to_pylist(), Sample(*recipe.survey))
            survey.add_all(map(read, asked[surveyed].tolist()))
        builder.open(SURVEY).write(orjson.dumps(survey.record()))
        builder.rows_in = source.documents
        builder.facts = {"tally": added(tallies, len(pools.pools))} if tallies else {}
        if sides:
            builder.facts["without_score"] = [unscored[folder] for folder in range(len(sides))]
    return builder.receipt


def _write_pools(builder: ShardBuilder, rows: pa.Table, pools: Pools, recipe: SelectionRecipe) -> Counts:
    """Write the rows of each pool, and return their counts."""
    found = assign(rows, pools, ROWS.names)
    taken = found.unique() if recipe.unique else found
    shown = rows
    if not recipe.materialize:
        scores = [name for name in rows.column_names if name not in ROWS.names]
        shown = rows.select([*LISTED.names, *scores]).replace_schema_metadata(LISTED.metadata)
    for number in np.flatnonzero(taken.pools.any(axis=1)).tolist():  # an empty pool has no file
        writer = builder.table(f"{pool_part(number)}.parquet", shown.schema)
        writer.write_table(shown.filter(pa.array(taken.pools[number])))
    return tally(rows, found, taken)


def parsed(recipe: SelectionRecipe) -> Pools:
    """Return the pools of a recipe."""
    pools = [Pool(name, "", parse_predicate(text, f"pool {name!r}")) for name, text in recipe.pools]
    return Pools(tuple(parse_predicate(text, "base") for text in recipe.base), tuple(pools))


def inspect_normalization_shard(store: Store, receipt: Receipt) -> list[str]:
    """Report problems beyond sizes and hashes of a shard, either of rows or of a selection."""
    if receipt.identity["kind"] != KIND:
        return inspect_harmony_shard(store, receipt)
    pools = receipt.facts.get("tally", {}).get("pool_rows", [])
    counts = {PART: receipt.documents, **{pool_part(number): rows for number, rows in enumerate(pools)}}
    files, problems = {output.path.partition(".")[0] for output in receipt.outputs}, list[str]()
    for part, count in counts.items():
        place, found = store.path(receipt.key, f"{part}.parquet"), 0
        if part in files:  # a pool or candidates without rows have no file
            try:
                with open_binary(place) as stream:
                    found = sum(map(len, pq.ParquetFile(stream).iter_batches(use_threads=False)))
            except (pa.ArrowException, OSError) as error:
                problems.append(f"{place}: cannot be read as Parquet: {error}")
                continue
        if found != count:
            problems.append(f"{place}: holds {found:,} rows, its receipt records {count:,}")
    return problems
