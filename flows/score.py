"""Score rows: the NLL of completions (nll), or embeddings of texts (embed).

plan ─► score-slices (mapped over Dask, one worker per GPU) ─► rank and publish ─► report
"""

from typing import Any, Literal

from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.strict import Place, parse, with_parameters_of

from .prefect_server import flow
from .preparation import prepare

KINDS = {"nll": preparation("nll"), "embed": preparation("embeddings")}


@flow(name="score-candidates")
@with_parameters_of(*(kind.settings for kind in KINDS.values()), without=KINDS["nll"].hidden)
def score_candidates(
    blend: Blend | str, output_dir: Place, mode: Literal["nll", "embed"], **chosen: object
) -> dict[str, Any]:
    """Score rows: the settings of the other score than `mode` must be omitted.

    Args:
        blend: The folder of a normalization, a blend, or a file, folder or glob of rows.
        output_dir: Folder or URI for the scores, blend.json and the manifest.
        mode: nll, or embed.
    """
    given = {name: value for name, value in chosen.items() if value is not None}
    settings = parse(KINDS[mode].settings, given, "settings")
    return prepare(KINDS[mode], KINDS[mode].read_blend(blend), settings, output_dir)
