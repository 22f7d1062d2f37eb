"""Deduplication of text: a blend without what it says twice, and without what evaluations ask.

plan ─► find duplicates (sign slices, then rounds by partition, mapped over Dask) ─► write what stays ─► publish ─► report
"""

import time
from typing import Any

from prefect import flow

from tasks.blend.load import load_blend
from tasks.blend.models import Blend
from tasks.dedup.settings import DedupSettings, Mode
from tasks.dedup.stage import deduplicate, plan, publish, write_shards
from tasks.report.stage import report
from tasks.shards.books import OnBadRow
from tasks.shards.settings import Scale
from tasks.shards.stage import publishing, shard_workers
from tasks.storage import SourceIdentity
from tasks.strict import Size, parse

DEFAULT = DedupSettings()


@flow(name="deduplicate-blend", persist_result=False)
@publishing
def deduplicate_blend(
    blend: Blend | str,
    output_dir: str,
    mode: Mode = DEFAULT.mode,
    near: bool = DEFAULT.near,
    threshold: float = DEFAULT.threshold,
    cap: int | None = DEFAULT.cap,
    cap_by: str | None = DEFAULT.cap_by,
    id_field: str | None = DEFAULT.id_field,
    evaluations: Blend | str | None = DEFAULT.evaluations,
    shard_size: Size = DEFAULT.shard_size,
    store: str | None = DEFAULT.store,
    source_identity: SourceIdentity = DEFAULT.source_identity,
    on_bad_row: OnBadRow = DEFAULT.on_bad_row,
    bad_row_ceiling: float = DEFAULT.bad_row_ceiling,
    scale: Scale = DEFAULT.scale,
    sample: int | None = DEFAULT.sample,
    force: bool = DEFAULT.force,
    allow_partial: bool = DEFAULT.allow_partial,
    cluster: str = DEFAULT.cluster,
    workers: int | None = DEFAULT.workers,
) -> dict[str, Any]:
    """Take out of a blend of text what it says twice.

    Args:
        blend: The blend, or the path or URI of its JSON file.
        output_dir: Where the folders of rows, blend.json and the manifest go.
    """
    chosen = {name: value for name, value in locals().items() if name in DedupSettings.model_fields}
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
