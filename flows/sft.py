"""SFT preparation: a blend of chat data becomes packed Parquet with exact loss masks.

plan (with the template's self-check) ─► pack shards (mapped over Dask) ─► publish ─► report
"""

import time
from typing import Any

from prefect import flow
from pydantic import JsonValue

from tasks.blend.load import load_blend
from tasks.blend.models import Blend
from tasks.chat.loss import LossOn
from tasks.chat.sequences import SplitTurns
from tasks.pack.algorithms import Packing
from tasks.pack.planning import template_record
from tasks.pack.sampling import Sampling
from tasks.pack.settings import Oversize, SftSettings
from tasks.pack.stage import pack_shards, plan, publish
from tasks.report.stage import report
from tasks.shards.books import OnBadRow
from tasks.shards.settings import Holdout, Scale
from tasks.shards.stage import publishing, shard_workers
from tasks.storage import SourceIdentity
from tasks.strict import Size, parse
from tasks.tokenize.settings import SpecialTokens, TokenizerSource

DEFAULT = SftSettings()


@flow(name="sft-data-prep", persist_result=False)
@publishing
def sft_data_prep(
    blend: Blend | str,
    output_dir: str,
    tokenizer: TokenizerSource = DEFAULT.tokenizer,
    special_tokens_in_text: SpecialTokens = DEFAULT.special_tokens_in_text,
    chat_template: str = DEFAULT.chat_template,
    template_variables: dict[str, JsonValue] = DEFAULT.template_variables,
    loss_on: LossOn = DEFAULT.loss_on,
    loss_reasoning: bool = DEFAULT.loss_reasoning,
    loss_tool_calls: bool = DEFAULT.loss_tool_calls,
    loss_end_of_turn: bool = DEFAULT.loss_end_of_turn,
    split_turns: SplitTurns = DEFAULT.split_turns,
    pack_size: int = DEFAULT.pack_size,
    packing: Packing = DEFAULT.packing,
    oversize: Oversize = DEFAULT.oversize,
    pad_seq_to_mult: int = DEFAULT.pad_seq_to_mult,
    sampling: Sampling = DEFAULT.sampling,
    seed: int = DEFAULT.seed,
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
    """Prepare a blend of conversations for supervised fine-tuning.

    Args:
        blend: The blend, or the path or URI of its JSON file.
        output_dir: Where blend.json, the folders of packs and the manifest go.
    """
    chosen = {name: value for name, value in locals().items() if name in SftSettings.model_fields}
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
