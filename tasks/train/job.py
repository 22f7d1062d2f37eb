"""The input of a trainer or an evaluator, one JSON file each; and skip lists, which exclude steps or documents from training.

    {"step": 120}
    {"data": "xxh3_128:…", "source": 0, "document": 17, "sequence": null, "row": "/data/a.jsonl:5"}

A skip list, for example after a spike of the loss, doesn't move other samples. A skipped step reads its samples, so that reads
remain as planned, but doesn't update weights; later steps keep their learning rate. The tokens of a skipped document remain
inputs, so that its neighbors keep their positions, but aren't labels.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import orjson
from pydantic import Field
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.seal import unsealed
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, join
from tokenmill.tasks.strict import Strict, parse

from .settings import EvaluateSettings, TrainSettings

JOB = "job.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"
"""The folder of the trained model, inside the training run's folder, in the format of Hugging Face's libraries."""

Kind = Literal["pretrain", "sft"]


ReadSplit = Literal["train", "valid"]
READ_SPLITS: tuple[ReadSplit, ReadSplit] = ("train", "valid")
"""The splits that a training run reads."""


class TrainSource(Strict, frozen=True):
    """The files for one split of one dataset, in the order of the blend.

    `files` are prefixes of .bin/.idx pairs, or packed Parquet files; `weights` are their weights in blend.json. `tokens` are
    the documents' tokens, without padding; `rows` are the packs, None for .bin/.idx. `contents` identify the bytes of each
    file in any place: its shard and the part of it; empty in a job of an earlier version, whose reads are not recorded.
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
    digest of the published data, independent of place and time. `pack_size` and `pad_seq_to_mult` are None for .bin/.idx.
    """

    path: str
    kind: Kind
    made_from: str
    tokenizer: dict[str, str | bool | None]
    fingerprint: str
    vocabulary_size: int
    eos: int | None
    sources: list[TrainSource]
    pack_size: int | None = None
    pad_seq_to_mult: int | None = None
    phases: list[TrainPhase] = Field(default_factory=list[TrainPhase])

    def of(self, split: str) -> list[TrainSource]:
        return [source for source in self.sources if source.split == split]

    def in_phase(self, number: int) -> "TrainData":
        return self.model_copy(
            update={"sources": [source for source in self.of("train") if source.phase == number], "phases": []}
        )


def contents_of(data: TrainData, split: str) -> list[str]:
    """What identifies the content of each file of a split."""
    return [content for source in data.of(split) for content in source.contents]


class SkippedStep(Strict, frozen=True):
    """A step without an update, counted from 1."""

    step: int = Field(ge=1)


class SkippedDocument(Strict, frozen=True):
    """A document that is not trained on, in the data whose content is `data`.

    `source` numbers the prefixes of the train split, in order, and `document` counts in the prefix. For packs, `source` is 0,
    `document` numbers all packs of the split, and `sequence`, None for documents, counts in the pack. `row` names the source row for people.
    """

    data: str
    source: int = Field(ge=0)
    document: int = Field(ge=0)
    sequence: int | None = Field(default=None, ge=0)
    row: str = ""


Skipped = SkippedStep | SkippedDocument


class Job(Strict, frozen=True):
    """A training run to run: settings, data and output folder, and the steps and documents that it omits."""

    settings: TrainSettings
    data: TrainData
    output_dir: str = Field(min_length=1)
    skipped: list[Skipped] = Field(default_factory=list[Skipped])

    @property
    def validates(self) -> bool:
        """Whether the training run computes losses on the validation split."""
        return self.settings.validate_every is not None and bool(self.data.of("valid"))


class Evaluation(Strict, frozen=True):
    """An evaluation to run: the folder of a model, the data with the held-out documents, and where results go."""

    model: str = Field(min_length=1)
    data: TrainData
    settings: EvaluateSettings
    output_dir: str = Field(min_length=1)


def is_training(path: str) -> bool:
    """Return whether a folder holds a training run."""
    return read_bytes(join(absolute(path), JOB)) is not None


def job_of(content: bytes, place: str) -> Job:
    """Parse the job in the file at `place`. Raises InputError."""
    try:
        fields = orjson.loads(content)
        if isinstance(fields, dict) and isinstance(settings := fields.get("settings"), dict):
            settings.pop("engine", None)  # earlier versions had a choice
        return parse(Job, fields, place)
    except ValueError as error:  # of orjson, or an InputError
        raise InputError(
            f"{error}; {place} isn't a job of this version: name a different folder, or delete it"
        ) from error


def read_job(path: str) -> Job:
    """Return the job in the folder of a training run. Raises InputError."""
    place = join(absolute(path), JOB)
    return job_of(read_bytes(place) or b"", place)


def read_sealed(place: str, remedy: str) -> dict[str, Any] | None:
    """Return the sealed document in a file, None without one. Raises InputError, with the remedy, for a damaged one."""
    content = read_bytes(place)
    try:
        return None if content is None else unsealed(content)
    except ValueError as error:
        raise InputError(f"{place}: {error}; {remedy}") from error


def read_skip_list(place: str) -> list[Skipped]:
    """Return the entries of a list. Raises InputError for a missing file or a line that isn't an entry."""
    content = read_bytes(absolute(place))
    if content is None:
        raise InputError(f"skip_list: {place} does not exist; write one with: tokenmill step MODEL --skip-list {place}")
    return [_entry(line, f"{place}:{number}") for number, line in enumerate(content.splitlines(), 1) if line.strip()]


def _entry(line: bytes, where: str) -> Skipped:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f'{where}: {error}; write one JSON object per line, such as {{"step": 120}}') from error
    return parse(SkippedStep if isinstance(fields, dict) and "step" in fields else SkippedDocument, fields, where)


def extend_skip_list(place: str, entries: Iterable[Skipped]) -> int:
    """Add entries that a list does not have yet, and create it if needed; returns how many it has then."""
    content = read_bytes(absolute(place))
    known = read_skip_list(place) if content else []
    entries = [*known, *(entry for entry in dict.fromkeys(entries) if entry not in known)]
    publish_bytes(absolute(place), b"".join(orjson.dumps(entry.model_dump()) + b"\n" for entry in entries))
    return len(entries)


def check_skipped(skipped: Sequence[Skipped], data: str, steps: int) -> None:
    """Raises InputError for a document of other data than `data`, and for a step after the last of `steps`."""
    late = next((step for step in skipped_steps(skipped) if step > steps), None)
    if late is not None:
        raise InputError(f"skip_list: step {late:,} is listed, but this training run has {steps:,}; remove the line")
    other = next((each for each in skipped if isinstance(each, SkippedDocument) and each.data != data), None)
    if other is not None:
        raise InputError(
            f"skip_list: {other.row or 'a document'} was listed for data of content {other.data}, but this training run reads "
            f"{data}; list it again with tokenmill step"
        )


def skipped_steps(skipped: Iterable[Skipped]) -> frozenset[int]:
    """Return the steps that are omitted."""
    return frozenset(each.step for each in skipped if isinstance(each, SkippedStep))
