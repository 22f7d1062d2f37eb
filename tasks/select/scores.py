"""Scores beside the rows they are of, so that pools can name them.

Scores are side tables: one row per row scored, with its `row_id`. Joined to a table they are columns like any other, and
a predicate of a pool may ask for a band of them:

    nll_mean >= 0.4 and nll_mean <= 1.2          percentile_within_split < 90 and not truncated

A row without a score has null there, which no comparison takes. Joining keeps the rows and their order and takes 0.8
microseconds a row.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.store import read_bytes
from xxhash import xxh3_128_hexdigest

ROW_ID = "row_id"

Column = Sequence[str]
"""A column as it is joined: its name in the table of scores, its name beside the rows, and its type there."""


def score_fields(columns: Iterable[Sequence[Column]]) -> list[pa.Field]:
    """The columns of some folders as they stand beside the rows."""
    return [pa.field(name, pa.type_for_alias(kind)) for of in columns for _, name, kind in of]


def read_scores(
    columns: Sequence[Sequence[Column]], files: Iterable[tuple[int, str]], places: Mapping[str, str]
) -> list[pa.Table]:
    """The scores of one shard of rows, a table for each folder, with the folder's `columns`.

    `files` are the tables, each as the number of its folder and the hash of its content, and `places` says where a content
    is. Raises RunError for a table that has changed since, and for a row that was scored twice.
    """
    tables = [[_schema(of).empty_table()] for of in columns]
    for number, content in files:
        tables[number].append(_read(places[content], content, columns[number]))
    sides = [pa.concat_tables(parts) for parts in tables]
    for side in sides:
        require_joinable(side)
    return sides


def _schema(columns: Sequence[Column]) -> pa.Schema:
    return pa.schema([pa.field(ROW_ID, pa.string()), *score_fields([columns])])


def _read(place: str, content: str, columns: Sequence[Column]) -> pa.Table:
    data = read_bytes(place)
    if data is None or xxh3_128_hexdigest(data) != content:
        raise RunError(f"{place}: the scores have changed since the run began; run the same command again")
    names = [ROW_ID, *(name for name, _, _ in columns)]
    found = pq.read_table(pa.BufferReader(data), columns=names, use_threads=False).select(names)
    schema = _schema(columns)
    return found.rename_columns(schema.names).cast(schema)


def with_scores(table: pa.Table, sides: Iterable[pa.Table]) -> pa.Table:
    """`table` with the columns of each of `sides`, joined by `row_id`; null where a row has no score.

    Each of `sides` is as `require_joinable` asks. Raises InputError for a table without `row_id` and for two columns of one
    name.
    """
    _require_ids(table, "the rows")
    for side in sides:
        rows = compute.call_function("index_in", [table[ROW_ID]], compute.SetLookupOptions(side[ROW_ID]))
        for name in side.column_names:
            if name != ROW_ID:
                _require_new(name, table)
                table = table.append_column(name, side[name].take(rows))
    return table


def without_score(table: pa.Table, side: pa.Table) -> int:
    """How many rows of `table` have no score in `side`."""
    scored = compute.call_function("is_in", [table[ROW_ID]], compute.SetLookupOptions(side[ROW_ID]))
    return table.num_rows - int(scored.to_numpy().sum())


def require_joinable(side: pa.Table) -> None:
    """Raises InputError for scores without `row_id`, RunError unless they have one each."""
    _require_ids(side, "the scores")
    ids = side[ROW_ID].combine_chunks()
    if ids.null_count:
        raise RunError(f"{ids.null_count} scores have no {ROW_ID}; score again, and join tables of one run only")
    counted = ids.value_counts()
    counts = counted.field("counts").to_numpy()
    if counts.max(initial=0) > 1:
        twice = counted.field("values")[int(np.argmax(counts))].as_py()
        raise RunError(f"row {twice!r} was scored {counts.max()} times; join each table of scores once")


def _require_ids(table: pa.Table, what: str) -> None:
    if ROW_ID not in table.column_names:
        raise InputError(f"{what} have no column {ROW_ID!r} to join by, only {', '.join(table.column_names)}")


def _require_new(name: str, table: pa.Table) -> None:
    if name in table.column_names:
        raise InputError(f"there are two columns {name!r}; name those of each model apart before they are joined")
