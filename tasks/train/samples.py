"""What a training sample reads: pieces of documents, from megatron-core's own index arrays.

GPTDataset lays the documents of a prefix end to end, epoch after epoch (`document_index`), cuts them into samples
(`sample_index`) and shuffles these (`shuffle_index`). BlendedDataset draws from several prefixes (`dataset_index`,
`dataset_sample_index`). A sample of n tokens reads n + 1: the last one is only a label, and the next sample begins with it.
A million pieces take 0.1 s; no object is made per token or per piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class Phased:
    """The samples of phases, one after the other: `phases` are megatron-core's datasets, `ends` (int64) where each ends."""

    phases: Sequence[Any]
    ends: np.ndarray

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, number: int) -> dict[str, Any]:
        phase = int(np.searchsorted(self.ends, number, side="right"))
        return self.phases[phase][number - self.begin(phase)]

    def begin(self, phase: int) -> int:
        """The number of the first sample of a phase."""
        return int(self.ends[phase - 1]) if phase else 0


class Piece(NamedTuple):
    """A run of tokens in a document: `source` is the number of the prefix in its split, `document` the number of the
    document in the prefix; `offset` (in the document) and `length` are in tokens.
    """

    source: int
    document: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of several samples, in the order in which they are read.

    `bounds` (int64 [samples + 1]) are the places of each sample's pieces in the other arrays (int64 [pieces]), which hold the
    fields of `Piece`.
    """

    bounds: np.ndarray
    source: np.ndarray
    document: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    def of(self, sample: int) -> list[Piece]:
        """The pieces of a sample, counted from 0 in the samples that were asked for."""
        mine = slice(self.bounds[sample], self.bounds[sample + 1])
        fields = (self.source[mine], self.document[mine], self.offset[mine], self.length[mine])
        return [Piece(*each) for each in zip(*(field.tolist() for field in fields), strict=True)]


def parts_of(dataset: Any) -> list[Any]:  # noqa: ANN401 - megatron-core has no types
    """The GPTDatasets that `dataset` draws from, one per prefix, in the order of the blend; `dataset` itself if it is one."""
    if isinstance(dataset, Phased):
        return [part for phase in dataset.phases for part in parts_of(phase)]
    return list(getattr(dataset, "datasets", [dataset]))


def pieces_of(dataset: Any, numbers: Sequence[int] | np.ndarray) -> Pieces:  # noqa: ANN401
    """The pieces that samples of a BlendedDataset or GPTDataset read; their numbers are those of `dataset[number]`."""
    asked = np.asarray(numbers, np.int64)
    source, own = drawn(dataset, asked)
    parts = parts_of(dataset)
    found = [(int(number), np.flatnonzero(source == number)) for number in np.unique(source)]
    return _joined(source, [(places, *_in_prefix(parts[number], own[places])) for number, places in found])


def samples_with(dataset: Any, source: int, document: int) -> np.ndarray:  # noqa: ANN401
    """The numbers (int64, ascending) of the samples that read a token of a document of prefix number `source`."""
    if isinstance(dataset, Phased):
        return _samples_in_phase(dataset, source, document)
    part = parts_of(dataset)[source]
    places = np.flatnonzero(np.asarray(part.document_index) == document)
    begins = np.asarray(part.sample_index)[:, 0]
    first = np.searchsorted(begins, places, side="left") - 1
    last = np.minimum(np.searchsorted(begins, places, side="right"), len(begins) - 1)
    near = [np.arange(max(0, begin), end) for begin, end in zip(first.tolist(), last.tolist(), strict=True)]
    own = np.flatnonzero(np.isin(np.asarray(part.shuffle_index), np.concatenate([np.empty(0, np.int64), *near])))
    numbers = own
    if hasattr(dataset, "datasets"):
        drawn = np.asarray(dataset.dataset_index) == source
        numbers = np.flatnonzero(drawn & np.isin(np.asarray(dataset.dataset_sample_index), own))
    pieces = pieces_of(dataset, numbers)
    samples = np.repeat(np.arange(len(numbers)), np.diff(pieces.bounds))
    return numbers[np.unique(samples[pieces.document == document])]


def _samples_in_phase(dataset: Phased, source: int, document: int) -> np.ndarray:
    for number, phase in enumerate(dataset.phases):
        count = len(parts_of(phase))
        if source < count:
            found = samples_with(phase, source, document) + dataset.begin(number)
            return found[found < dataset.ends[number]]
        source -= count
    raise IndexError(source)


def drawn(dataset: Any, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN401
    """The prefix of each sample, and its number among the samples of that prefix (int64 [samples] each)."""
    if isinstance(dataset, Phased):
        return _drawn_in_phases(dataset, numbers)
    if not hasattr(dataset, "datasets"):
        return np.zeros(len(numbers), np.int64), numbers
    return (
        np.asarray(dataset.dataset_index[numbers], np.int64),
        np.asarray(dataset.dataset_sample_index[numbers], np.int64),
    )


def _drawn_in_phases(dataset: Phased, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found = np.empty((2, len(numbers)), np.int64)
    phases, first = np.searchsorted(dataset.ends, numbers, side="right"), 0
    for number, phase in enumerate(dataset.phases):
        mine = np.flatnonzero(phases == number)
        source, own = drawn(phase, numbers[mine] - dataset.begin(number))
        found[:, mine] = source + first, own
        first += len(parts_of(phase))
    return found[0], found[1]


def _in_prefix(part: Any, numbers: np.ndarray) -> tuple[np.ndarray, ...]:  # noqa: ANN401
    """The number of pieces of each sample of a GPTDataset; document, offset and length of each piece."""
    place = np.asarray(part.shuffle_index[numbers], np.int64)
    begin, end = (np.asarray(part.sample_index[each], np.int64) for each in (place, place + 1))
    counts = end[:, 0] - begin[:, 0] + 1
    last = np.cumsum(counts) - 1
    first = last - counts + 1
    within = np.arange(counts.sum()) - np.repeat(first, counts)
    document = np.asarray(part.document_index[np.repeat(begin[:, 0], counts) + within], np.int64)
    offset = np.zeros(len(document), np.int64)
    offset[first] = begin[:, 1]
    length = np.asarray(part.dataset.sequence_lengths[document], np.int64) - offset
    length[last] = end[:, 1] + int(part.config.add_extra_token_to_sequence) - offset[last]
    return counts, document, offset, length


def _joined(source: np.ndarray, found: Sequence[tuple[np.ndarray, ...]]) -> Pieces:
    """The pieces found prefix by prefix, in the order of the samples; empty documents are left out."""
    counts = np.zeros(len(source), np.int64)
    for places, own, *_ in found:
        counts[places] = own
    bounds = np.concatenate([[0], np.cumsum(counts)])
    fields = np.empty((3, int(bounds[-1])), np.int64)
    for places, own, *arrays in found:
        starts = np.repeat(bounds[places], own)
        within = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
        fields[:, starts + within] = arrays
    sources = np.repeat(source, counts)
    read = fields[2] > 0
    kept = np.concatenate([[0], np.cumsum(read)])[bounds]
    return Pieces(kept, sources[read], *fields[:, read])
