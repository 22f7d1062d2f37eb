"""RL preparation: a blend of rows becomes JSON Lines that NeMo-RL and NeMo-Gym read as they are.

plan (with the tables that placeholders point into) ─► transform shards (mapped over Dask) ─► publish ─► report
"""

import time
from typing import Any

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.report.stage import report
from tokenmill.tasks.rl.preparation import chain_records
from tokenmill.tasks.rl.settings import RlSettings
from tokenmill.tasks.rl.stage import plan, publish, transform_shards
from tokenmill.tasks.shards.stage import shard_workers
from tokenmill.tasks.strict import Place, parse, with_parameters_of

from .output_folder import publishing
from .prefect_server import flow


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
