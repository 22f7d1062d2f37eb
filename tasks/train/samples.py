"""What training steps read: megatron-core's datasets of a split, the pieces of documents in a sample, and their digests.

GPTDataset lays the documents of a prefix end to end, epoch after epoch (`document_index`), cuts them into samples
(`sample_index`) and shuffles these (`shuffle_index`). BlendedDataset draws from several prefixes (`dataset_index`,
`dataset_sample_index`). A sample of n tokens reads n + 1: the last one is only a label, and the next sample begins with it.
A million pieces take 0.1 s; no object is made per token or per piece.

A sample is hashed (xxh3_64) over its pieces: content of the prefix, document, offset, length; never a path. The digest of a step
is two sums over its samples, modulo 2^64: of the hashes, and of the hashes times the position in the step, counted from 1. So
the processes of a step add up their parts in any number and order, equal first sums mean the same samples in a different order,
and one wrong sample is found by division. A sample of 20 pieces costs about 2 microseconds.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from tokenmill.tasks.blend.models import SPLITS, Split
from tokenmill.tasks.score.nll import ranges
from tokenmill.tasks.storage import is_local, join
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest, xxh3_128_intdigest

from .job import TrainData

MASK = 2**64 - 1
FIELDS = 5  # 64-bit numbers hashed per piece: two of the content, then document, offset and length


class _Tokens:
    """The tokenizer interface that GPTDataset needs."""

    def __init__(self, data: TrainData) -> None:
        self.vocab_size = data.vocabulary_size
        self.eod = self.eos = data.eos
        self.pad = -1
        self.unique_identifiers = {"fingerprint": data.fingerprint}


def split_samples(data: TrainData, split: Split, length: int, size: int, seed: int, indices: str, folder: str) -> Any:  # noqa: ANN401
    """megatron-core's dataset of `size` samples of a split, with its index caches in `indices`; None without any.

    With phases, it is of all their samples. `folder` caches the indices of pairs on an object store. A process group is needed.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset

    if not data.of(split):
        return None
    if split == "train" and data.phases:
        phases = [
            split_samples(data.in_phase(number), split, length, phase.samples, seed, indices, folder)
            for number, phase in enumerate(data.phases)
        ]
        return Phased(phases, np.cumsum([phase.samples for phase in data.phases]))
    config, sizes = samples_config(data, split, length, size, seed, indices, folder)
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return built[SPLITS.index(split)]


def samples_config(
    data: TrainData, split: Split, length: int, size: int, seed: int, indices: str, folder: str
) -> tuple[Any, list[int]]:
    """megatron-core's configuration of a split, and its sizes of all splits. It names the index caches."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    place = SPLITS.index(split)
    blends: list[Any] = [None, None, None]
    sizes = [0, 0, 0]
    sources = data.of(split)
    weights = [weight for source in sources for weight in source.weights]
    blends[place], sizes[place] = ([file for source in sources for file in source.files], weights), size
    remote = any(not is_local(file) for source in data.sources for file in source.files)
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=length, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, tokenizer=cast("Any", _Tokens(data)),
        path_to_cache=indices, mmap_bin_files=not remote,
        object_storage_cache_path=join(folder, "objects") if remote else None, blend_per_split=blends,
    )  # fmt: skip
    return config, sizes


@dataclass(frozen=True, slots=True)
class Phased:
    """The samples of phases, one after the other."""

    phases: Sequence[Any]  # megatron-core's datasets
    ends: np.ndarray  # int64, the number of the sample after each

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, number: int) -> dict[str, Any]:
        phase = int(np.searchsorted(self.ends, number, side="right"))
        return self.phases[phase][number - self.begin(phase)]

    def begin(self, phase: int) -> int:
        """Return the number of the first sample of a phase."""
        return int(self.ends[phase - 1]) if phase else 0


class DocumentPiece(NamedTuple):
    """A run of tokens in a document."""

    source: int  # number of the prefix in its split
    document: int  # number of the document in the prefix
    offset: int  # in the document, in tokens
    length: int  # in tokens


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of several samples, in the order in which they are read: the fields of `DocumentPiece`, int64 [pieces]."""

    bounds: np.ndarray  # int64 [samples + 1], the places of each sample's pieces in the other arrays
    source: np.ndarray
    document: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    def of(self, sample: int) -> list[DocumentPiece]:
        """Return the pieces of a sample, counted from 0 in the samples that were asked for."""
        mine = slice(self.bounds[sample], self.bounds[sample + 1])
        fields = (self.source[mine], self.document[mine], self.offset[mine], self.length[mine])
        return [DocumentPiece(*each) for each in zip(*(field.tolist() for field in fields), strict=True)]


def parts_of(dataset: Any) -> list[Any]:  # noqa: ANN401 - megatron-core has no types
    """Return the GPTDatasets that `dataset` draws from, one per prefix, in the order of the blend; `dataset` itself if it is one."""
    if isinstance(dataset, Phased):
        return [part for phase in dataset.phases for part in parts_of(phase)]
    return list(getattr(dataset, "datasets", [dataset]))


