"""What became of each document that does not stay, and that none is dropped twice.

Steps follow one another, and each sees only what the one before has left: exact duplicates, near-duplicates,
contamination, the cap. So a document is dropped once, for one reason, or kept.

The document that stays in its stead is the one that its step kept. A later step may have dropped that one too; what
became of it then stands in its own row.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from tokenmill.tasks.errors import RunError

KEPT = "kept"
REASONS = ("exact_duplicate", "near_duplicate", "contaminated", "beyond_cap")
"""Why documents are dropped, in the order of the steps."""

DROPPED = pa.schema([
    pa.field("number", pa.int64()),
    pa.field("outcome", pa.string()),
    pa.field("kept", pa.int64()),
    pa.field("jaccard", pa.float64()),
])  # fmt: skip
"""A document that does not stay, the reason, the document that stays in its stead (null for none), and how alike the
two are (null for none)."""


def dropped(drops: Mapping[str, pa.Table]) -> pa.Table:
    """The documents that do not stay, a table of `DROPPED`, ascending.

    `drops` gives for each reason a table with a column `dropped` and, for duplicates, `kept` and `jaccard`. Raises
    RunError for a document dropped twice. 50 bytes a document.
    """
    table = pa.concat_tables([DROPPED.empty_table(), *(_reasoned(name, found) for name, found in drops.items())])
    table = table.take(pa.array(np.argsort(table["number"].to_numpy(), kind="stable"))).combine_chunks()
    numbers = table["number"].to_numpy()
    twice = np.flatnonzero(numbers[1:] == numbers[:-1])
    if twice.size:
        number, reason = numbers[twice[0]], table["outcome"][int(twice[0]) + 1]
        raise RunError(
            f"document {number} is dropped twice, the second time as {reason} ({twice.size} such documents); "
            "give each step only what the steps before it have kept"
        )
    return table


def _reasoned(reason: str, table: pa.Table) -> pa.Table:
    nothing = pa.nulls(table.num_rows)
    kept, jaccard = (table[name] if name in table.column_names else nothing for name in ("kept", "jaccard"))
    columns = [table["dropped"], pa.array([reason] * table.num_rows, pa.string()), kept, jaccard]
    return pa.table(columns, names=DROPPED.names).cast(DROPPED)
