"""Whole preparations in this process, without Prefect or Dask: what tests of their parts and guarantees stand on."""

import time
from dataclasses import replace

from tokenmill.tasks.shards.build import build_batch
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.strict import parse


def build_here(stage, pending, store, arguments, *, rebuild=False, announce=lambda record: None):
    """Build the pending shards one after the other, as one batch of a mapped task; the receipt of each."""
    return build_batch(pending, store, stage.building(arguments), announce, rebuild=rebuild)


def plan_here(kind, blend, output_dir, **settings):
    """The plan of `blend` for a kind of preparation."""
    chosen = parse(preparation(kind).settings, settings, "settings")
    return preparation(kind).plan(preparation(kind).read_blend(blend), chosen, str(output_dir))


def build_shards(kind, planned, shards):
    """Build some of the planned shards of a kind, one after the other; the receipt of each."""
    (first, *_), rebuild = preparation(kind).stages, planned.settings.force
    return build_here(first, shards, planned.plan.store, first.arguments(planned), rebuild=rebuild)


def built_here(kind, planned):
    """The plan with what the store has of its first stage, and the later stages built."""

    def build(stage, pending, store, arguments, *, rebuild):
        if stage != preparation(kind).stages[0]:
            return build_here(stage, pending, store, arguments, rebuild=rebuild)
        return [*store.proven([shard.key for shard in pending]).values()]

    return preparation(kind).build(planned, build)


def publish_here(kind, planned, started=None):
    """Publish what is built; the manifest."""
    return preparation(kind).publish(built_here(kind, planned), time.time() if started is None else started)


def prepare_here(kind, blend, output_dir, build=build_here, **settings):
    """Plan, build every pending shard in plan order, publish; returns the plan of what is published, as it was before, and the
    manifest.
    """
    built = preparation(kind).build(plan_here(kind, blend, output_dir, **settings), build)
    manifest, plan = preparation(kind).publish(built, time.time()), built.plan
    before = {key: receipt for key, receipt in plan.proven.items() if key not in plan.built}
    return replace(built, plan=replace(plan, proven=before)), manifest
