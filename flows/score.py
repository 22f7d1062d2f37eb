"""Score rows: the NLL of completions (nll), or embeddings of texts (embed).

plan ─► score slices (mapped over Dask, one worker per GPU) ─► rank and publish ─► report
"""

import time
from typing import Any

from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.report.stage import report
from tokenmill.tasks.score.settings import EmbedSettings, NllSettings
from tokenmill.tasks.score.sources import What, scored_blend
from tokenmill.tasks.score.stage import common_of, needs_of, noting_failure, plan, publish, score_slices
from tokenmill.tasks.shards.stage import shard_workers
from tokenmill.tasks.strict import Place, parse, with_parameters_of

from .output_folder import publishing
from .prefect_server import flow

SETTINGS: dict[What, type[NllSettings] | type[EmbedSettings]] = {"nll": NllSettings, "embed": EmbedSettings}


@flow(name="score-candidates", persist_result=False)
@publishing
@with_parameters_of(NllSettings, EmbedSettings, without={"holdout"})
def score_candidates(
    blend: Blend | str,
    output_dir: Place,
    what: What,
    **chosen: object,
) -> dict[str, Any]:
    """Score rows: the settings of the other score than `what` must be left out.

    Args:
        blend: The folder of a normalization, a blend, a file, folder or glob of rows.
        output_dir: Where the folder of scores, blend.json and the manifest go.
        what: nll, or embed.
    """
    given = {name: value for name, value in chosen.items() if value is not None}
    settings = parse(SETTINGS[what], given, "settings")
    started = time.time()

    prepared = plan(scored_blend(blend, what), settings, output_dir)
    needs = needs_of(prepared)
    with noting_failure(prepared):
        with shard_workers(settings.cluster, needs.workers, needs.resources) as build_shards:
            build_shards(score_slices, prepared.plan.pending, common_of(prepared, needs))
        manifest = publish(prepared, started)
    return report(manifest, prepared.output_dir)
