"""A whole deduplication in this process, without Prefect or Dask."""

from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.dedup.kind import decided_plan
from tokenmill.tasks.dedup.rounds import decide
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import shard_key
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice, SourceFile

from tests.building import build_here, build_shards, plan_here, prepare_here


class Run:
    """Builds shards in this process, and remembers what was built: the names of the rounds, and the places of shards."""

    def __init__(self):
        self.built = []
        self.places = []

    def __call__(self, step, pending, store, arguments, *, rebuild):
        def note(shard):
            if step.name.startswith("dedup-") and not shard["reused"]:
                self.built.append(step.name.removeprefix("dedup-"))
                self.places.append(shard["source"])

        return build_here(step, pending, store, arguments, rebuild=rebuild, announce=note)


plan = partial(plan_here, "dedup", max_bad_row_fraction=1.0)


def decisions_of(planned, run=None):
    """The decisions of a plan, built as far as they are not there."""
    settings, place = planned.settings, planned.plan.store.place
    return decide(planned.found.slices, settings.choices, place, run or Run(), rebuild=settings.force)


def build(planned, decisions, shards):
    """Build some of the decided shards, one after the other, in this process."""
    return build_shards("dedup", decided_plan(planned, decisions), shards)


def prepare(blend, output_dir, run=None, **settings):
    """Plan, decide, build every pending shard in plan order, publish; returns the decided plan and the manifest."""
    return prepare_here("dedup", blend, output_dir, run or Run(), **{"max_bad_row_fraction": 1.0, **settings})


def stored_conversations(folder, columns):
    """A file of normalized rows with these columns in a store, and a slice that names it."""
    identity, content = {"kind": "harmony", "source": {}}, pa.BufferOutputStream()
    pq.write_table(pa.table(columns), content, row_group_size=2)
    store = Store(str(folder), "harmony")
    place = store.path(shard_key(identity), "all.parquet")
    output = publish_bytes(place, content.getvalue().to_pybytes())
    store.issue(identity, outputs=[output], rows_in=0, parts={}, drops={})
    return Slice(SourceFile(place, output.size, "parquet"), 0, 1, content="harmony:0")
