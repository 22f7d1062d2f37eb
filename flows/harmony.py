"""Harmony normalization: chat data of many shapes becomes one strict format, without duplicates, ready to be scored.

plan ─► normalize shards ─► find duplicates ─► mark shards ─► select pools and candidates ─► publish ─► report
        (all of these mapped over one Dask cluster)
"""

import time
from typing import Any

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.dedup.stage import without_duplicates
from tokenmill.tasks.harmony.preparation import normalized_shards
from tokenmill.tasks.harmony.stage import normalize_shards, plan, publish
from tokenmill.tasks.report.stage import report
from tokenmill.tasks.select.planning import require_fitting
from tokenmill.tasks.select.publication import beside, require_variety
from tokenmill.tasks.select.settings import NormalizationSettings
from tokenmill.tasks.select.stage import select
from tokenmill.tasks.shards.stage import shard_workers
from tokenmill.tasks.strict import Place, parse, with_parameters_of

from .output_folder import publishing
from .prefect_server import flow


@flow(name="harmony-normalize", persist_result=False)
@publishing
@with_parameters_of(NormalizationSettings, without={"holdout"})
def harmony_normalize(blend: Blend | str, output_dir: Place, **chosen: object) -> dict[str, Any]:
    """Bring a blend of chat data into Harmony.

    Args:
        blend: The blend, or the path or URI of its JSON file.
        output_dir: Where the folders of rows, pools and candidates, blend.json and the manifest go.
    """
    settings = parse(NormalizationSettings, chosen, "settings")
    started = time.time()

    require_fitting(settings, output_dir)
    prepared = plan(load_blend(blend), settings, output_dir)
    place = prepared.plan.store
    common = {"store": place.place, "on_bad_row": settings.on_bad_row, "rebuild": settings.force}
    with shard_workers(settings.cluster, settings.workers) as build_shards:
        build_shards(normalize_shards, prepared.plan.pending, common)
        normalized, missing = normalized_shards(prepared)
        rows = without_duplicates(normalized, settings.dedup, place, build_shards, rebuild=settings.force)
        selected = select(rows.final, settings.selection, place, build_shards, rebuild=settings.force)
    made = beside(selected, rows, settings.selection, place)
    manifest = publish(prepared, rows.final, missing, made, started)
    record = report(manifest, prepared.output_dir)
    require_variety(manifest, prepared.output_dir)
    return record
