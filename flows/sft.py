"""SFT preparation: a blend of chat data becomes packed Parquet with exact loss masks.

plan (with the template's self-check) ─► pack shards (mapped over Dask) ─► publish ─► report
"""

import time
from typing import Any

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.pack.planning import template_record
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.pack.stage import pack_shards, plan, publish
from tokenmill.tasks.report.stage import report
from tokenmill.tasks.shards.stage import shard_workers
from tokenmill.tasks.strict import Place, parse, with_parameters_of

from .output_folder import publishing
from .prefect_server import flow


@flow(name="sft-data-prep", persist_result=False)
@publishing
@with_parameters_of(SftSettings)
def sft_data_prep(blend: Blend | str, output_dir: Place, **chosen: object) -> dict[str, Any]:
    """Prepare a blend of conversations for supervised fine-tuning.

    Args:
        blend: The blend, or the path or URI of its JSON file.
        output_dir: Where blend.json, the folders of packs and the manifest go.
    """
    settings = parse(SftSettings, chosen, "settings")
    started = time.time()

    prepared = plan(load_blend(blend), settings, output_dir)
    common = {
        "store": prepared.plan.store.place,
        "tokenizer": settings.tokenizer.model_dump(),
        "template": template_record(prepared.template),
        "on_bad_row": settings.on_bad_row,
        "rebuild": settings.force,
    }
    with shard_workers(settings.cluster, settings.workers) as build_shards:
        build_shards(pack_shards, prepared.plan.pending, common)
    manifest = publish(prepared, started)
    return report(manifest, prepared.output_dir)
