"""Verify a shard of scores beyond sizes and hashes: columns, ids, and finite numbers."""

from collections.abc import Iterator
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import filesystem

from .embed import LENGTH_TOLERANCE
from .shard import FILE
from .tables import NLL, PERCENTILE, SCHEMA, embeddings

HALF_TOLERANCE = LENGTH_TOLERANCE + 2e-3
"""Allowed deviation of a stored vector's length from 1; float16 is off by 0.05 % per number."""


def inspect_score_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of a shard's file: columns, ids, numbers, and counts against the receipt."""
    if not receipt.parts:
        return []
    place = store.path(receipt.key, FILE)
    try:
        return [f"{place}: {problem}" for problem in _problems(_table(place), receipt)]
    except (pa.ArrowException, OSError, InputError, RunError) as error:
        return [f"{place}: cannot be read: {error}"]


def _table(place: str) -> pa.Table:
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        return pq.ParquetFile(stream).read(use_threads=False)


def _problems(table: pa.Table, receipt: Receipt) -> Iterator[str]:
    nll = receipt.identity["kind"] == "nll"
    dimensions = 0 if nll else _dimensions(table)
    if not table.schema.equals(NLL if nll else embeddings(dimensions)):
        yield f"its columns are {table.schema.names}, not those of scores"
        return
    tokens = table["total_token_count" if nll else "token_count"].to_numpy().sum()
    if (table.num_rows, tokens) != (receipt.documents, receipt.tokens):
        said = f"its receipt says {receipt.documents:,} and {receipt.tokens:,}"
        yield f"holds {table.num_rows:,} rows of {tokens:,} tokens, {said}"
    ids = table["row_id"]
    if ids.null_count or len(ids.unique()) < len(ids):
        yield f"{ids.null_count:,} rows have no row_id, {len(ids) - len(ids.unique()):,} repeat one of another row"
    yield from _nll(table) if nll else _vectors(table)


def _dimensions(table: pa.Table) -> int:
    found = table.schema.field("embedding").type if "embedding" in table.schema.names else None
    return found.list_size if found is not None and pa.types.is_fixed_size_list(found) else 1


def _nll(table: pa.Table) -> Iterator[str]:
    for name in [*SCHEMA.names, PERCENTILE]:
        if pa.types.is_floating(table.schema.field(name).type) and not _finite(table[name].drop_null().to_numpy()):
            yield f"column {name} holds NaN or infinities"
    missing = table["nll_mean"].is_null().to_numpy() != (table["completion_token_count"].to_numpy() == 0)
    if missing.any() or table["nll_mean"].null_count != table[PERCENTILE].null_count:
        yield "a row with scored tokens has no score, or a row without them has one"


def _vectors(table: pa.Table) -> Iterator[str]:
    stored = table["embedding"]
    flat = np.concatenate([np.empty(0, np.float16), *(chunk.flatten().to_numpy() for chunk in stored.chunks)])
    vectors = flat.astype(np.float32).reshape(len(stored), -1)
    if not _finite(vectors):
        yield "column embedding holds NaN or infinities"
    elif np.any(np.abs(np.linalg.norm(vectors, axis=1) - 1) > HALF_TOLERANCE):
        yield "column embedding holds a vector whose length is not 1"


def _finite(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).all())
