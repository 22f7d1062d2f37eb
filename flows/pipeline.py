"""The pipeline: pretrain a model, fine-tune it on conversations, and prepare rows for RL.

pretrain data ─► train ─► evaluate ─► SFT data ─► fine-tune ─► evaluate ─► RL data
"""

from typing import Any

from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.storage import join
from tokenmill.tasks.strict import Place
from tokenmill.tasks.train.launchers.launch import local_folder, require_program
from tokenmill.tasks.train.pipeline_settings import PipelineSettings, blend_place, load_settings

from .prefect_server import flow
from .pretrain import pretrain_data_prep
from .rl import rl_data_prep
from .sft import sft_data_prep
from .train import evaluate_model, train_model

PREPARATIONS = {"pretrain": pretrain_data_prep, "sft": sft_data_prep, "rl": rl_data_prep}
TRAINED = ("pretrain", "sft")


@flow(name="pipeline")
def pipeline(output_dir: Place, settings: PipelineSettings | str = "pipeline-tiny") -> dict[str, Any]:
    """Run the stages in order, each reusing the finished work of earlier runs.

    Args:
        output_dir: Each stage gets a folder there.
        settings: The stages, or a YAML file with them: a path, or the name of a bundled one.
    """
    settings = load_settings(settings) if isinstance(settings, str) else settings
    asked = {name: stage for name in PREPARATIONS if (stage := getattr(settings, name))}
    # Fail now, not hours later, for a launcher that cannot run here or a blend that cannot be read
    for name, stage in asked.items():
        if name in TRAINED:
            local_folder(output_dir, stage.train.launcher)
            require_program(stage.train.launcher)
        preparation(name).read_blend(blend_place(stage.blend))
    stages: list[Any] = []
    for name, stage in asked.items():
        folder = join(output_dir, name)
        chosen = {key: getattr(stage.data, key) for key in stage.data.model_fields_set}  # the rest are defaults
        stages.append(PREPARATIONS[name](blend_place(stage.blend), join(folder, "data"), **chosen))
        if name in TRAINED:
            start = {"start_from": join(output_dir, "pretrain/model")} if name == "sft" else {}
            train = stage.train.model_copy(update=start)
            stages.append(train_model(join(folder, "data"), join(folder, "model"), train))
            stages.append(evaluate_model(join(folder, "model"), join(folder, "results"), settings.evaluate))
    made = [{name: record[name] for name in ("type", "path")} for stage in stages for record in stage.values()]
    return {"pipeline": {"path": output_dir, "type": "pipeline", "stages": stages, "made_from": made}}