def pieces_of(dataset: Any, numbers: Sequence[int] | np.ndarray) -> Pieces:  # noqa: ANN401
    """Return the pieces that samples of a BlendedDataset or GPTDataset read; their numbers are as in `dataset[number]`."""
    source, own = drawn(dataset, np.asarray(numbers, np.int64))
    parts, counts = parts_of(dataset), np.zeros(len(source), np.int64)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for number in np.unique(source).tolist():
        part, places = parts[number], np.flatnonzero(source == number)
        place = np.asarray(part.shuffle_index[own[places]], np.int64)
        begin, end = (np.asarray(part.sample_index[each], np.int64) for each in (place, place + 1))
        counts[places] = pieces = end[:, 0] - begin[:, 0] + 1
        last = np.cumsum(pieces) - 1
        first = last - pieces + 1
        document = np.asarray(part.document_index[ranges(begin[:, 0], pieces)], np.int64)
        # A piece begins with its document and ends with it, except a sample's first and last pieces.
        offset = np.zeros(len(document), np.int64)
        offset[first] = begin[:, 1]
        length = np.asarray(part.dataset.sequence_lengths[document], np.int64) - offset
        length[last] = end[:, 1] + int(part.config.add_extra_token_to_sequence) - offset[last]
        found.append((places, pieces, np.stack([document, offset, length])))
    # Put the pieces, found prefix by prefix, into the order of the samples, without those of empty documents.
    bounds = np.concatenate([[0], np.cumsum(counts)])
    fields = np.empty((3, int(bounds[-1])), np.int64)
    for places, pieces, values in found:
        fields[:, ranges(bounds[places], pieces)] = values
    read = fields[2] > 0
    kept = np.concatenate([[0], np.cumsum(read)])[bounds]
    return Pieces(kept, np.repeat(source, counts)[read], *fields[:, read])


def samples_with(dataset: Any, source: int, document: int) -> np.ndarray:  # noqa: ANN401
    """Return the numbers (int64, ascending) of the samples that read a token of a document in prefix number `source`."""
    if isinstance(dataset, Phased):
        for number, phase in enumerate(dataset.phases):
            if source < (count := len(parts_of(phase))):
                found = samples_with(phase, source, document) + dataset.begin(number)
                return found[found < dataset.ends[number]]  # a phase's dataset may hold more than the phase reads
            source -= count
        raise IndexError(source)
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


def drawn(dataset: Any, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN401
    """Return the prefix of each sample, and its number among the samples of that prefix (int64 [samples] each)."""
    if isinstance(dataset, Phased):
        found, first = np.empty((2, len(numbers)), np.int64), 0
        phases = np.searchsorted(dataset.ends, numbers, side="right")
        for number, phase in enumerate(dataset.phases):
            mine = np.flatnonzero(phases == number)
            source, own = drawn(phase, numbers[mine] - dataset.begin(number))
            found[:, mine] = source + first, own
            first += len(parts_of(phase))
        return found[0], found[1]
    if not hasattr(dataset, "datasets"):
        return np.zeros(len(numbers), np.int64), numbers
    indices = (dataset.dataset_index, dataset.dataset_sample_index)
    return np.asarray(indices[0][numbers], np.int64), np.asarray(indices[1][numbers], np.int64)


def content_numbers(contents: Sequence[str]) -> np.ndarray:
    """Return content names as numbers, uint64 [contents, 2]."""
    numbers = [divmod(xxh3_128_intdigest(content.encode()), 2**64) for content in contents]
    return np.array(numbers, np.uint64).reshape(-1, 2)


def sample_hashes(pieces: Pieces, contents: np.ndarray) -> np.ndarray:
    """Return the hash of each sample, uint64; `contents` are the prefixes', from `content_numbers`. Empty without any."""
    if not len(contents):
        return np.empty(0, np.uint64)
    fields = np.empty((len(pieces.source), FIELDS), "<u8")
    fields[:, :2] = contents[pieces.source]
    for column, values in enumerate((pieces.document, pieces.offset, pieces.length), 2):
        fields[:, column] = values
    data, bounds = memoryview(fields.tobytes()), (pieces.bounds * fields.itemsize * FIELDS).tolist()
    hashes = [xxh3_64_intdigest(data[begin:end]) for begin, end in itertools.pairwise(bounds)]
    return np.array(hashes, np.uint64)


def step_sums(hashes: np.ndarray, positions: np.ndarray) -> tuple[int, int]:
    """Return the two sums over samples (uint64) at `positions` of a step, counted from 0."""
    return int(hashes.sum()), int((hashes * (positions.astype(np.uint64) + np.uint64(1))).sum())


def step_digest(sums: Iterable[tuple[int, int]]) -> str:
    """Return the digest of a step from the sums of its parts: both totals, as 32 hexadecimal digits."""
    return "".join(f"{sum(each) & MASK:016x}" for each in zip(*sums, strict=True))


def step_digests(hashes: np.ndarray, global_batch: int) -> list[str]:
    """Return the digests of whole steps, from the hashes of all their samples in order."""
    positions = np.arange(global_batch)
    return [step_digest([step_sums(step, positions)]) for step in hashes.reshape(-1, global_batch)]


def range_digest(digests: Sequence[str]) -> str:
    """Return the digest of consecutive steps."""
    return digests[0] if len(digests) == 1 else xxh3_128_hexdigest("".join(digests).encode())


def wrong_position(planned: str, observed: str, global_batch: int) -> int | None:
    """Return the position of the wrong sample, if replacing a single one explains the difference between two digests."""
    hashes, weighted = ((int(observed[part], 16) - int(planned[part], 16)) & MASK for part in (np.s_[:16], np.s_[16:]))
    explained = (place for place in range(global_batch) if hashes and (place + 1) * hashes & MASK == weighted)
    return next(explained, None)
