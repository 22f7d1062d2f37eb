"""The input of a trainer or an evaluator: one JSON file each."""

from typing import Literal

import orjson
from pydantic import Field
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, join
from tokenmill.tasks.strict import Strict, parse

from .settings import EvaluateSettings, TrainSettings
from .skips import SkippedDocument, SkippedStep

JOB = "job.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"
"""The folder of the trained model, inside that of the training, in the format of Hugging Face's libraries."""

Kind = Literal["pretrain", "sft"]


ReadSplit = Literal["train", "valid"]
READ_SPLITS: tuple[ReadSplit, ReadSplit] = ("train", "valid")
"""The splits that a training reads."""


class Source(Strict, frozen=True):
    """The files of one split of one dataset, in the order of the blend.

    `files` are prefixes of .bin/.idx pairs, or packed Parquet files; `weights` are their weights in blend.json. `tokens` are
    those of the documents, without padding; `rows` are the packs, None for .bin/.idx. `contents` identify the bytes of each
    file wherever it is: its shard and the part of it; empty in a job of an earlier version, whose reads are not recorded.
    `sizes` are the tokens of each pair, and `phase` is the number of the phase that reads them.
    """

    dataset: str
    split: Literal["train", "valid", "test"]
    files: list[str]
    weights: list[float]
    tokens: int
    rows: int | None = None
    contents: list[str] = Field(default_factory=list[str])
    sizes: list[int] = Field(default_factory=list[int])
    phase: int = 0


class TrainPhase(Strict, frozen=True):
    """A phase of training: its budget in tokens, and the samples that it reads, 0 before `phases.with_quotas`."""

    name: str
    tokens: float
    samples: int = 0


class TrainData(Strict, frozen=True):
    """A preparation to train on.

    `tokenizer` holds the fields of `TokenizerSource`, `fingerprint` identifies the tokenizer's content. `made_from` is a
    digest of what was published, independent of place and time. `pack_size` and `pad_seq_to_mult` are None for .bin/.idx.
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
    phases: list[TrainPhase] = Field(default_factory=list[TrainPhase])

    def of(self, split: str) -> list[Source]:
        """The sources of a split."""
        return [source for source in self.sources if source.split == split]

    def in_phase(self, number: int) -> "TrainData":
        """The data of one phase."""
        return self.model_copy(
            update={"sources": [source for source in self.of("train") if source.phase == number], "phases": []}
        )


def contents_of(data: TrainData, split: str) -> list[str]:
    """What identifies the content of each file of a split."""
    return [content for source in data.of(split) for content in source.contents]


class Job(Strict, frozen=True):
    """A training to run: settings, data and output folder, and the steps and documents that it leaves out."""

    settings: TrainSettings
    data: TrainData
    output_dir: str = Field(min_length=1)
    skipped: list[SkippedStep | SkippedDocument] = Field(default_factory=list[SkippedStep | SkippedDocument])

    @property
    def validates(self) -> bool:
        """Whether the training computes losses on the valid split."""
        return self.settings.validate_every is not None and bool(self.data.of("valid"))


class Evaluation(Strict, frozen=True):
    """An evaluation to run: the folder of a model, the data with the held-out documents, and where results go."""

    model: str = Field(min_length=1)
    data: TrainData
    settings: EvaluateSettings
    output_dir: str = Field(min_length=1)


def is_training(path: str) -> bool:
    """Whether a folder holds a training."""
    return read_bytes(join(absolute(path), JOB)) is not None


def job_of(content: bytes, place: str) -> Job:
    """Parse the job in the file at `place`. Raises InputError."""
    try:
        return parse(Job, orjson.loads(content), place)
    except ValueError as error:  # of orjson, or an InputError
        raise InputError(f"{error}; {place} is not a job of this version: name another folder, or delete it") from error
