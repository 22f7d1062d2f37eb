"""Deduplication of text: a blend without what it says twice, and without what evaluations ask.

plan ─► find duplicates (sign slices, then rounds by partition, mapped over Dask) ─► write what stays ─► publish ─► report
"""

import time
from typing import Any

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.dedup.settings import DedupSettings
from tokenmill.tasks.dedup.stage import deduplicate, plan, publish, write_shards
from tokenmill.tasks.report.stage import report
from tokenmill.tasks.shards.stage import shard_workers
from tokenmill.tasks.strict import Place, parse, with_parameters_of

from .output_folder import publishing
from .prefect_server import flow


@flow(name="deduplicate-blend", persist_result=False)
@publishing
@with_parameters_of(DedupSettings, without={"holdout"})
def deduplicate_blend(blend: Blend | str, output_dir: Place, **chosen: object) -> dict[str, Any]:
    """Take out of a blend of text what it says twice.

    Args:
        blend: The blend, or the path or URI of its JSON file.
        output_dir: Where the folders of rows, blend.json and the manifest go.
    """
    settings = parse(DedupSettings, chosen, "settings")
    started = time.time()

    prepared = plan(load_blend(blend), settings, output_dir)
    place = prepared.plan.store.place
    with shard_workers(settings.cluster, settings.workers) as build_shards:
        decisions = deduplicate(prepared.slices, settings.choices, place, build_shards, rebuild=settings.force)
        decided = prepared.decided(decisions)
        common = {
            "store": place,
            "outcomes": decisions.uri,
            "on_bad_row": settings.on_bad_row,
            "rebuild": settings.force,
        }
        build_shards(write_shards, decided.plan.pending, common)
    manifest = publish(decided, decisions, started)
    return report(manifest, decided.output_dir)
