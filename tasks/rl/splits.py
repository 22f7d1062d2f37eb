"""Splits that are not held out by a hash: those of the sources, or the last rows of each dataset."""

import sys
from collections.abc import Iterator, Sequence
from glob import has_magic

from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource, Split
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import count_rows, describe
from tokenmill.tasks.sources.selection import MissingSplitError


def by_source_splits(blend: Blend) -> Blend:
    """The blend with every split of its datasets; a file, and a dataset with `split`, are training data.

    Raises InputError for a blend that lists splits already, and for a dataset without training data.
    """
    if blend.datasets is None:
        raise InputError("splits=source: this blend lists its splits itself; remove the setting")
    found = {split: [part for source in blend.datasets for part in _of_split(source, split)] for split in SPLITS}
    return blend.model_copy(update={"datasets": None, **{split: sources or None for split, sources in found.items()}})


def _of_split(source: DataSource, split: Split) -> Iterator[DataSource]:
    if source.split is not None or (describe(source.path) and not has_magic(source.path)):
        yield from [source] if split == "train" else []
        return
    part = source.model_copy(update={"split": "validation" if split == "valid" else split})
    try:
        discover(part)
    except MissingSplitError:
        if split == "train":
            raise
        return
    yield part


def held_out_from(slices: Sequence[Slice], count: int) -> list[int | None]:
    """For each slice, the number of its first row among the last `count` rows of the dataset, or None.

    Blank and bad rows count. Only the last slices are read. A dataset of at most `count` rows keeps all for training.
    """
    found: list[int | None] = [None] * len(slices)
    left = count
    for number in reversed(range(len(slices))):
        if not left:
            return found
        rows = count_rows(slices[number], sys.maxsize)
        if rows > left:
            found[number] = rows - left
            return found
        found[number] = 0
        left -= rows
    return [None] * len(slices)
