"""Documents from .bin/.idx as rows to train on: megatron-core's own GPTDataset, weights of the blend and all.

It lays the documents of each source end to end, cuts them into rows, shuffles these, and mixes the sources in the shares that
blend.json gives; a row may hold the end of one document and the beginning of the next. What it computes for this it keeps
as arrays in the folder of the training. On an object store, .bin files are read by ranges.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from tokenmill.tasks.storage import is_local, join

from .batch import Batch
from .job import Source, TrainData


class _Tokens:
    """What GPTDataset wants to know of a tokenizer."""

    def __init__(self, data: TrainData) -> None:
        self.vocab_size = data.vocabulary_size
        self.eod = self.eos = data.eos
        self.pad = -1
        self.unique_identifiers = {"fingerprint": data.fingerprint}


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """See Rows."""

    samples: Any

    def batch(self, numbers: Sequence[int]) -> Batch:
        """See Rows."""
        samples = [self.samples[number % len(self.samples)] for number in numbers]
        tokens, labels, mask = (
            np.stack([np.asarray(sample[name]) for sample in samples]) for name in ("tokens", "labels", "loss_mask")
        )
        return Batch(tokens.astype(np.int64), labels.astype(np.int64), mask > 0, None)


def document_rows(
    data: TrainData, length: int, sizes: Sequence[int], seed: int, folder: str
) -> list[DocumentRows | None]:
    """The rows of the splits train and valid, `sizes` rows of each; None where none are asked for or there is none."""
    blends = [_blend(data.of(split)) if size else None for split, size in zip(("train", "valid"), sizes, strict=True)]
    remote = any(not is_local(file) for source in data.sources for file in source.files)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=cast("Any", _Tokens(data)),
        path_to_cache=join(folder, "indices"),
        mmap_bin_files=not remote,
        object_storage_cache_path=join(folder, "objects") if remote else None,
        blend_per_split=[*blends, None],
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [*sizes, 0], lambda: True, config).build()
    return [DocumentRows(each) if each is not None and len(each) else None for each in built[:2]]


def _blend(sources: Sequence[Source]) -> tuple[list[str], list[float]] | None:
    files = [file for source in sources for file in source.files]
    weights = [weight for source in sources for weight in source.weights]
    return (files, weights) if files else None
