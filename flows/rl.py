"""RL preparation: a blend of rows becomes JSON Lines that NeMo-RL and NeMo-Gym read as they are.

plan (with the tables that placeholders point into) ─► transform shards (mapped over Dask) ─► publish ─► report
"""

import time
from typing import Any

from prefect import flow

from tasks.blend.load import load_blend
from tasks.blend.models import Blend, TransformSpec
from tasks.report.stage import report
from tasks.rl.preparation import chain_records
from tasks.rl.settings import Compression, RlSettings, Splits
from tasks.rl.stage import plan, publish, transform_shards
from tasks.rl.targets import Target
from tasks.shards.books import OnBadRow
from tasks.shards.settings import Holdout, Scale
from tasks.shards.stage import publishing, shard_workers
from tasks.storage import SourceIdentity
from tasks.strict import Size, parse
from tasks.tokenize.settings import TokenizerSource

DEFAULT = RlSettings()


@flow(name="rl-data-prep", persist_result=False)
@publishing
def rl_data_prep(
    blend: Blend | str,
    output_dir: str,
    transforms: list[TransformSpec] = DEFAULT.transforms,
    target: Target = DEFAULT.target,
    splits: Splits = DEFAULT.splits,
    val_holdout: int | None = DEFAULT.val_holdout,
    compression: Compression = DEFAULT.compression,
    max_tokens: int | None = DEFAULT.max_tokens,
    tokenizer: TokenizerSource = DEFAULT.tokenizer,
    shard_size: Size = DEFAULT.shard_size,
    store: str | None = DEFAULT.store,
    holdout: Holdout = DEFAULT.holdout,
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
    """Prepare a blend of rows for reinforcement learning.

    Args:
        blend: The blend, or the path or URI of its JSON file.
        output_dir: Where the files of rows, blend.json and the manifest go.
    """
    chosen = {name: value for name, value in locals().items() if name in RlSettings.model_fields}
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
