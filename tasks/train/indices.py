"""Build megatron-core's index caches by its own code, and find out what samples read. Runs in Dask workers.

The indices of a prefix need some 30 bytes per document, and those of the blend 10 bytes per sample, in memory while they are
built; after that they are mapped.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tokenmill.tasks.blend.models import Split
from tokenmill.tasks.strict import Strict

from .engine import joined
from .job import TrainData, contents_of
from .order import DatasetReads
from .reads import content_numbers, range_digest, sample_hashes, step_digests
from .rows import samples_config, split_samples
from .samples import drawn, parts_of, pieces_of
from .settings import Plan

# Decorators of megatron-core's layers would import torch's compiler for 2 CPU-seconds, and no layer runs in this process.
with patch.object(torch, "compile", lambda function: function), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about GPU packages that datasets do not need
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset

TOKENS_AT_ONCE = 2**24


class Task(Strict, frozen=True):
    """What a worker needs: the order's data and plan, and local folders for the indices, and for those of remote pairs."""

    data: TrainData
    plan: Plan
    indices: str
    objects: str

    def samples(self, split: Split, size: int) -> Any:  # noqa: ANN401 - megatron-core has no types
        """megatron-core's dataset of a split; see `split_samples`."""
        plan = self.plan
        return split_samples(self.data, split, plan.sequence_length, size, plan.seed, self.indices, self.objects)


@lru_cache(maxsize=1)
def _opened(task: str) -> Any:  # noqa: ANN401
    """The train split of a task in JSON. A process opens its prefixes once: each takes some 10 ms."""
    found = Task.model_validate_json(task)
    with joined("cpu"):  # megatron-core asks for its rank
        return found.samples("train", found.plan.sizes[0])


class _BuiltError(Exception):
    """All asked-for prefixes are built."""


class _SomePrefixes(BlendedMegatronDatasetBuilder):
    """Builds the indices of some prefixes of a blend, and then raises _BuiltError."""

    numbers: Sequence[int] = ()

    def _build_megatron_datasets_parallel(self, prefixes: Any, split: Any, sizes_per_dataset: Any) -> Any:  # noqa: ANN401
        chosen = [[each[number] for number in self.numbers] for each in (prefixes, sizes_per_dataset)]
        super()._build_megatron_datasets_parallel(chosen[0], split, chosen[1])
        raise _BuiltError


def build_prefixes(task: Task, split: Split, size: int, phase: int | None, numbers: Sequence[int]) -> None:
    """Build the indices of the prefixes with these numbers, for `size` samples of a split, or of a phase of it."""
    plan, data = task.plan, task.data if phase is None else task.data.in_phase(phase)
    config, sizes = samples_config(
        data, split, plan.sequence_length, size, plan.seed, task.indices, task.objects
    )  # fmt: skip
    builder = _SomePrefixes(GPTDataset, sizes, lambda: True, config)
    builder.numbers = numbers
    try:
        builder.build()
    except _BuiltError:
        return


def build_blend(task: Task) -> list[int]:
    """Build the indices of the blends of all splits; returns how many samples of each prefix the steps read."""
    train = _opened(task.model_dump_json())
    with joined("cpu"):
        for split, sizes in task.plan.all_sizes.items():
            for size in sizes if split != "train" else ():
                task.samples(split, size)
    counts = np.zeros(len(parts_of(train)), np.int64)
    for numbers in _batches(task.plan.sizes[0], 2**24):
        counts += np.bincount(drawn(train, np.arange(numbers.start, numbers.stop))[0], minlength=len(counts))
    return counts.tolist()


def _batches(count: int, at_once: int) -> Iterator[slice]:
    return (slice(begin, min(begin + at_once, count)) for begin in range(0, count, at_once))


def digests(task: Task, begin: int, end: int, together: int) -> list[str]:
    """The digests of the steps from `begin` to before `end`, counted from 0; `together` steps share one."""
    samples, contents = _opened(task.model_dump_json()), content_numbers(contents_of(task.data, "train"))
    found = [
        digest
        for steps in _batches(
            end - begin, max(1, TOKENS_AT_ONCE // (task.plan.sequence_length * task.plan.global_batch))
        )
        for digest in _step_digests(samples, contents, task.plan, begin + steps.start, begin + steps.stop)
    ]
    return [range_digest(found[part]) for part in _batches(len(found), together)]


def _step_digests(samples: Any, contents: np.ndarray, plan: Plan, begin: int, end: int) -> list[str]:  # noqa: ANN401
    numbers = np.arange(begin * plan.global_batch, end * plan.global_batch)
    parts = _batches(len(numbers), max(1, TOKENS_AT_ONCE // plan.sequence_length))
    hashes = [sample_hashes(pieces_of(samples, numbers[part]), contents) for part in parts]
    return step_digests(np.concatenate(hashes), plan.global_batch)


def count_reads(
    task: Task, datasets: Sequence[str], numbers: Sequence[int], counts: Sequence[int]
) -> list[dict[str, Any]]:
    """How often the steps read the prefixes with these numbers, as `DatasetReads` of one prefix each.

    `datasets` are their datasets, `counts` the samples read of each.
    """
    parts = parts_of(_opened(task.model_dump_json()))
    return [
        _prefix_reads(parts[number], dataset, count, task.plan.sequence_length).model_dump()
        for dataset, number, count in zip(datasets, numbers, counts, strict=True)
    ]


def _prefix_reads(part: Any, dataset: str, drawn: int, length: int) -> DatasetReads:  # noqa: ANN401
    """Inputs are counted. A document whose last token is only a label was read whole."""
    lengths = np.asarray(part.dataset.sequence_lengths, np.int64)
    read = np.zeros(len(lengths), np.int64)
    for numbers in _batches(drawn, max(1, TOKENS_AT_ONCE // length)):
        pieces = pieces_of(part, np.arange(numbers.start, numbers.stop))
        inputs = pieces.length.copy()
        inputs[pieces.bounds[1:] - 1] -= 1
        np.add.at(read, pieces.document, inputs)
    tokens, filled = int(lengths.sum()), lengths > 0
    passes = len(part.document_index) // max(1, len(lengths))
    return DatasetReads(
        dataset=dataset, prefixes=1, tokens=tokens, drawn=drawn * length,
        unread=int(np.maximum(lengths - read, 0).sum()),
        cut=passes * tokens - 1 - (len(part.sample_index) - 1) * length,
        documents={
            "never": int((filled & (read == 0)).sum()),
            "once": int((filled & (read > 0) & (read <= lengths)).sum()),
            "partly": int((filled & (read > 0) & (read < lengths - 1)).sum()),
            "twice": int((filled & (read > lengths) & (read <= 2 * lengths)).sum()),
            "more": int((filled & (read > 2 * lengths)).sum()),
        },
    )  # fmt: skip
