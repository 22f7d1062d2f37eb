"""Join scores to their rows, so that predicates can name them.

Scores are tables with a `row_id`, published in folders. All columns of numbers, booleans and text are joined, except those that
rows already have; a name that several folders share gets the folder's name as a prefix (`small_nll_mean`, `large_nll_mean`):

    nll_mean >= 0.4 and nll_mean <= 1.2          percentile_within_split < 90 and not truncated

A row without a score has null there. The join keeps rows and their order and takes 0.8 microseconds per row.

A score table belongs to one row file, whose name ends in the first digits of its shard's key: the row shard, or an
earlier selection for scores of candidates. So new scores affect only the shards they belong to. A choice of rows may belong to
any file. Each table is hashed once, at disk speed.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.harmony.columns import SCHEMA as ROWS
from tokenmill.tasks.shards.manifest import MANIFEST, file_hash, read_manifest
from tokenmill.tasks.shards.plan import Finished
from tokenmill.tasks.shards.store import Store, read_bytes
from tokenmill.tasks.storage import absolute, filesystem, join, open_binary
from xxhash import xxh3_128_hexdigest

ROW_ID = "row_id"

Column = Sequence[str]
"""A joined column: its name in the score table, its name next to the rows, and its type."""


def score_fields(columns: Iterable[Sequence[Column]]) -> list[pa.Field]:
    """Return the columns of several folders, as joined."""
    return [pa.field(name, pa.type_for_alias(kind)) for of in columns for _, name, kind in of]


def read_scores(
    columns: Sequence[Sequence[Column]], files: Iterable[tuple[int, str]], places: Mapping[str, str]
) -> list[pa.Table]:
    """Return the scores of one shard of rows, a table per folder with the folder's `columns`.

    `files` are (number of the folder, hash of the content), `places` maps hashes to files. Raises RunError for a file
    that changed and for a row scored twice.
    """
    tables = [[_schema(of).empty_table()] for of in columns]
    for number, content in files:
        data = read_bytes(places[content])  # whole, to compare its hash before a row of it is used
        if data is None or xxh3_128_hexdigest(data) != content:
            raise RunError(f"{places[content]}: the scores changed during the run; rerun the same command")
        names, schema = [ROW_ID, *(name for name, _, _ in columns[number])], _schema(columns[number])
        found = pq.read_table(pa.BufferReader(data), columns=names, use_threads=False).select(names)
        # Names may differ in the score table, where a folder's prefix is unknown.
        tables[number].append(found.rename_columns(schema.names).cast(schema))
    sides = [pa.concat_tables(parts) for parts in tables]
    for side in sides:
        require_joinable(side)
    return sides


def _schema(columns: Sequence[Column]) -> pa.Schema:
    return pa.schema([pa.field(ROW_ID, pa.string()), *score_fields([columns])])


def with_scores(table: pa.Table, sides: Iterable[pa.Table]) -> pa.Table:
    """Return `table` with the columns of all `sides`, joined by `row_id`; null for a row without a score.

    The `sides` must pass `require_joinable`. Raises InputError for a table without `row_id` and for two columns of one
    name.
    """
    _require_ids(table, "the rows")
    for side in sides:
        # The place of each row's score, null where it has none, which `take` leaves null.
        rows = compute.call_function("index_in", [table[ROW_ID]], compute.SetLookupOptions(side[ROW_ID]))
        for name in side.column_names:
            if name != ROW_ID:
                if name in table.column_names:
                    raise InputError(f"there are two columns {name!r}; rename one")
                table = table.append_column(name, side[name].take(rows))
    return table


def without_score(table: pa.Table, side: pa.Table) -> int:
    """Return the number of rows without a score in `side`."""
    scored = compute.call_function("is_in", [table[ROW_ID]], compute.SetLookupOptions(side[ROW_ID]))
    return table.num_rows - int(scored.to_numpy().sum())


def require_joinable(side: pa.Table) -> None:
    """Raises InputError for scores without `row_id`, RunError unless every row has one score."""
    _require_ids(side, "the scores")
    ids = side[ROW_ID].combine_chunks()
    if ids.null_count:
        raise RunError(f"{ids.null_count} scores have no {ROW_ID}; score the rows again")
    counted = ids.value_counts()
    counts = counted.field("counts").to_numpy()
    if counts.max(initial=0) > 1:  # the join would take the first, and nobody would notice
        twice = counted.field("values")[int(np.argmax(counts))].as_py()
        raise RunError(f"row {twice!r} has {counts.max()} scores; name each score table once")


def _require_ids(table: pa.Table, what: str) -> None:
    if ROW_ID not in table.column_names:
        raise InputError(f"{what} need the column {ROW_ID!r} to join by, but have only {', '.join(table.column_names)}")


CHOICE, CHOSEN = "choice", "chosen.parquet"
"""The type of a folder with chosen rows, and the file name of their table."""

TYPES = ("nll", "embeddings", CHOICE)
"""The types of folders whose tables have `row_id`."""

SCORED = re.compile(r"-([0-9a-f]{8})\.parquet$")
"""The end of the name in a file of rows: the first digits of its shard's key."""

ANY = "any"
"""Replaces those digits if a table may belong to any file."""


