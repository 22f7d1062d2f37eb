"""The reads of a training step: its samples as text, each document with its source row; and back, the steps
that read a row.

The pieces of samples are from megatron-core's own indices, so they are exactly the trainer's reads; a sample of packs is
a pack. Opening the indices takes some seconds, mostly to import torch. After that a step of a hundred samples takes less than a
second.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from tokenmill.tasks.dataset.dataset import Dataset, open_dataset
from tokenmill.tasks.dataset.fates import Location, Read
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.kit.parts import counted, visible_line
from tokenmill.tasks.storage import absolute, join
from tokenmill.tasks.train.events import TrainStep
from tokenmill.tasks.train.history import history_of
from tokenmill.tasks.train.job import SkippedDocument, TrainData, is_training, read_job
from tokenmill.tasks.train.order import INDICES, ORDER, read_order, with_quotas
from tokenmill.tasks.train.prepared import prepared_data, vocabulary_of
from tokenmill.tasks.train.proof import DocumentReads, Opened, PackReads, opened
from tokenmill.tasks.train.rows import FlatPacks
from tokenmill.tasks.train.samples import parts_of, pieces_of, samples_with

from .rendered_view import print_view
from .view import Decode, Pack, Passage, SubSequence, View, decoded, sub_sequence, view_record
from .why import Follower, Story, UnknownFileError, describe_steps, why_row

TEXT = "text"
ROW = re.compile(r".+:[1-9][0-9]*")
AT_ONCE = 1_000  # documents searched at a time
MOST_FOUND = 100


@dataclass(frozen=True, slots=True)
class Found:
    """A document with its source row (`line` is None if unknown), its place, from 0, in the published file `name`, the steps
    that read it, and its entry in a list of what to omit.
    """

    document: str
    file: str
    line: int | None
    name: str
    number: int
    steps: Sequence[Read]
    skip: SkippedDocument


@dataclass(frozen=True, slots=True)
class ShownStep:
    """The samples of a step, from 1, and its loss and gradient norm, None if it has not been trained yet."""

    step: int
    samples: int
    metrics: TrainStep | None
    view: View


class Reading:
    """The order in which a training run reads its data: the one in the folder of a training run, or planned by `tokenmill order`."""

    def __init__(self, path: str, data: TrainData, steps: int, global_batch: int, read: Opened) -> None:
        self.path = path
        self.data = data
        self.steps = steps
        self._batch = global_batch
        self._opened = read
        self._files = [file for source in data.of("train") for file in source.files]

    @classmethod
    def of(cls, path: str) -> "Reading":
        """Return the order of a training run or an order in a folder. Raises InputError if there is none, or the data were replaced."""
        path = absolute(path)
        if is_training(path):
            job = read_job(path)
            if prepared_data(job.data.path).made_from != job.data.made_from:
                raise InputError(f"{job.data.path}: prepared again since the training run in {path}; its rows are gone")
            return cls(path, job.data, job.settings.steps, job.settings.global_batch, opened(job, path))
        data, order = prepared_data(path), read_order(path)
        if order is None:
            advice = (
                "; point at the folder of a training run on it" if data.kind == "sft" else f": tokenmill order {path}"
            )
            raise InputError(f"{join(path, ORDER)}: no order here, so no step is known{advice}")
        if order.content != data.made_from:
            raise InputError(
                f"{path}: prepared again since its order was planned; plan it again: tokenmill order {path}"
            )
        data = with_quotas(data, order.sequence_length, order.global_batch)
        read = DocumentReads(data, order, join(path, INDICES))
        return cls(path, data, order.steps, order.global_batch, read)

    @cached_property
    def prepared(self) -> Dataset:
        return open_dataset(self.data.path)

    @cached_property
    def _follower(self) -> Follower:
        return Follower(self.data.path)

    @cached_property
    def _ends(self) -> np.ndarray:
        """The number of packs up to the end of each file."""
        return np.cumsum([self.prepared.names.rows(file) for file in self._files])

    @cached_property
    def decode(self) -> Decode:
        """Turns ids into text, with the tokenizer of the data."""
        return vocabulary_of(self.data).decode

    def step(self, step: int, rows: int | None) -> ShownStep:
        """Return the first `rows` samples of a step, all for None. Raises InputError for a step that is not in the training run."""
        if not 1 <= step <= self.steps:
            raise InputError(f"--step: {step} isn't a step of {self.path}, which has steps 1 to {self.steps:,}")
        begin = (step - 1) * self._batch
        numbers = range(begin, begin + (self._batch if rows is None else min(rows, self._batch)))
        read = self._opened
        samples = self._packs(read, numbers) if isinstance(read, PackReads) else self._samples(read, numbers)
        packs: list[Pack] = []
        for sample, pack in enumerate(samples):
            # If an earlier preparation published the file, the original file and line
            lines = [self._follower.origin(each.file, each.line) if each.line else None for each in pack.sequences]
            sequences = [
                replace(each, origin=f"{found[0]}:{found[1]}" if found and found[0] != each.file else None)
                for each, found in zip(pack.sequences, lines, strict=True)
            ]
            packs.append(replace(pack, sample=sample, sequences=sequences))
        metrics = history_of(self.path).steps.get(step) if is_training(self.path) else None
        view = View(self.path, self.data.kind, str(self.data.tokenizer["model"]), packs)
        return ShownStep(step, self._batch, metrics, view)

    def _packs(self, read: PackReads, numbers: Sequence[int]) -> list[Pack]:
        found: list[Pack] = []
        for pack in map(read.rows.pack, numbers):
            file = int(np.searchsorted(self._ends, pack, side="right"))
            part, row = self.prepared.names.document(self._files[file], pack - self._first(file))
            # Ids and mask are those that the trainer reads; only roles and sources are from the file
            found.append(decoded(part, row, self.decode, tokens=_tokens(read.rows.packs, pack)))
        return found

    def _samples(self, read: DocumentReads, numbers: Sequence[int]) -> list[Pack]:
        """Samples of documents. The tokens are read as the trainer reads them, by megatron-core's IndexedDataset."""
        prefixes = [part.dataset for part in parts_of(read.samples)]
        pieces = pieces_of(read.samples, [number % len(read.samples) for number in numbers])
        found: list[Pack] = []
        for own in map(pieces.of, range(len(numbers))):
            sequences: list[SubSequence] = []
            for number, piece in enumerate(own):
                part, document = self.prepared.names.document(self._files[piece.source], piece.document)
                ids = prefixes[piece.source].get(piece.document, piece.offset, piece.length).tolist()
                passages = [Passage(TEXT, trained=True, tokens=len(ids), text=self.decode(ids))]
                sequences.append(sub_sequence(part, document, number, passages, piece.offset))
            first, size = own[0], sum(piece.length for piece in own)
            part, _ = self.prepared.names.document(self._files[first.source], first.document)
            place = part.dataset, self._files[first.source], first.document
            found.append(Pack(*place, size, 0, None, len(own), sequences))
        return found

    def steps_of(self, name: str, number: int) -> list[Read]:
        """Return the steps that read a document, or pack, of a published file, each with the number of the sample."""
        if name not in self._files:
            return []
        file, size = self._files.index(name), self.steps * self._batch  # steps may read only some of the order
        if isinstance(self._opened, PackReads):
            numbers = self._opened.rows.numbers_of(self._first(file) + number, size)
        else:
            numbers = [each for each in samples_with(self._opened.samples, file, number).tolist() if each < size]
        return [Read(each // self._batch + 1, each % self._batch) for each in numbers]

    def _first(self, file: int) -> int:
        return int(self._ends[file - 1]) if file else 0

    def find(self, wanted: str) -> list[Found]:
        """Return the training documents made from the row FILE:LINE; if the data lack such a file, the first MOST_FOUND
        that hold this text, which every document is searched for.

        Raises InputError if there are none, and as `why_row` does.
        """
        places = self._of_row(wanted) if ROW.fullmatch(wanted) else None
        found = [each for place in places for each in self._found(*place)] if places is not None else None
        if found is None:
            # Every document has to be decoded, so the search ends with the first MOST_FOUND
            hits = (each for place in self._with_text(wanted) for each in self._found(*place, text=wanted))
            found = list(islice(hits, MOST_FOUND))
        if not found:
            raise InputError(
                f"--find: no document of the train split of {self.data.path} was made of or holds {wanted!r}"
            )
        return found

    def _of_row(self, row: str) -> list[tuple[str, int, tuple[str, int] | None]] | None:
        """The published places of a row: file, number, and for packs its shard and row. None if the file is unknown."""
        try:
            stories = why_row(self.data.path, row, "--find")
        except UnknownFileError:
            return None
        packed = self.data.kind == "sft"
        return [
            (place.name, place.published_number, (fate.key, fate.row) if packed else None)
            for fate in (story[-1] for story in stories)
            if fate.path == self.prepared.path
            for place in fate.places
            if place.name in self._files and place.published_number is not None
        ]

    def _with_text(self, text: str) -> Iterator[tuple[str, int, None]]:
        """The published places of documents, or packs, with a text."""
        names = self.prepared.names
        for file, name in enumerate(self._files):
            for first in range(0, names.rows(name), AT_ONCE):
                # Most batches of documents don't have the text, so they are decoded together first
                rows = [self._ids(file, number) for number in range(first, min(first + AT_ONCE, names.rows(name)))]
                if text in self.decode(np.concatenate(rows).tolist()):
                    hits = (number for number, ids in enumerate(rows, first) if text in self.decode(ids.tolist()))
                    yield from ((name, number, None) for number in hits)

    def _ids(self, file: int, number: int) -> np.ndarray:
        if isinstance(self._opened, PackReads):
            return _tokens(self._opened.rows.packs, self._first(file) + number)[0]
        return parts_of(self._opened.samples)[file].dataset.get(number)

    def _found(self, name: str, number: int, document: tuple[str, int] | None, text: str = "") -> Iterator[Found]:
        steps, packed = self.steps_of(name, number), self.data.kind == "sft"
        part, row = self.prepared.names.document(name, number)
        for sequence in decoded(part, row, self.decode, document and part.numbers_of(*document)).sequences:
            if text in "".join(passage.text for passage in sequence.passages):
                file = self._files.index(name)
                skip = SkippedDocument(
                    data=self.data.made_from,
                    source=0 if packed else file,
                    document=self._first(file) + number if packed else number,
                    sequence=sequence.number if packed else None,
                    row=f"{sequence.file}:{sequence.line}",
                )
                yield Found(sequence.document, sequence.file, sequence.line, name, number, steps, skip)


def _tokens(packs: FlatPacks, pack: int) -> tuple[np.ndarray, np.ndarray]:
    place = slice(*packs.token_offsets[pack : pack + 2])
    return packs.ids[place], packs.trained[place] > 0


def data_in(path: str) -> str:
    """Return the folder of the data: that which a training run in `path` reads, else `path`. Raises InputError for a damaged job."""
    return read_job(path).data.path if is_training(path) else path


def with_steps(path: str, stories: Sequence[Story]) -> list[Story]:
    """Return the stories, with the steps that train on each document if `path` is a training run or has an order."""
    if not is_training(path) and read_order(absolute(path)) is None:
        return list(stories)
    reading = Reading.of(path)

    def read(place: Location) -> Location:
        if place.name is None or place.published_number is None:
            return replace(place, steps=[])
        return replace(place, steps=reading.steps_of(place.name, place.published_number))

    return [[*before, replace(last, places=[read(place) for place in last.places])] for *before, last in stories]


def step_record(shown: ShownStep) -> dict[str, Any]:
    """Return a step as a JSON record for the next command."""
    view = view_record(shown.view)["view"]
    metrics = shown.metrics.model_dump() if shown.metrics else None
    return {"step": {**view, "type": "step", "step": shown.step, "samples": shown.samples, "metrics": metrics}}


def find_record(path: str, found: Sequence[Found]) -> dict[str, Any]:
    """Return the steps that read documents, as a JSON record for the next command."""
    documents = [{**asdict(each), "skip": each.skip.model_dump()} for each in found]
    return {"step": {"path": absolute(path), "type": "step", "documents": documents}}


def describe_step(shown: ShownStep) -> str:
    """One line about a step."""
    count, found = len(shown.view.packs), shown.metrics
    samples = ("" if count == shown.samples else f"{count:,} of ") + counted(shown.samples, "sample")
    trained = f", loss {found.loss:.4f}, gradient norm {found.gradient_norm:.4f}" if found else ""
    return f"step {shown.step:,}: {samples}{trained}"


def print_step(shown: ShownStep, console: Console) -> None:
    """Print a step, sample by sample."""
    console.print(Text(describe_step(shown), "bold"))
    print_view(shown.view, console)


def print_found(found: Sequence[Found], console: Console) -> None:
    """Print the steps that read each document."""
    for each in found:
        place = visible_line(f"{each.file}:{each.line}: document {each.document}")
        console.print(Text(f"{place}: {describe_steps(each.steps)}", overflow="fold"))
