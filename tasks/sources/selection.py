"""Select the files of a folder, prefix or repository by subset and split.

A *subset* is a whole path component, or a file name without its ending. It is never a prefix: data sets with both
`High-Quality/` and `High-Quality-Synthetic/` are common, and a prefix would match both.

A *split* is a whole folder, or a file called `train.jsonl`, `train-00000-of-00004.parquet`, `train_0001.jsonl` or similar. If
no path contains a split name, everything is `train`, as on the Hugging Face hub.
"""

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from fsspec.utils import glob_translate
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError

from .files import InputWarning
from .formats import ENDINGS, METADATA, describe, without_ending

SHOWN = 12
NO_ENDING = "no ending"
NUMBER = r"[-._]\d+(?:-of-\d+)?(?:-[0-9a-f]{16})?"
SPLIT_WORDS = re.compile(
    r"(?<![a-z0-9])(?:train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z0-9])",
    re.IGNORECASE,
)

ENDING = re.compile(r"(?<=.)\.[a-z][a-z0-9]{0,9}(?:\.(?:gz|zst|bz2|xz|lz4))?\Z")
"""The extension of any file: letters and digits after the last dot, with the dot before it if that is a compression."""


NO_DATA = re.compile(
    r"\.(?:md|rst|py|ipynb|sh|ya?ml|toml|cfg|ini|lock|cff|bib|tex|license|log|html?|css|js|crc|md5|sha\d+|asc|sig"
    r"|png|jpe?g|gif|svg|webp|ico|pdf)(?:\.(?:gz|zst|bz2|xz|lz4))?"
)
"""Endings of files that stand beside data: documentation, code, settings, checksums and pictures."""

NUMBERED = re.compile(r"[\d.]")
"""A name without an ending is one of data if it has a number or a dot, as `part-00000` or `a.jsonl_old`; `README` has neither."""


class MissingSplitError(InputError):
    """A data set lacks the requested split."""


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """`pattern` with `*`, `?`, `[…]` and `**` (any number of folders) as a regular expression for whole paths."""
    try:
        return re.compile(glob_translate(pattern))
    except ValueError as error:
        raise InputError(f"{pattern}: '**' stands for whole folders; write '**/*.jsonl', not '**.jsonl'") from error


def data_names(names: Iterable[str], place: str) -> list[str]:
    """The paths among `names` (below `place`) that hold rows: of a known format, neither hidden nor metadata.

    Raises InputError, listing what was found instead, if none is left.
    """
    seen = sorted(names)
    visible = [name for name in seen if not any(part.startswith(".") for part in name.split("/"))]
    data = [name for name in visible if describe(name) and name.rsplit("/", 1)[-1] not in METADATA]
    if data:
        return data
    found = f"none of the {len(seen)} files can be read: {shortened(seen)}" if seen else "there are no files"
    raise InputError(f"{place}: {found}; supported are {', '.join(ENDINGS)}")


def kinds_skipped(names: Iterable[str], subset: str | None) -> Counter[str]:
    """How many of `names` are not `data_names`, by kind: an ending, `hidden`, `metadata` or `no ending`.

    A hidden folder counts as one. With a subset, only the names that belong to it count.
    """
    seen = {_up_to_hidden(name) for name in names if subset is None or in_subset(name, subset)}
    return Counter(kind for name in seen if (kind := _kind_skipped(name)))


def unread(names: Iterable[str], subset: str | None, size_of: Callable[[str], int]) -> list[InputWarning]:
    """A warning for each ending of files among `names` that look like data and can't be read; `size_of` gives their bytes."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted({_up_to_hidden(name) for name in names if subset is None or in_subset(name, subset)}):
        kind = _kind_skipped(name)
        nameless = kind == NO_ENDING and NUMBERED.search(name.rpartition("/")[2])
        if nameless or (kind and kind.startswith(".") and not NO_DATA.fullmatch(kind)):
            found[kind or ""].append(name)
    return [
        InputWarning("unread_files", f"{kind}, such as {listed[0]}", len(listed), sum(map(size_of, listed)))
        for kind, listed in found.items()
    ]


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
    return ending[0] if ending else NO_ENDING


def choose(names: list[str], source: DataSource, subsets: Iterable[str] = ()) -> list[str]:
    """The paths among `names` that belong to the subset and split of `source`.

    Raises InputError if there are none; the message lists the existing ones and `subsets`, nearest first.
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
    """Whether `subset` is one or more whole components of `name`, without its ending."""
    return f"/{subset.strip('/')}/" in f"/{without_ending(name)}/"


def in_split(name: str, split: str) -> bool:
    """Whether `split` is a folder of `name`, or its file is that split or a numbered part of it."""
    return split in _split_names(name)


def _split_names(name: str) -> list[str]:
    """Every split that the path `name` could belong to: its folders, its stem, its stem without a part number."""
    *folders, file = without_ending(name).split("/")
    return [*folders, file, re.sub(rf"{NUMBER}\Z", "", file)]


def missing(source: DataSource, kind: str, asked: str, known: Iterable[str]) -> InputError:
    """The error for a subset or split that does not exist; lists the existing ones, nearest first."""
    error = MissingSplitError if kind == "split" else InputError
    near = sorted(known, key=lambda name: (-difflib.SequenceMatcher(None, asked, name).ratio(), name))
    return error(
        f"{source.path}: has no {kind} {asked!r} (data set {source.name!r}); it has {shortened(near) or 'none'}"
    )


def shortened(names: list[str]) -> str:
    """The first names of a list as text, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name) for name in names[:SHOWN]) + more
