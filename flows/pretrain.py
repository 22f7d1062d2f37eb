"""Pretraining preparation: a blend of raw text becomes verified Megatron `.bin/.idx` files and a `blend.json`.

plan ─► tokenize shards (mapped over Dask) ─► publish ─► report
"""

import time
from typing import Any

from prefect import flow

from tasks.blend.load import load_blend
from tasks.blend.models import Blend
from tasks.report.stage import report
from tasks.shards.books import OnBadRow
from tasks.shards.settings import Holdout, Scale
from tasks.shards.stage import publishing, shard_workers
from tasks.storage import SourceIdentity
from tasks.strict import Size, parse
from tasks.tokenize.settings import PretrainSettings, SpecialTokens, TokenizerSettings
from tasks.tokenize.stage import plan, publish, tokenize_shards

DEFAULT = PretrainSettings()


@flow(name="pretrain-data-prep", persist_result=False)
@publishing
def pretrain_data_prep(
    blend: Blend | str,
    output_dir: str,
    tokenizer: TokenizerSettings = DEFAULT.tokenizer,
    special_tokens_in_text: SpecialTokens = DEFAULT.special_tokens_in_text,
    shard_size: Size = DEFAULT.shard_size,
    store: str | None = DEFAULT.store,
    holdout: Holdout = DEFAULT.holdout,
    source_identity: SourceIdentity = DEFAULT.source_identity,
    on_bad_row: OnBadRow = DEFAULT.on_bad_row,
    bad_row_ceiling: float = DEFAULT.bad_row_ceiling,
    min_doc_chars: int | None = DEFAULT.min_doc_chars,
    max_doc_tokens: int | None = DEFAULT.max_doc_tokens,
    scale: Scale = DEFAULT.scale,
    sample: int | None = DEFAULT.sample,
    force: bool = DEFAULT.force,
    allow_partial: bool = DEFAULT.allow_partial,
    cluster: str = DEFAULT.cluster,
    workers: int | None = DEFAULT.workers,
) -> dict[str, Any]:
    """Prepare a blend for pretraining.

    Args:
        blend: The blend, or the path or URI of its JSON file.
        output_dir: Where blend.json, the published shards and the manifest go.
    """
    chosen = {name: value for name, value in locals().items() if name in PretrainSettings.model_fields}
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
