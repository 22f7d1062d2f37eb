"""Whole preparations in this process, without Prefect or Dask: what tests of their parts and guarantees stand on."""

import time

from tokenmill.tasks.pack.preparation import pack_sequences
from tokenmill.tasks.shards.build import build_batch
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.plan import shard_record
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.preparation import join_prefixes


def build_here(step, pending, store, arguments, *, rebuild=False):
    """Build the pending shards one after the other, as one batch of a mapped task; a record of each."""
    records = [shard_record(shard) for shard in pending]
    return build_batch(records, store, step.building(arguments), announce=lambda record: None, rebuild=rebuild)


def plan_here(kind, blend, output_dir, **settings):
    """The plan of `blend` for a kind of preparation."""
    chosen = parse(preparation(kind).settings, settings, "settings")
    return preparation(kind).plan(preparation(kind).read_blend(blend), chosen, str(output_dir))


def build_shards(kind, planned, shards):
    """Build some of the planned shards of a kind, one after the other; a record of each."""
    record = preparation(kind)
    return build_here(
        record.step, shards, planned.plan.store, record.arguments(planned), rebuild=planned.settings.force
    )


def publish_here(kind, planned, started=None):
    """Publish what is built; the manifest."""
    if kind == "pretrain":
        join_prefixes(planned, build_here)
    if kind == "sft":
        pack_sequences(planned, build_here)
    return preparation(kind).publish(planned, time.time() if started is None else started)


def prepare_here(kind, blend, output_dir, build=build_here, **settings):
    """Plan, build every pending shard in plan order, publish; returns the plan of what is published and the manifest."""
    planned = preparation(kind).build(plan_here(kind, blend, output_dir, **settings), build)
    return planned, publish_here(kind, planned)
