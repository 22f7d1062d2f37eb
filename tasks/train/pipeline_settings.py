"""What a person can choose about a pipeline: the settings of its stages, under the names of the stages.

`configs/pipeline-tiny.yaml` is a whole example, of seconds per stage on the blends that come with the project.
"""

from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, model_validator
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.rl.settings import RlSettings
from tokenmill.tasks.strict import Strict, parse
from tokenmill.tasks.tokenize.settings import PretrainSettings

from .evaluation_settings import EvaluateSettings
from .settings import TrainSettings

CONFIGS = Path(__file__).parent / "configs"
BLENDS = Path(__file__).parents[2] / "blends"


class PretrainStage(Strict, frozen=True):
    """Documents, and a model trained on them from nothing."""

    blend: str = Field(min_length=1, description="Path or URI of the blend; a bare name is one of the project's own.")
    data: PretrainSettings = Field(default=PretrainSettings(), description="How documents are prepared.")
    train: TrainSettings = Field(default=TrainSettings(), description="What is trained on them.")


class SftStage(Strict, frozen=True):
    """Conversations, and the model trained on them further."""

    blend: str = Field(min_length=1, description="Path or URI of the blend; a bare name is one of the project's own.")
    data: SftSettings = Field(default=SftSettings(), description="How conversations are prepared.")
    train: TrainSettings = Field(default=TrainSettings(), description="What is trained on them.")

    @model_validator(mode="after")
    def _goes_on(self) -> Self:
        if self.train.start_from is not None:
            raise ValueError("train.start_from is the model of the stage before; leave it out")
        return self


class RlStage(Strict, frozen=True):
    """Rows for reinforcement learning, to be handed over."""

    blend: str = Field(min_length=1, description="Path or URI of the blend; a bare name is one of the project's own.")
    data: RlSettings = Field(default=RlSettings(), description="How rows are prepared.")


class PipelineSettings(Strict, frozen=True):
    """Everything a person can choose about a pipeline; a stage that is left out is not run, but the first always is."""

    pretrain: PretrainStage = Field(description="The first stage: pretraining.")
    sft: SftStage | None = Field(default=None, description="The second stage: SFT of the pretrained model.")
    rl: RlStage | None = Field(default=None, description="The third stage: rows for reinforcement learning.")
    evaluate: EvaluateSettings = Field(default=EvaluateSettings(), description="How each model is evaluated.")


def blend_place(name: str) -> str:
    """Where a blend is: the project's own for a bare name, else what is said."""
    return str(BLENDS / name) if "/" not in name and (BLENDS / name).is_file() else name


def load_settings(name: str) -> PipelineSettings:
    """The settings in a YAML file, found as `config_place` finds it. Raises InputError."""
    place = config_place(name)
    return parse(PipelineSettings, yaml.safe_load(place.read_text("utf-8")), str(place))


def config_place(name: str) -> Path:
    """The YAML file of a configuration: one of the project's own by its bare name, or a path.

    Raises InputError when there is none.
    """
    own = CONFIGS / f"{name}.yaml"
    found = own if own.is_file() else Path(name)
    if not found.is_file():
        known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
        raise InputError(f"--config {name}: neither a YAML file nor one of {known}")
    return found
