"""A whole RL preparation in this process, without Prefect or Dask."""

import json
import time
from pathlib import Path

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.rl.planning import plan_rl
from tokenmill.tasks.rl.preparation import build_rl_shard, chain_records, publish_rl
from tokenmill.tasks.rl.settings import RlSettings
from tokenmill.tasks.shards.build import build_batch
from tokenmill.tasks.shards.plan import shard_record
from tokenmill.tasks.strict import parse

NOTHING_HELD_OUT = {"valid": 0, "test": 0}


def plan(blend, output_dir, **settings):
    """The plan of `blend`, nothing held out, any share of bad rows, and whatever else is chosen."""
    chosen = {"holdout": NOTHING_HELD_OUT, "bad_row_ceiling": 1.0, **settings}
    return plan_rl(load_blend(blend), parse(RlSettings, chosen, "settings"), str(output_dir))


def prepare(blend, output_dir, **settings):
    """Plan, build every pending shard in plan order, publish; returns the plan and the manifest."""
    planned = plan(blend, output_dir, **settings)
    build(planned, planned.plan.pending)
    return planned, publish_rl(planned, time.time())


def build(planned, shards):
    """Build some of the planned shards, one after the other, in this process."""
    settings, chains = planned.settings, chain_records(planned)
    return build_batch(
        [shard_record(shard) for shard in shards],
        planned.plan.store,
        lambda shard, store: build_rl_shard(shard, store, chains, settings.tokenizer, settings.on_bad_row),
        announce=lambda record: None,
        rebuild=settings.force,
    )


def write_rows(path, rows):
    """A JSON Lines file; rows that are bytes are written as they are."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def lines_of(path):
    """The lines of a published file, as bytes."""
    return Path(path).read_bytes().splitlines()
