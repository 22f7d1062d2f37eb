"""Published folders of scores, and which of their tables are of which rows.

Of a folder the columns of numbers, truth and text are joined, but those that rows have themselves. A name that several
folders have is told apart by that of its folder: `small_nll_mean`, `large_nll_mean`.

A table of scores is of the rows of one file, whose name ends in the beginning of their shard's key: that of the shard of
rows for scores of rows, that of an earlier selection for scores of candidates. So new scores concern only the shards
whose rows they are of. A choice of rows may be of any. To be known by content, each table is read once, at disk speed.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.columns import SCHEMA as ROWS
from tokenmill.tasks.shards.manifest import MANIFEST, Finished, read_manifest
from tokenmill.tasks.shards.published import file_hash
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import absolute, filesystem, join

from .scores import Column

CHOICE, CHOSEN = "choice", "chosen.parquet"
"""The type of a folder that holds a choice of rows, and its table of those that were chosen."""

TYPES = ("nll", "embeddings", CHOICE)
"""The types of folders whose tables have `row_id`."""

SCORED = re.compile(r"-([0-9a-f]{8})\.parquet$")
"""How the name of a file of rows ends: with the first digits of its shard's key."""

ANY = "any"
"""Stands for those digits where a table may be of the rows of any file."""


@dataclass(frozen=True, slots=True)
class ScoreFile:
    """A published table of scores: its place, and the file of the rows it is of; None where that may be any."""

    place: str
    scored: str | None

    @property
    def digits(self) -> str:
        """The first digits of the key of the shard that was scored, or ANY; empty for a file that somebody else named."""
        if self.scored is None:
            return ANY
        found = SCORED.search(self.scored)
        return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class ScoreFolder:
    """A published folder of scores: its place, one of TYPES, and its tables."""

    place: str
    type: str
    files: tuple[ScoreFile, ...]

    @property
    def name(self) -> str:
        """What its columns are told apart by."""
        return re.sub(r"\W", "_", self.place.rpartition("/")[2])

    @property
    def schema(self) -> pa.Schema:
        """The columns of its tables. Raises InputError where there is none to ask."""
        if not self.files:
            raise InputError(f"{self.place}: nothing was scored here; score rows before they are read")
        system, path = filesystem(self.files[0].place)
        with cast("BinaryIO", system.open(path, "rb")) as stream:
            return pq.read_schema(stream)


@dataclass(frozen=True, slots=True)
class FoundScores:
    """The scores of the rows of a selection.

    `columns` are those of each folder. `files` are the tables of each shard of rows, by its key: the number of the folder
    and the hash of the content. `places` says where a content is.
    """

    columns: Sequence[Sequence[Column]]
    files: Mapping[str, list[tuple[int, str]]]
    places: Mapping[str, str]


def score_folder(place: str) -> ScoreFolder:
    """What was published in a folder of scores. Raises InputError for a folder of anything else."""
    place = absolute(place)
    manifest = read_manifest(place)
    if manifest is None:
        raise InputError(f"{place}: no {MANIFEST} here; point at the --output-dir of `tokenmill score` or `choose`")
    if manifest["type"] not in TYPES:
        raise InputError(f"{place}: holds a preparation of type {manifest['type']!r}; scores are {', '.join(TYPES)}")
    if manifest["type"] == CHOICE:
        return ScoreFolder(place, CHOICE, (ScoreFile(join(place, CHOSEN), None),))
    return ScoreFolder(place, manifest["type"], tuple(_files(place, manifest["shards"])))


def _files(place: str, shards: Iterable[Mapping[str, Any]]) -> Iterator[ScoreFile]:
    for shard in shards:
        for name in (name for names in shard["published"].values() for name in names):
            elsewhere = name.startswith("/") or "://" in name
            yield ScoreFile(name if elsewhere else join(place, name), shard["file"])


def score_columns(folders: Sequence[ScoreFolder]) -> Sequence[Sequence[Column]]:
    """The columns of each folder that are joined to rows. Raises InputError for two of one name."""
    found = [_joinable(folder.schema) for folder in folders]
    shared = {name for name, count in Counter(name for types in found for name in types).items() if count > 1}
    columns = [
        [(name, f"{folder.name}_{name}" if name in shared else name, kind) for name, kind in types.items()]
        for folder, types in zip(folders, found, strict=True)
    ]
    for name, count in Counter([*ROWS.names, *(name for of in columns for _, name, _ in of)]).items():
        if count > 1:
            raise InputError(
                f"selection.scores: there are two columns {name!r}; what several folders have is told apart by the names of the "
                f"folders, so name each once, and no two alike: {', '.join(folder.place for folder in folders)}"
            )
    return columns


def _joinable(schema: pa.Schema) -> dict[str, str]:
    """The columns of a table of scores that a predicate can name, with the types they get."""
    types = {field.name: _type(field.type) for field in schema if field.name not in ROWS.names}
    return {name: kind for name, kind in types.items() if kind is not None}


def _type(kept: pa.DataType) -> str | None:
    """One type for each kind of values; None for those that cannot be compared."""
    if pa.types.is_boolean(kept):
        return "bool"
    if pa.types.is_integer(kept) and not pa.types.is_uint64(kept):
        return "int64"
    if pa.types.is_floating(kept):
        return "double"
    values = kept.value_type if pa.types.is_dictionary(kept) else kept
    return "string" if pa.types.is_string(values) or pa.types.is_large_string(values) else None


def find_scores(places: Sequence[str], final: Sequence[Finished], store: Store) -> FoundScores:
    """The tables of scores of each of the shards of rows `final`.

    Raises InputError for a folder that has no scores of any of these rows.
    """
    folders = [score_folder(place) for place in places]
    keys = _keys_by_digits(folders, [item.key for item in final], store)
    files: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    contents: dict[str, str] = {}
    for number, folder in enumerate(folders):
        found = [(file, keys[file.digits]) for file in folder.files if file.digits in keys]
        if final and not found:
            raise InputError(
                f"selection.scores: {folder.place} has no scores of these rows; score what is published now"
            )
        for file, of in found:
            content = file_hash(file.place)
            contents[content] = file.place
            for key in of:
                files[key].append((number, content))
    return FoundScores(score_columns(folders), files, contents)


def _keys_by_digits(folders: Iterable[ScoreFolder], final: Sequence[str], store: Store) -> dict[str, list[str]]:
    """The keys of the shards of rows that a table is of, by the digits in the name of the file that was scored."""
    keys: defaultdict[str, list[str]] = defaultdict(list, {ANY: list(final)})
    for key in final:
        keys[key[:8]].append(key)
    asked = {file.digits for folder in folders for file in folder.files}
    of_rows = set(final)
    for key, content in _sources_of(asked.difference(keys, [""]), store):
        if content in of_rows:
            keys[key[:8]].append(content)
    return dict(keys)


def _sources_of(digits: set[str], store: Store) -> Iterator[tuple[str, str]]:
    """The shards of the store whose keys begin with some digits, each with what it was made of."""
    if not digits:
        return
    system, path = filesystem(join(store.place, store.kind))
    names = [name.rpartition("/")[2] for name in cast("list[str]", system.ls(path, detail=False))]
    for key, receipt in store.proven(name for name in names if name[:8] in digits).items():
        yield key, receipt.identity["source"]["content"]
