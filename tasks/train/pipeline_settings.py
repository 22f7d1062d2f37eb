"""The settings of a pipeline, stage by stage. `configs/pipeline-tiny.yaml` is a complete example."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.rl.settings import RlSettings
from tokenmill.tasks.strict import Strict, parse
from tokenmill.tasks.tokenize.settings import PretrainSettings
from tokenmill.tasks.yaml_text import read_mapping

from .settings import EvaluateSettings, TrainSettings

CONFIGS = Path(__file__).parent / "configs"
BLENDS = Path(__file__).parents[2] / "blends"


class _Stage(Strict, frozen=True):
    blend: str = Field(min_length=1, description="Path or URI of the blend, or the bare name of a bundled one.")


class PretrainStage(_Stage, frozen=True):
    """Pretraining from scratch."""

    data: PretrainSettings = Field(default=PretrainSettings(), description="How to prepare documents.")
    train: TrainSettings = Field(default=TrainSettings(), description="How to train on them.")


class SftStage(_Stage, frozen=True):
    """SFT of the pretrained model."""

    data: SftSettings = Field(default=SftSettings(), description="How to prepare conversations.")
    train: TrainSettings = Field(default=TrainSettings(), description="How to train on them.")

    @model_validator(mode="after")
    def _starts_from_the_pretrained_model(self) -> Self:
        if self.train.start_from is not None:
            raise ValueError("train.start_from is set by the pipeline, to its pretrained model; remove it")
        return self


class RlStage(_Stage, frozen=True):
    """Rows for reinforcement learning by a different trainer."""

    data: RlSettings = Field(default=RlSettings(), description="How to prepare rows.")


class PipelineSettings(Strict, frozen=True):
    """The settings of a pipeline; a stage that is omitted is skipped."""

    pretrain: PretrainStage = Field(description="First stage: pretraining. Required.")
    sft: SftStage | None = Field(default=None, description="Second stage: SFT of the pretrained model.")
    rl: RlStage | None = Field(default=None, description="Third stage: rows for reinforcement learning.")
    evaluate: EvaluateSettings = Field(default=EvaluateSettings(), description="How to evaluate each model.")


def blend_place(name: str) -> str:
    """Return the place of a blend: for a bare name the bundled one, else `name` itself."""
    return str(BLENDS / name) if "/" not in name and (BLENDS / name).is_file() else name


def load_settings(name: str) -> PipelineSettings:
    """Load pipeline settings from a YAML file; see `config_place`. Raises InputError."""
    place = config_place(name)
    return parse(PipelineSettings, read_mapping(place.read_bytes(), f"--config {place}"), str(place))


def config_place(name: str) -> Path:
    """Return the YAML file of a configuration: a bundled one by its bare name, or a path. Raises InputError if there is none."""
    bundled = CONFIGS / f"{name}.yaml"
    found = bundled if bundled.is_file() else Path(name)
    if not found.is_file():
        known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
        raise InputError(f"--config {name}: neither a YAML file nor one of {known}")
    return found
