"""A job: all that a trainer needs to know, as the one JSON file it is started with."""

from typing import Literal

from pydantic import Field
from tokenmill.tasks.strict import Strict

from .settings import TrainSettings

JOB = "job.json"
MODEL = "model"
"""The folder, in that of a training, which holds the trained model as Hugging Face's libraries read it."""

CHECKPOINTS = "checkpoints"

Kind = Literal["pretrain", "sft"]


class Source(Strict, frozen=True):
    """What is read of one split of one data set, in the order of the blend.

    `files` are prefixes of .bin/.idx pairs, or packed Parquet files, and `weights` the share of each, as blend.json says.
    `tokens` are those of the documents, without padding, and `rows` the packs, None for .bin/.idx.
    """

    dataset: str
    split: Literal["train", "valid", "test"]
    files: list[str]
    weights: list[float]
    tokens: int
    rows: int | None = None


class TrainData(Strict, frozen=True):
    """A preparation, as far as training is concerned.

    `tokenizer` is the name that was prepared with (what `TokenizerSource` takes, as a mapping), `fingerprint` that of its
    content. `made_from` is a digest of what was published, wherever and whenever that was. `pack_size` and `pad_seq_to_mult` are None for .bin/.idx.
    """

    path: str
    kind: Kind
    made_from: str
    tokenizer: dict[str, str | bool | None]
    fingerprint: str
    vocabulary_size: int
    eos: int | None
    sources: list[Source]
    pack_size: int | None = None
    pad_seq_to_mult: int | None = None

    def of(self, split: str) -> list[Source]:
        """The sources of a split."""
        return [source for source in self.sources if source.split == split]


class Job(Strict, frozen=True):
    """A training to be run: the settings as they were chosen, what is trained on, and where to."""

    settings: TrainSettings
    data: TrainData
    output_dir: str = Field(min_length=1)