@dataclass(frozen=True, slots=True)
class ScoreFile:
    """A published score table, and the row file it belongs to; None if it may belong to any file."""

    place: str
    scored: str | None

    @property
    def digits(self) -> str:
        """The first digits of the key of the scored shard, or ANY; empty if the file was named otherwise."""
        if self.scored is None:
            return ANY
        found = SCORED.search(self.scored)  # the user may have scored files of another name
        return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class ScoreFolder:
    """A published score folder: its place, one of TYPES, and its tables."""

    place: str
    type: str
    files: tuple[ScoreFile, ...]

    @property
    def name(self) -> str:
        """The prefix for its columns if names clash."""
        return re.sub(r"\W", "_", self.place.rpartition("/")[2])

    @property
    def schema(self) -> pa.Schema:
        """Return the columns of its tables. Raises InputError without tables."""
        if not self.files:
            raise InputError(f"{self.place}: this folder doesn't have scores; run `tokenmill score` first")
        with open_binary(self.files[0].place) as stream:
            return pq.read_schema(stream)


@dataclass(frozen=True, slots=True)
class FoundScores:
    """The scores of the rows in a selection: `columns` of each folder; `files` by key of the shard of rows, as (number
    of the folder, hash of the content); `places` of the files by hash.
    """

    columns: Sequence[Sequence[Column]]
    files: Mapping[str, list[tuple[int, str]]]
    places: Mapping[str, str]


def score_folder(place: str) -> ScoreFolder:
    """Read a score folder. Raises InputError for other folders."""
    place = absolute(place)
    manifest = read_manifest(place)
    if manifest is None:
        raise InputError(
            f"{place}: no {MANIFEST} in this folder; give the --output-dir of `tokenmill score` or `choose`"
        )
    if manifest["type"] not in TYPES:
        raise InputError(f"{place}: holds a preparation of type {manifest['type']!r}; expected {', '.join(TYPES)}")
    if manifest["type"] == CHOICE:  # its rows may come from any file
        return ScoreFolder(place, CHOICE, (ScoreFile(join(place, CHOSEN), None),))
    files: list[ScoreFile] = []
    for shard in manifest["shards"]:
        for name in (name for names in shard["published"].values() for name in names):
            is_elsewhere = name.startswith("/") or "://" in name  # a file that stays in the store
            files.append(ScoreFile(name if is_elsewhere else join(place, name), shard["file"]))
    return ScoreFolder(place, manifest["type"], tuple(files))


def score_columns(folders: Sequence[ScoreFolder]) -> Sequence[Sequence[Column]]:
    """Return the columns of each folder that are joined. Raises InputError for two columns of one name."""
    found = [
        {field.name: kind for field in folder.schema if field.name not in ROWS.names and (kind := _type(field.type))}
        for folder in folders
    ]
    shared = {name for name, count in Counter(name for types in found for name in types).items() if count > 1}
    columns = [
        [(name, f"{folder.name}_{name}" if name in shared else name, kind) for name, kind in types.items()]
        for folder, types in zip(folders, found, strict=True)
    ]
    for name, count in Counter([*ROWS.names, *(name for of in columns for _, name, _ in of)]).items():
        if count > 1:
            raise InputError(
                f"selection.scores: there are two columns {name!r}; shared columns are prefixed by the folder's name, "
                f"so give each folder once, with distinct names: {', '.join(folder.place for folder in folders)}"
            )
    return columns


def _type(kept: pa.DataType) -> str | None:
    """Return one type for comparable values; None for types that cannot be compared."""
    if pa.types.is_boolean(kept):
        return "bool"
    if pa.types.is_integer(kept) and not pa.types.is_uint64(kept):  # predicates compare 64 bits with a sign
        return "int64"
    if pa.types.is_floating(kept):
        return "double"
    values = kept.value_type if pa.types.is_dictionary(kept) else kept
    return "string" if pa.types.is_string(values) or pa.types.is_large_string(values) else None


def find_scores(places: Sequence[str], final: Sequence[Finished], store: Store) -> FoundScores:
    """Return the score tables of each row shard in `final`. Raises InputError for a folder without any."""
    folders = [score_folder(place) for place in places]
    keys = _keys_by_digits(folders, [item.key for item in final], store)
    files: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    contents: dict[str, str] = {}
    for number, folder in enumerate(folders):
        found = [(file, keys[file.digits]) for file in folder.files if file.digits in keys]
        if final and not found:
            raise InputError(
                f"selection.scores: {folder.place} doesn't have scores for these rows; score the published rows again"
            )
        for file, of in found:
            content = file_hash(file.place)
            contents[content] = file.place
            for key in of:  # several shards, if the first digits of their keys are the same
                files[key].append((number, content))
    return FoundScores(score_columns(folders), files, contents)


def _keys_by_digits(folders: Iterable[ScoreFolder], final: Sequence[str], store: Store) -> dict[str, list[str]]:
    """The keys of the shards of rows a table belongs to, by the digits in the name of the scored file."""
    keys: defaultdict[str, list[str]] = defaultdict(list, {ANY: list(final)})
    for key in final:
        keys[key[:8]].append(key)
    asked = {file.digits for folder in folders for file in folder.files}
    # Other digits are of an earlier selection's shard, whose source is a shard of rows.
    others, of_rows = asked.difference(keys, [""]), set(final)
    if not others:
        return dict(keys)
    system, path = filesystem(join(store.place, store.kind))
    names = [name.rpartition("/")[2] for name in cast("list[str]", system.ls(path, detail=False))]
    for key, receipt in store.proven(name for name in names if name[:8] in others).items():
        content = receipt.identity["source"]["content"]
        if content in of_rows:
            keys[key[:8]].append(content)
    return dict(keys)
