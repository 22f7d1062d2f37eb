"""A whole deduplication in this process, without Prefect or Dask."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.dedup.apply import apply_decisions
from tokenmill.tasks.dedup.contamination import evaluations_from
from tokenmill.tasks.dedup.planning import plan_dedup
from tokenmill.tasks.dedup.preparation import publish_dedup
from tokenmill.tasks.dedup.rounds import KIND, decide
from tokenmill.tasks.dedup.settings import DedupSettings
from tokenmill.tasks.dedup.steps import build_shard
from tokenmill.tasks.shards.build import build_batch
from tokenmill.tasks.shards.identity import shard_key
from tokenmill.tasks.shards.plan import shard_record
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.strict import parse


class Run:
    """Builds rounds in this process, and remembers what was built: the names of the rounds, and the places of shards."""

    def __init__(self):
        self.built = []
        self.places = []

    def __call__(self, name, pending, common):
        evaluations = evaluations_from(common["evaluations"])
        done = build_batch(
            [shard_record(shard) for shard in pending],
            Store(common["store"], KIND),
            lambda shard, store: build_shard(shard, store, evaluations),
            announce=lambda record: None,
            rebuild=common["rebuild"],
        )
        self.built += [name for shard in done if not shard.reused]
        self.places += [shard.source for shard in done if not shard.reused]


def plan(blend, output_dir, **settings):
    """The plan of `blend`, with any share of bad rows, and whatever else is chosen."""
    chosen = {"bad_row_ceiling": 1.0, **settings}
    return plan_dedup(load_blend(blend), parse(DedupSettings, chosen, "settings"), str(output_dir))


def decisions_of(planned, run=None):
    """The decisions of a plan, built as far as they are not there."""
    settings = planned.settings
    return decide(planned.slices, settings.choices, planned.plan.store.place, run or Run(), rebuild=settings.force)


def build(planned, decisions, shards):
    """Build some of the decided shards, one after the other, in this process."""
    return build_batch(
        [shard_record(shard) for shard in shards],
        planned.plan.store,
        lambda shard, store: apply_decisions(shard, store, decisions.uri, planned.settings.on_bad_row),
        announce=lambda record: None,
        rebuild=planned.settings.force,
    )


def prepare(blend, output_dir, run=None, **settings):
    """Plan, decide, build every pending shard in plan order, publish; returns the decided plan and the manifest."""
    planned = plan(blend, output_dir, **settings)
    decisions = decisions_of(planned, run)
    decided = planned.decided(decisions)
    build(decided, decisions, decided.plan.pending)
    return decided, publish_dedup(decided, decisions, time.time())


def stored_conversations(folder, columns):
    """A file of normalized rows with these columns in a store, and a slice that names it."""
    identity, content = {"kind": "harmony", "source": {}}, pa.BufferOutputStream()
    pq.write_table(pa.table(columns), content, row_group_size=2)
    store = Store(str(folder), "harmony")
    place = store.path(shard_key(identity), "all.parquet")
    output = publish_bytes(place, content.getvalue().to_pybytes())
    store.issue(identity, outputs=[output], rows_in=0, parts={}, drops={})
    return Slice(SourceFile(place, output.size, "parquet"), 0, 1, content="harmony:0")
