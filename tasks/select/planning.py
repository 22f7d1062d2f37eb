"""Plan a selection: give each final shard a selection shard with an identity."""

from collections.abc import Sequence
from dataclasses import asdict

import pyarrow as pa
from tokenmill.tasks.blend.predicates import parse_predicate
from tokenmill.tasks.dedup.contamination import evaluation_sources, find_evaluations
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.columns import SCHEMA
from tokenmill.tasks.shards.input_checks import require_separate, store_place
from tokenmill.tasks.shards.plan import Finished, Plan, PlannedShard
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.arrow_predicates import expression
from tokenmill.tasks.storage import absolute

from .pools import BUNDLED, Pools, load_pools
from .scores import FoundScores, score_columns, score_fields, score_folder
from .settings import NormalizationSettings, SelectionChoices, SelectionRecipe

KIND = "harmony-selection"
FORMAT_VERSION = 2
"""Increment it when the same recipe and rows give different bytes."""

SURVEYED_ROWS = 200_000
"""About the maximum number of rows surveyed for the report on collapse, and at least half of it if there are more."""

SHARE_STEPS = 1 << 16


def pools_of(choices: SelectionChoices) -> Pools:
    """The requested pools. Raises InputError for an invalid file."""
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
    """The shards of the selection, one for each final shard, all of which have rows."""
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
