"""RL preparation: a blend of rows becomes JSON Lines that NeMo-RL and NeMo-Gym read as they are.

plan (with the tables that placeholders point into) ─► transform shards (mapped over Dask) ─► publish ─► report
"""

import time
from typing import Any

from flows.output_folder import publishing
from flows.prefect_server import flow
from tasks.blend.load import load_blend
from tasks.blend.models import Blend
from tasks.report.stage import report
from tasks.rl.preparation import chain_records
from tasks.rl.settings import RlSettings
from tasks.rl.stage import plan, publish, transform_shards
from tasks.shards.stage import shard_workers
from tasks.strict import Place, parse, with_parameters_of


@flow(name="rl-data-prep", persist_result=False)
@publishing
@with_parameters_of(RlSettings)
def rl_data_prep(blend: Blend | str, output_dir: Place, **chosen: object) -> dict[str, Any]:
    """Prepare a blend of rows for reinforcement learning.

    Args:
        blend: The blend, or the path or URI of its JSON file.
        output_dir: Where the files of rows, blend.json and the manifest go.
    """
    settings = parse(RlSettings, chosen, "settings")
    started = time.time()

    prepared = plan(load_blend(blend), settings, output_dir)
    common = {
        "store": prepared.plan.store.place,
        "chains": chain_records(prepared),
        "tokenizer": settings.tokenizer.model_dump(),
        "on_bad_row": settings.on_bad_row,
        "rebuild": settings.force,
    }
    with shard_workers(settings.cluster, settings.workers) as build_shards:
        build_shards(transform_shards, prepared.plan.pending, common)
    manifest = publish(prepared, started)
    return report(manifest, prepared.output_dir)
