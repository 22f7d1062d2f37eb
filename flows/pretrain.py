"""Pretraining preparation: a blend of raw text becomes verified Megatron `.bin/.idx` files and a `blend.json`.

plan ─► tokenize shards (mapped over Dask) ─► publish ─► report
"""

import time
from typing import Any

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.report.stage import report
from tokenmill.tasks.shards.stage import shard_workers
from tokenmill.tasks.strict import Place, parse, with_parameters_of
from tokenmill.tasks.tokenize.settings import PretrainSettings
from tokenmill.tasks.tokenize.stage import plan, publish, tokenize_shards

from .output_folder import publishing
from .prefect_server import flow


@flow(name="pretrain-data-prep", persist_result=False)
@publishing
@with_parameters_of(PretrainSettings)
def pretrain_data_prep(blend: Blend | str, output_dir: Place, **chosen: object) -> dict[str, Any]:
    """Prepare a blend for pretraining.

    Args:
        blend: The blend, or the path or URI of its JSON file.
        output_dir: Where blend.json, the published shards and the manifest go.
    """
    settings = parse(PretrainSettings, chosen, "settings")
    started = time.time()

    prepared = plan(load_blend(blend), settings, output_dir)
    common = {
        "store": prepared.plan.store.place,
        "tokenizer": settings.tokenizer.model_dump(),
        "on_bad_row": settings.on_bad_row,
        "rebuild": settings.force,
    }
    with shard_workers(settings.cluster, settings.workers) as build_shards:
        build_shards(tokenize_shards, prepared.plan.pending, common)
    manifest = publish(prepared, started)
    return report(manifest, prepared.output_dir)
