"""A whole Harmony normalization in this process, without a Prefect server or Dask."""

import time
from dataclasses import replace

from tokenmill.tasks.select.kind import HARMONY

from tests.building import build_here, build_shards, plan_here, prepare_here


def plan(blend, output_dir, **settings):
    """The plan of `blend`, with any share of bad rows, and whatever else is chosen."""
    return plan_here("harmony", blend, output_dir, **{"max_bad_row_fraction": 1.0, **settings})


def prepare(blend, output_dir, **settings):
    """Plan, build every pending shard in plan order, publish; returns the plan and the manifest."""
    return prepare_here("harmony", blend, output_dir, **{"max_bad_row_fraction": 1.0, **settings})


def finish(planned, build=build_here):
    """Everything after normalization, whose shards are built; the manifest."""
    pending = replace(planned, plan=replace(planned.plan, proven=planned.plan.store.proven(planned.plan.keys)))
    return HARMONY.publish(HARMONY.build(pending, build), time.time())


def left_behind(manifest):
    """How many rows do not stay, by reason; nothing where duplicates were left alone."""
    return {reason: count for reason, count in manifest["dedup"].get("tally", {}).items() if reason != "kept"}


def build(planned, shards):
    """Build some of the planned shards, one after the other, in this process."""
    return build_shards("harmony", planned, shards)
