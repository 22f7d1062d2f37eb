"""A whole Harmony normalization in this process, without a Prefect server or Dask."""

import time

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.dedup.stage import without_duplicates
from tokenmill.tasks.harmony.planning import plan_harmony
from tokenmill.tasks.harmony.preparation import build_harmony_shard, normalized_shards, publish_harmony
from tokenmill.tasks.select.publication import beside
from tokenmill.tasks.select.settings import NormalizationSettings
from tokenmill.tasks.select.stage import select
from tokenmill.tasks.shards.build import build_batch
from tokenmill.tasks.shards.plan import shard_record
from tokenmill.tasks.strict import parse

from tests.building import build_here


def plan(blend, output_dir, **settings):
    """The plan of `blend`, with any share of bad rows, and whatever else is chosen."""
    chosen = {"bad_row_ceiling": 1.0, **settings}
    return plan_harmony(load_blend(blend), parse(NormalizationSettings, chosen, "settings"), str(output_dir))


def prepare(blend, output_dir, **settings):
    """Plan, build every pending shard in plan order, publish; returns the plan and the manifest."""
    planned = plan(blend, output_dir, **settings)
    build(planned, planned.plan.pending)
    return planned, finish(planned)


def finish(planned, build_shards=build_here):
    """Everything after normalization; the manifest."""
    settings, store = planned.settings, planned.plan.store
    normalized, missing = normalized_shards(planned)
    rows = without_duplicates(normalized, settings.dedup, store, build_shards, rebuild=settings.force)
    selected = select(rows.final, settings.selection, store, build_shards, rebuild=settings.force)
    made = beside(selected, rows, settings.selection, store)
    return publish_harmony(planned, rows.final, missing, made, time.time())


def left_behind(manifest):
    """How many rows do not stay, by reason; nothing where duplicates were left alone."""
    return {reason: count for reason, count in manifest["dedup"].get("tally", {}).items() if reason != "kept"}


def build(planned, shards):
    """Build some of the planned shards, one after the other, in this process."""
    return build_batch(
        [shard_record(shard) for shard in shards],
        planned.plan.store,
        lambda shard, store: build_harmony_shard(shard, store, planned.settings.on_bad_row),
        announce=lambda record: None,
        rebuild=planned.settings.force,
    )
