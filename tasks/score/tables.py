"""The columns of published scores: what names a row, its score, and what made it.

They are side tables: `row_id` joins them to the rows that were scored, whose text is not repeated. What made a score is
the same in all rows of a file, and takes a few bytes of it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from .nll import MOST_PERPLEXING, PARTS, SCHEMA

PERCENTILE = "percentile_within_split"

ROW = pa.schema([(name, pa.string()) for name in ("row_id", "id", "dataset", "split")])
"""What names a row. `id` is the text's, and null where the row has none."""

NLL = pa.schema([
    *ROW,
    ("loss_mode", pa.string()),
    *SCHEMA,
    (PERCENTILE, pa.float64()),
    ("model", pa.string()),
    ("model_revision", pa.string()),
    ("engine", pa.string()),
    ("dtype", pa.string()),
])  # fmt: skip
"""`dtype` is null where the engine decides it."""


def embeddings(dimensions: int) -> pa.Schema:
    """The columns of embeddings; `token_count` counts before a text is cut."""
    return pa.schema([
        *ROW,
        ("embedding", pa.list_(pa.float16(), dimensions)),
        ("token_count", pa.int32()),
        ("truncated", pa.bool_()),
        ("model", pa.string()),
        ("model_revision", pa.string()),
        ("engine", pa.string()),
        ("pooling", pa.string()),
    ])  # fmt: skip


def assembled(
    schema: pa.Schema, rows: Mapping[str, Sequence[str | None]], scores: pa.Table, same: Mapping[str, str | None]
) -> pa.Table:
    """A table with `schema`: of each row what names it, its score, and what is the `same` in all; null for the rest."""
    count = scores.num_rows
    columns = [
        pa.array(rows[field.name], field.type) if field.name in rows
        else scores[field.name] if field.name in scores.column_names
        else pa.array([same.get(field.name)] * count, field.type)
        for field in schema
    ]  # fmt: skip
    return pa.table(columns, schema=schema)


def summed(scores: pa.Table, owners: np.ndarray, rows: int) -> pa.Table:
    """Scores of sequences (rows of `nll.SCHEMA`) as those of the rows they are of, number `owners` (int64, ascending) of `rows`."""
    if np.array_equal(owners, np.arange(rows)):
        return scores
    count = {name: _sum(scores, name, owners, rows) for name in SCHEMA.names if name.endswith("token_count")}
    total = _sum(scores, "nll_sum", owners, rows)
    scored = count["completion_token_count"]
    mean = total / np.maximum(scored, 1)
    found = {
        "nll_sum": (total, scored),
        "nll_mean": (mean, scored),
        "ppl": (np.exp(np.minimum(mean, MOST_PERPLEXING)), scored),
        **{f"nll_{part}": _mean(scores, part, owners, count[f"{part}_token_count"]) for part in PARTS},
    }
    columns = {
        **{name: pa.array(values, mask=counts == 0) for name, (values, counts) in found.items()},
        **{name: pa.array(values) for name, values in count.items()},
        "truncated": pa.array(_sum(scores, "truncated", owners, rows) > 0),
    }
    return pa.table([columns[field.name].cast(field.type) for field in SCHEMA], schema=SCHEMA)


def _mean(scores: pa.Table, part: str, owners: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of a part of each row, and of how many tokens it is."""
    values = scores[f"nll_{part}"].fill_null(0).to_numpy() * scores[f"{part}_token_count"].to_numpy()
    return np.bincount(owners, values, len(counts)) / np.maximum(counts, 1), counts


def _sum(scores: pa.Table, name: str, owners: np.ndarray, rows: int) -> np.ndarray:
    values = scores[name].cast(pa.float64()).fill_null(0).to_numpy()
    return np.bincount(owners, values, rows)
