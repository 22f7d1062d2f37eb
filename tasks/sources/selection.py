"""Which files of a folder, prefix or repository belong to a subset and a split: one rule for every kind of store.

A *subset* is a whole component of the path, or the whole name of a file less its ending. Never a prefix: data sets
that hold `High-Quality/` beside `High-Quality-Synthetic/` are common, and a prefix would take both, twice over where a
blend names each.

A *split* is a whole folder or a file called `train.jsonl`, `train-00000-of-00004.parquet`, `train_0001.jsonl` and the
like. Where no path has anything to do with splits at all, everything is `train`, as on the Hugging Face hub.
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable

from fsspec.utils import glob_translate
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError

from .formats import ENDINGS, METADATA, describe, without_ending

SHOWN = 12
NUMBER = r"[-._]\d+(?:-of-\d+)?(?:-[0-9a-f]{16})?"
SPLIT_WORDS = re.compile(
    r"(?<![a-z0-9])(?:train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z0-9])",
    re.IGNORECASE,
)

ENDING = re.compile(r"(?<=.)\.[a-z][a-z0-9]{0,9}(?:\.(?:gz|zst|bz2|xz|lz4))?\Z")
"""What the ending of a file is: letters and digits behind the last dot, with the dot before it if that is a compression."""


class MissingSplitError(InputError):
    """A data set has no split of the name that was asked for."""


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """`pattern` with `*`, `?`, `[…]` and `**` (any number of folders) as a regular expression for whole paths."""
    try:
        return re.compile(glob_translate(pattern))
    except ValueError as error:
        raise InputError(f"{pattern}: '**' stands for whole folders; write '**/*.jsonl', not '**.jsonl'") from error


def data_names(names: Iterable[str], place: str) -> list[str]:
    """The names among `names`, paths below `place`, that hold rows: ours by their ending, neither hidden nor metadata.

    Raises InputError, which says what was found instead, when none is left.
    """
    seen = sorted(names)
    visible = [name for name in seen if not any(part.startswith(".") for part in name.split("/"))]
    data = [name for name in visible if describe(name) and name.rsplit("/", 1)[-1] not in METADATA]
    if data:
        return data
    found = f"of {len(seen)} files none can be read: {shortened(seen)}" if seen else "there are no files"
    raise InputError(f"{place}: {found}; supported are {', '.join(ENDINGS)}")


def kinds_skipped(names: Iterable[str], subset: str | None) -> Counter[str]:
    """How many of `names` hold no rows for `data_names`, by kind: an ending, `hidden`, `metadata` or `no ending`.

    What lies in a hidden folder counts as one. With a subset only names that belong to it count.
    """
    seen = {_up_to_hidden(name) for name in names if subset is None or in_subset(name, subset)}
    return Counter(kind for name in seen if (kind := _kind_skipped(name)))


def _up_to_hidden(name: str) -> str:
    parts = name.split("/")
    first = next((number for number, part in enumerate(parts, 1) if part.startswith(".")), len(parts))
    return "/".join(parts[:first])


def _kind_skipped(name: str) -> str | None:
    base = name.rpartition("/")[2]
    if base.startswith("."):
        return "hidden"
    if describe(name):
        return "metadata" if base in METADATA else None
    ending = ENDING.search(base.lower())
    return ending[0] if ending else "no ending"


def choose(names: list[str], source: DataSource, subsets: Iterable[str] = ()) -> list[str]:
    """Those of `names` (paths below the place that `source` names) that its subset and split ask for.

    Raises InputError when none does, listing what there is, nearest first; `subsets` are names to add to that list.
    """
    subset, split = source.subset, source.split
    if subset is not None:
        known = {*subsets, *(part for name in names for part in without_ending(name).split("/"))}
        names = [name for name in names if in_subset(name, subset)]
        if not names:
            raise missing(source, "subset", subset, known)
    return names if split is None else _of_split(names, source, split)


def _of_split(names: list[str], source: DataSource, split: str) -> list[str]:
    found = [name for name in names if in_split(name, split)]
    if found:
        return found
    if split == "train" and not any(SPLIT_WORDS.search(name) for name in names):
        return names
    raise missing(source, "split", split, {part for name in names for part in _split_names(name)})


def in_subset(name: str, subset: str) -> bool:
    """Whether `subset` is one or more whole components of `name`, whose last component has lost its ending."""
    return f"/{subset.strip('/')}/" in f"/{without_ending(name)}/"


def in_split(name: str, split: str) -> bool:
    """Whether `split` is a folder of `name`, or its file is that split or a numbered part of it."""
    return split in _split_names(name)


def _split_names(name: str) -> list[str]:
    """Every split that the path `name` could be of: its folders, its stem, its stem less a part number."""
    *folders, file = without_ending(name).split("/")
    return [*folders, file, re.sub(rf"{NUMBER}\Z", "", file)]


def missing(source: DataSource, kind: str, asked: str, known: Iterable[str]) -> InputError:
    """The error for a subset or split that is not there: it lists those that are, nearest first."""
    error = MissingSplitError if kind == "split" else InputError
    near = sorted(known, key=lambda name: (-difflib.SequenceMatcher(None, asked, name).ratio(), name))
    return error(
        f"{source.path}: no data of {kind} {asked!r} (data set {source.name!r}); it has {shortened(near) or 'none'}"
    )


def shortened(names: list[str]) -> str:
    """The first names of a list as text, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name) for name in names[:SHOWN]) + more
