"""The pipeline: pretrain a model, fine-tune it on conversations, and prepare rows for RL.

pretrain data ─► train ─► evaluate ─► SFT data ─► fine-tune ─► evaluate ─► RL data
"""

from typing import Any

from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.storage import join
from tokenmill.tasks.strict import Place, Strict
from tokenmill.tasks.train.launchers.launch import local_folder, require_program
from tokenmill.tasks.train.pipeline_settings import (
    PipelineSettings,
    PretrainStage,
    SftStage,
    blend_place,
    load_settings,
)

from .prefect_server import flow
from .pretrain import pretrain_data_prep
from .rl import rl_data_prep
from .sft import sft_data_prep
from .train import evaluate_model, train_model


@flow(name="pipeline")
def pipeline(output_dir: Place, settings: PipelineSettings | str = "pipeline-tiny") -> dict[str, Any]:
    """Run the stages in order, each reusing the finished work of earlier runs.

    Args:
        output_dir: Each stage gets a folder there.
        settings: The stages, or a YAML file with them: a path, or the name of a bundled one.
    """
    settings = load_settings(settings) if isinstance(settings, str) else settings
    _require_possible(output_dir, settings)
    stages = _stages(output_dir, settings)
    made = [{name: record[name] for name in ("type", "path")} for stage in stages for record in stage.values()]
    return {"pipeline": {"path": output_dir, "type": "pipeline", "stages": stages, "made_from": made}}


def _require_possible(output_dir: str, settings: PipelineSettings) -> None:
    """Fail now, not hours later, for a launcher that cannot run here or a blend that cannot be read."""
    for stage in filter(None, (settings.pretrain, settings.sft)):
        local_folder(output_dir, stage.train.launcher)
        require_program(stage.train.launcher)
    for kind, stage in (("pretrain", settings.pretrain), ("sft", settings.sft), ("rl", settings.rl)):
        if stage:
            preparation(kind).read_blend(blend_place(stage.blend))


def _stages(output_dir: str, settings: PipelineSettings) -> list[Any]:
    data: Any = pretrain_data_prep(
        blend_place(settings.pretrain.blend), join(output_dir, "pretrain/data"), **_chosen(settings.pretrain.data)
    )
    stages: list[Any] = [data, *_trained(settings.pretrain, settings, join(output_dir, "pretrain"))]
    if settings.sft:
        data = sft_data_prep(
            blend_place(settings.sft.blend), join(output_dir, "sft/data"), **_chosen(settings.sft.data)
        )
        begun = settings.sft.train.model_copy(update={"start_from": join(output_dir, "pretrain/model")})
        stage = settings.sft.model_copy(update={"train": begun})
        stages += [data, *_trained(stage, settings, join(output_dir, "sft"))]
    if settings.rl:
        stages.append(
            rl_data_prep(blend_place(settings.rl.blend), join(output_dir, "rl/data"), **_chosen(settings.rl.data))
        )
    return stages


def _trained(stage: PretrainStage | SftStage, settings: PipelineSettings, folder: str) -> list[Any]:
    model = train_model(join(folder, "data"), join(folder, "model"), stage.train)
    return [model, evaluate_model(join(folder, "model"), join(folder, "results"), settings.evaluate)]


def _chosen(settings: Strict) -> dict[str, Any]:
    """The settings that were set explicitly; the flow has the same defaults."""
    return {name: getattr(settings, name) for name in settings.model_fields_set}
