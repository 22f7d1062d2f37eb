"""Select the files of a folder, prefix or repository by subset and split.

A *subset* is a whole path component, or a file name without its ending. It is never a prefix: datasets with both
`High-Quality/` and `High-Quality-Synthetic/` are common, and a prefix would match both.

A *split* is found by the paths, with the rules of the Hugging Face hub and its `datasets` library (`named_splits`), and may be
asked for in each of the hub's spellings: `val`, `dev` and `valid` all mean `validation`. If no path names a split, everything is
`train`. Where no split has the name that is asked for, a folder or a file of that name is taken.
"""

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fsspec.utils import glob_translate
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.kit.parts import counted

from .files import InputWarning
from .formats import FORMATS, METADATA, describe, is_hidden, supported, without_ending

SHOWN = 12
NO_ENDING = "no ending"
NUMBER = r"[-._]\d+(?:-of-\d+)?(?:-[0-9a-f]{16})?"

SPLIT_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
"""The spellings of each split in paths, https://huggingface.co/docs/hub/datasets-file-names-and-splits. Case counts."""

SEPARATOR = "[-._ 0-9]"
IN_SHARD = re.compile(r"data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
IN_FOLDER = {
    split: re.compile(rf"(?:.*{SEPARATOR})?(?:{words})(?:{SEPARATOR}.*)?") for split, words in SPLIT_WORDS.items()
}
IN_FILE = {split: re.compile(rf"(?:.*{SEPARATOR})?(?:{words}){SEPARATOR}.*") for split, words in SPLIT_WORDS.items()}

PREFERRED = (".parquet", ".arrow", ".jsonl", ".json", ".csv")
"""Endings in the order in which one is chosen among equally frequent ones; others follow."""

FAMILIES = ({".jsonl", ".json", ".ndjson"}, {".csv", ".tsv"})
"""Endings that are read together."""

ENDING = re.compile(r"(?<=.)\.[a-z][a-z0-9]{0,9}(?:\.(?:gz|zst|zstd|bz2|xz|lz4))?\Z")
"""The extension of any file: letters and digits after the last dot, with the dot before it if that is a compression."""


NO_DATA = re.compile(
    r"\.(?:md|rst|py|ipynb|sh|ya?ml|toml|cfg|ini|lock|cff|bib|tex|license|log|html?|css|js|crc|md5|sha\d+|asc|sig"
    r"|png|jpe?g|gif|svg|webp|ico|pdf)(?:\.(?:gz|zst|bz2|xz|lz4))?"
)
"""Endings of files next to data: documentation, code, settings, checksums and pictures."""

NUMBERED = re.compile(r"[\d.]")
"""A name without an ending is one of data if it has a number or a dot, as `part-00000` or `a.jsonl_old`; `README` has neither."""


class MissingSplitError(InputError):
    """A dataset lacks the requested split."""


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """`pattern` with `*`, `?`, `[…]` and `**` (any number of folders) as a regular expression for whole paths."""
    try:
        return re.compile(glob_translate(pattern))
    except ValueError as error:
        raise InputError(f"{pattern}: '**' matches whole folders; write '**/*.jsonl', not '**.jsonl'") from error


def select(
    names: Sequence[str], source: DataSource, size_of: Callable[[str], int]
) -> tuple[list[str], Counter[str], list[InputWarning]]:
    """Return the files among `names`, below the folder of `source.path`, that are rows of `source`. Raises as `choose` does."""
    place, subset = source.path, source.subset
    data = data_names(names, place)
    readable = choose(data, source)
    ranks = {name: FORMATS[kind[0]].rank for name in readable if (kind := describe(name))}
    chosen = [name for name in readable if ranks[name] == min(ranks.values())]
    # Files that no split has, although others name splits, such as `train-1.jsonl` beside a folder `train`, aren't read either.
    of_source = data if subset is None else of_subset(data, source)
    splits = {} if source.split is None else named_splits(of_source)
    of_splits = {name for files in splits.values() for name in files}
    left = ({*readable} - {*chosen}) | ({*of_source} - of_splits - {*readable} if splits else set[str]())
    skipped = kinds_skipped(names, subset, place) + Counter(map(extension_of, left))
    return chosen, skipped, unread(names, subset, size_of, place, left)


def data_names(names: Iterable[str], place: str) -> list[str]:
    """Return the paths among `names` (below `place`, a path or glob) that hold rows: of a known format, neither hidden nor metadata.

    Raises InputError, listing the found files instead, if every file is excluded.
    """
    seen = sorted(names)
    data = [name for name in seen if _kind_skipped(name, place) is None]
    if data:
        return data
    found = f"none of {counted(len(seen), 'file')} can be read: {shortened(seen)}" if seen else "files not found"
    raise InputError(f"{place}: {found}; supported are {supported()}")


def kinds_skipped(names: Iterable[str], subset: str | None, place: str = "") -> Counter[str]:
    """Return how many of `names` are not `data_names`, by kind: an ending, `hidden`, `metadata` or `no ending`.

    A hidden folder counts as one. With a subset, only the names that belong to it count.
    """
    seen = {_up_to_hidden(name, place) for name in names if subset is None or in_subset(name, subset)}
    return Counter(kind for name in seen if (kind := _kind_skipped(name, place)))


def unread(
    names: Iterable[str], subset: str | None, size_of: Callable[[str], int], place: str = "", left: Collection[str] = ()
) -> list[InputWarning]:
    """Return a warning for each ending of files among `names` that look like data and aren't read; `size_of` gives their bytes.

    `left` are files that could be read, and aren't.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted({_up_to_hidden(name, place) for name in names if subset is None or in_subset(name, subset)}):
        kind = extension_of(name) if name in left else _kind_skipped(name, place)
        nameless = kind == NO_ENDING and NUMBERED.search(name.rpartition("/")[2])
        if nameless or (kind and kind.startswith(".") and not NO_DATA.fullmatch(kind)):
            found[kind or ""].append(name)
    return [
        InputWarning("unread_files", f"{kind}, such as {listed[0]}", len(listed), sum(map(size_of, listed)))
        for kind, listed in found.items()
    ]


def _up_to_hidden(name: str, place: str) -> str:
    parts = name.split("/")
    first = next((number for number, part in enumerate(parts, 1) if is_hidden(part, place)), len(parts))
    return "/".join(parts[:first])


def _kind_skipped(name: str, place: str) -> str | None:
    if is_hidden(name, place):
        return "hidden"
    if describe(name):
        return "metadata" if METADATA.fullmatch(name.rpartition("/")[2]) else None
    return extension_of(name)


def extension_of(name: str) -> str:
    """Return the ending of a file's name in lower case, or `no ending`."""
    ending = ENDING.search(name.rpartition("/")[2].lower())
    return ending[0] if ending else NO_ENDING


def named_splits(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split that the paths name, as `datasets` finds them; none if no path names a split.

    The first of these to match any file decides for all, and omits the files that it doesn't match: numbered files in
    `data` (`data/SPLIT-00000-of-00004.parquet`), a word for a split in the name of a folder, or of the file.
    """
    rules: tuple[Callable[[str], list[str]], ...] = (
        lambda name: [match["split"]] if (match := IN_SHARD.fullmatch(name)) else [],
        lambda name: [split for split, words in IN_FOLDER.items() if any(map(words.fullmatch, name.split("/")[:-1]))],
        lambda name: [split for split, words in IN_FILE.items() if words.fullmatch(name.rpartition("/")[2])],
    )
    for splits_of in rules:
        found: dict[str, list[str]] = {}
        for name in names:
            for split in splits_of(name):
                found.setdefault(split, []).append(name)
        if found:
            return found
    return {}


def all_splits(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split, by their paths: everything is `train` if no path names a split."""
    return named_splits(names) or {"train": [*names]}


def split_called(splits: Mapping[str, list[str]], asked: str) -> str | None:
    """Return the key of `splits` that `asked` names, in any spelling of the hub; None if none or several may be meant."""
    if asked in splits:  # before other spellings: a repository may have both `val` and `validation`
        return asked
    # Two spellings of one split, such as `dev` and `valid`, don't show which is meant.
    meant = [split for split in splits if _usual(split) == _usual(asked)]
    return meant[0] if len(meant) == 1 else None


def _usual(split: str) -> str:
    """The hub's name of a split that may be spelled differently."""
    return next((usual for usual, words in SPLIT_WORDS.items() if split in words.split("|")), split)


def of_one_format(names: Sequence[str]) -> list[str]:
    """Return the files in the most frequent format, as `datasets` chooses it: others often repeat the same rows."""
    # `metadata.csv` describes images or sounds, whose number says nothing about the format of the rows.
    described = [name for name in names if without_ending(name).rpartition("/")[2] != "metadata"]
    counts = Counter(map(ending_of, described or names))
    if not counts:
        return []
    # Of equally frequent formats the preferred one, else the last by its name, as `datasets` does.
    best = max(counts, key=lambda ending: (counts[ending], *(ending == each for each in PREFERRED), ending))
    family = next((family for family in FAMILIES if best in family), {best})
    return [name for name in names if ending_of(name) in family]


def ending_of(name: str) -> str:
    """Return the ending that decides the format of a data file, without a compression's."""
    return "." + name[len(without_ending(name)) :].lower().split(".")[1]


def choose(names: list[str], source: DataSource) -> list[str]:
    """Return the paths among `names` that belong to the subset and split of `source`.

    Raises InputError if there are none; the message lists the existing ones, nearest first.
    """
    if source.subset is not None:
        names = of_subset(names, source)
    return names if source.split is None else of_split(all_splits(names), names, source)


def of_subset(names: list[str], source: DataSource, subsets: Iterable[str] = ()) -> list[str]:
    """Return the paths that have the subset of `source` as a component. Raises as `choose` does; `subsets` are those to list instead."""
    subset = source.subset or ""
    if found := [name for name in names if in_subset(name, subset)]:
        return found
    # Without declared subsets, every folder and file name may have been meant.
    known = {*subsets} or {part for name in names for part in without_ending(name).split("/")}
    raise missing(source, "subset", subset, known)


def of_split(splits: Mapping[str, list[str]], names: list[str], source: DataSource) -> list[str]:
    """Return the files in the split of `source`: one of `splits`, or `names` in a folder or file with that name.

    Raises MissingSplitError if there are none.
    """
    asked = source.split or ""
    called = split_called(splits, asked)
    if called is not None:
        return splits[called]
    if found := [name for name in names if in_split(name, asked)]:
        return found
    raise missing(source, "split", asked, splits)


def in_subset(name: str, subset: str) -> bool:
    """Return whether `subset` is one or more whole components of `name`, without its ending."""
    return f"/{subset.strip('/')}/" in f"/{without_ending(name)}/"


def in_split(name: str, split: str) -> bool:
    """Return whether `split` is a folder of `name`, or its file is called that, with or without the number of a part."""
    *folders, file = without_ending(name).split("/")
    return split in {*folders, file, without_number(file)}


def without_number(stem: str) -> str:
    """Return the name of a file without its ending and without the number of a part."""
    return re.sub(rf"{NUMBER}\Z", "", stem)


def missing(source: DataSource, kind: str, asked: str, known: Iterable[str]) -> InputError:
    """Return the error for a subset or split that does not exist; lists the existing ones, nearest first."""
    error = MissingSplitError if kind == "split" else InputError
    near = sorted(known, key=lambda name: (-difflib.SequenceMatcher(None, asked, name).ratio(), name))
    return error(
        f"{source.path}: has no {kind} {asked!r} (dataset {source.name!r}); it has {shortened(near) or 'none'}"
    )


def shortened(names: list[str]) -> str:
    """Return the first names of a list as text, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name) for name in names[:SHOWN]) + more
