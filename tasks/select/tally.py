"""The books of the pools: rows and tokens of each, what any two share, and the manifest that says so.

A tally is made per table and added up over all of them, in any order. It is some kilobytes, however many rows there
are.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import orjson
import pyarrow as pa

from .pools import Assignment, Pools

TOKENS = "stats_token_len"
"""The column that says how many tokens a row has."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How many of `rows` met the base, and how many of these are in any pool at all; int64 [pools] the rows of each
    pool, their tokens, and those of its rows that have no number of tokens; int64 [pools, pools] the rows that two
    pools share before each row was given to one.
    """

    rows: int
    base_rows: int
    pooled_rows: int
    pool_rows: np.ndarray
    pool_tokens: np.ndarray
    pool_uncounted: np.ndarray
    overlap: np.ndarray

    @classmethod
    def none(cls, pools: int) -> Self:
        """The tally of no tables, with so many pools."""
        nothing = np.zeros(pools, np.int64)
        return cls(0, 0, 0, nothing, nothing, nothing, np.zeros((pools, pools), np.int64))

    def record(self) -> dict[str, Any]:
        """The tally as plain JSON."""
        return {name: np.asarray(value).tolist() for name, value in asdict(self).items()}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Self:
        """The tally that `record` is of."""
        arrays = {name: np.array(value) for name, value in record.items() if isinstance(value, list)}
        return cls(record["rows"], record["base_rows"], record["pooled_rows"], **arrays)

    def __add__(self, other: "Tally") -> "Tally":
        """The tally of both tables."""
        return Tally(
            self.rows + other.rows,
            self.base_rows + other.base_rows,
            self.pooled_rows + other.pooled_rows,
            self.pool_rows + other.pool_rows,
            self.pool_tokens + other.pool_tokens,
            self.pool_uncounted + other.pool_uncounted,
            self.overlap + other.overlap,
        )


def tally(table: pa.Table, found: Assignment, taken: Assignment) -> Tally:
    """The books of one table. `found` is what `assign` gave; `taken` the same, or its `unique()`, as rows are written."""
    tokens, counted = _tokens(table)
    return Tally(
        rows=table.num_rows,
        base_rows=int(found.base.sum()),
        pooled_rows=int(found.pools.any(axis=0).sum()),
        pool_rows=taken.pools.sum(axis=1, dtype=np.int64),
        pool_tokens=np.array([tokens[rows].sum(dtype=np.int64) for rows in taken.pools]),
        pool_uncounted=np.array([(~counted[rows]).sum(dtype=np.int64) for rows in taken.pools]),
        overlap=found.overlap(),
    )


def _tokens(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of every row, int64 [rows], 0 where there is no number; and whether there is one, bool [rows]."""
    if TOKENS not in table.schema.names:
        return np.zeros(table.num_rows, np.int64), np.zeros(table.num_rows, np.bool_)
    column = table.column(TOKENS)
    return column.fill_null(0).to_numpy().astype(np.int64), column.is_valid().to_numpy()


def manifest(pools: Pools, books: Tally, inputs: Mapping[str, str]) -> dict[str, Any]:
    """What a folder of pools says about itself, as plain JSON. `inputs` are the digests of the files read, by name."""
    return {
        "base": [predicate.text for predicate in pools.base],
        "inputs": {"files": len(inputs), "sha256": _digest(inputs)},
        "rows": books.rows,
        "base_rows": books.base_rows,
        "rows_in_no_pool": books.base_rows - books.pooled_rows,
        "pools": {
            pool.name: {
                "description": pool.description,
                "predicate": pool.predicate.text,
                "rows": int(books.pool_rows[number]),
                "tokens": int(books.pool_tokens[number]),
                "rows_without_tokens": int(books.pool_uncounted[number]),
            }
            for number, pool in enumerate(pools.pools)
        },
        "overlap": {
            pool.name: dict(zip(pools.names, shared, strict=True))
            for pool, shared in zip(pools.pools, books.overlap.tolist(), strict=True)
        },
    }


def _digest(inputs: Mapping[str, str]) -> str:
    """One hash of names and digests, whatever their order."""
    return hashlib.sha256(orjson.dumps(dict(inputs), option=orjson.OPT_SORT_KEYS)).hexdigest()
