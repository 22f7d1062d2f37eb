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
# The folder of the trained model, inside the training run's folder, in the format of Hugging Face's libraries.
MODEL = "model"

Kind = Literal["pretrain", "sft"]


ReadSplit = Literal["train", "valid"]
READ_SPLITS: tuple[ReadSplit, ReadSplit] = ("train", "valid")  # the splits that a training run reads


class TrainSource(Strict, frozen=True):
    """The files for one split of one dataset, in the order of the blend."""

    dataset: str
    split: Literal["train", "valid", "test"]
    files: list[str]  # prefixes of .bin/.idx pairs, or packed Parquet files
    weights: list[float]  # of the files in blend.json
    tokens: int  # of the documents, without padding
    rows: int | None = None  # packs, None for .bin/.idx
    # The bytes of each file in any place: its shard and the part of it. Empty in a job of an earlier version, whose reads
    # aren't recorded.
    contents: list[str] = Field(default_factory=list[str])
    sizes: list[int] = Field(default_factory=list[int])  # tokens of each pair
    phase: int = 0  # number of the phase that reads them


class TrainPhase(Strict, frozen=True):
    """A phase of training."""

    name: str
    tokens: float  # its budget
    samples: int = 0  # the samples that it reads, 0 before `order.with_quotas`


class TrainData(Strict, frozen=True):
    """A preparation to train on."""

    path: str
    kind: Kind
    made_from: str  # digest of the published data, independent of place and time
    tokenizer: dict[str, str | bool | None]  # the fields of `TokenizerSource`
    fingerprint: str  # of the tokenizer's content
    vocabulary_size: int
    eos: int | None
    sources: list[TrainSource]
    pack_size: int | None = None  # None for .bin/.idx, as is the next
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
    """A document that is not trained on."""

    data: str  # content of the data that it is in
    source: int = Field(ge=0)  # number of its prefix in the train split; 0 for packs
    document: int = Field(ge=0)  # number in the prefix; for packs, of the pack in the split
    sequence: int | None = Field(default=None, ge=0)  # number in the pack, None for documents
    row: str = ""  # names the source row for people


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
    entries: list[Skipped] = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            where = f"{place}:{number}"
            try:
                fields = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise InputError(
                    f'{where}: {error}; write one JSON object per line, such as {{"step": 120}}'
                ) from error
            is_step = isinstance(fields, dict) and "step" in fields
            entries.append(parse(SkippedStep if is_step else SkippedDocument, fields, where))
    return entries


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
