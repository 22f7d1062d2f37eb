"""Scores of candidates: how surprised a model is by completions (nll), or where texts lie among others (embed).

plan ─► score slices (mapped over Dask, one worker per GPU) ─► rank and publish ─► report
"""

import time
from typing import Any

from prefect import flow

from tasks.blend.models import Blend
from tasks.report.stage import report
from tasks.score.embed import Pooling
from tasks.score.engines import EmbedEngine, NllEngine
from tasks.score.processes import workers_fit_for
from tasks.score.settings import SHARD_BYTES, Device, EmbedSettings, LossMode, NllSettings
from tasks.score.sources import What, scored_blend
from tasks.score.stage import common_of, needs_of, noting_failure, plan, publish, score_slices
from tasks.score.weights import Precision
from tasks.shards.books import OnBadRow
from tasks.shards.settings import Scale
from tasks.shards.stage import publishing, shard_workers
from tasks.storage import SourceIdentity
from tasks.strict import Size, parse
from tasks.tokenize.settings import TokenizerSource

DEFAULT = EmbedSettings()
SETTINGS: dict[What, type[NllSettings] | type[EmbedSettings]] = {"nll": NllSettings, "embed": EmbedSettings}


@flow(name="score-candidates", persist_result=False)
@publishing
def score_candidates(
    blend: Blend | str,
    output_dir: str,
    what: What,
    model: str | None = None,
    model_revision: str | None = None,
    engine: NllEngine | EmbedEngine | None = None,
    token_budget: int = DEFAULT.token_budget,
    precision: Precision | None = None,
    device: Device | None = None,
    loss_mode: LossMode | None = None,
    max_length: int | None = None,
    chat_template: str | None = None,
    tokenizer: TokenizerSource | None = None,
    pooling: Pooling | None = None,
    dimensions: int | None = None,
    max_tokens: int | None = None,
    field: str | None = None,
    shard_size: Size = SHARD_BYTES,
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
    """Score rows: the settings of the other score than `what` must be left out.

    Args:
        blend: The folder of a normalization, a blend, a file, folder or glob of rows.
        output_dir: Where the folder of scores, blend.json and the manifest go.
        what: nll, or embed.
    """
    given = {name: value for name, value in locals().items() if name not in {"blend", "output_dir", "what"}}
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = parse(SETTINGS[what], chosen, "settings")
    started = time.time()

    prepared = plan(scored_blend(blend, what), settings, output_dir)
    needs = needs_of(prepared)
    with noting_failure(prepared):
        with (
            workers_fit_for(settings.engine),
            shard_workers(settings.cluster, needs.workers, needs.resources) as build_shards,
        ):
            build_shards(score_slices, prepared.plan.pending, common_of(prepared, needs))
        manifest = publish(prepared, started)
    return report(manifest, prepared.output_dir)
