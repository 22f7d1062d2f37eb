"""The columns of published scores, and the check that every number in them is finite.

Scores are side tables: `row_id` joins them to the scored rows, whose text is not repeated. Columns that describe how a score
was made hold one value per file and take a few bytes.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
from tokenmill.tasks.errors import RunError

# The parts of a completion, numbered from 1; tokens outside any part have 0.
PARTS = ("analysis", "tool_call", "final")

# One row per sequence. `nll_sum` is a sum, the other NLLs are means per token; all are null if no token was scored.
# `completion_token_count` counts scored tokens, `cut_token_count` tokens left unscored because the sequence was
# truncated, `total_token_count` all tokens of the sequence.
SCHEMA = pa.schema([
    ("nll_sum", pa.float64()),
    ("nll_mean", pa.float64()),
    ("ppl", pa.float64()),
    *((f"nll_{part}", pa.float64()) for part in PARTS),
    ("completion_token_count", pa.int32()),
    *((f"{part}_token_count", pa.int32()) for part in PARTS),
    ("total_token_count", pa.int32()),
    ("cut_token_count", pa.int32()),
    ("truncated", pa.bool_()),
])  # fmt: skip

PERCENTILE = "percentile_within_split"

# The columns that identify a row. `id` is the row's own, null if it has none.
NAMES = pa.schema([(name, pa.string()) for name in ("row_id", "id", "dataset", "split")])

# `dtype` is null if the engine determines it.
NLL = pa.schema([
    *NAMES,
    ("loss_mode", pa.string()),
    *SCHEMA,
    (PERCENTILE, pa.float64()),
    ("model", pa.string()),
    ("model_revision", pa.string()),
    ("engine", pa.string()),
    ("dtype", pa.string()),
])  # fmt: skip


def embeddings(dimensions: int) -> pa.Schema:
    """Return the columns of embeddings; `token_count` counts the tokens before truncation."""
    return pa.schema([
        *NAMES,
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
    """Return a table with `schema`: the names and the score of each row, values that are the `same` in all rows, else null."""
    columns = [
        pa.array(rows[field.name], field.type) if field.name in rows
        else scores[field.name] if field.name in scores.column_names
        else pa.array([same.get(field.name)] * scores.num_rows, field.type)
        for field in schema
    ]  # fmt: skip
    return pa.table(columns, schema=schema)


Place = Callable[[int], str]  # names a row by its number in an error: `data/part-00000.parquet: row 17`

ROW: Place = "row {}".format


class NonFiniteError(RunError):
    """A model returned NaN or an infinity; nothing of the slice is published."""


def require_finite(values: np.ndarray, rows: np.ndarray, what: str, place: Place) -> None:
    """Raise NonFiniteError unless all `values` [n] are finite; `rows` [n] are their rows."""
    broken = np.flatnonzero(~np.isfinite(values))
    if broken.size:
        raise NonFiniteError(
            f"{place(int(rows[broken[0]]))}: the {what} is {values[broken[0]]}; the weights are damaged or overflow in this "
            "precision: check the model, or compute in float32"
        )
