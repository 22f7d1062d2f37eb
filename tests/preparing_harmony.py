"""A whole Harmony normalization in this process, without a Prefect server or Dask."""

import time
from dataclasses import replace
from functools import partial

from tokenmill.tasks.select.kind import HARMONY

from tests.building import build_here, build_shards, plan_here, prepare_here

plan = partial(plan_here, "harmony", max_bad_row_fraction=1.0)
prepare = partial(prepare_here, "harmony", max_bad_row_fraction=1.0)
build = partial(build_shards, "harmony")
"""As in `building`, with any share of bad rows, and whatever else is chosen."""


def finish(planned, build=build_here):
    """Everything after normalization, whose shards are built; the manifest."""
    pending = replace(planned, plan=replace(planned.plan, proven=planned.plan.store.proven(planned.plan.keys)))
    return HARMONY.publish(HARMONY.build(pending, build), time.time())


def left_behind(manifest):
    """How many rows do not stay, by reason; nothing where duplicates were left alone."""
    return {reason: count for reason, count in manifest["dedup"].get("tally", {}).items() if reason != "kept"}
