"""Numbers that are none: found before they are stored, and named by the row they belong to."""

from collections.abc import Callable

import numpy as np
from tokenmill.tasks.errors import RunError

Place = Callable[[int], str]
"""Where the row of a number is from, in words for an error: `data/part-00000.parquet: row 17`."""

ROW: Place = "row {}".format
"""The number of the row, where nobody knows better."""


class NonFiniteError(RunError):
    """A model gave a number that is none; nothing of the slice can be published."""


def require_finite(values: np.ndarray, rows: np.ndarray, what: str, place: Place) -> None:
    """Raises NonFiniteError unless all of `values` [n] are finite; `rows` [n] are the rows they belong to."""
    broken = np.flatnonzero(~np.isfinite(values))
    if broken.size:
        raise NonFiniteError(
            f"{place(int(rows[broken[0]]))}: the {what} is {values[broken[0]]}, which is no number; the weights are "
            "damaged or overflow in this precision: check the model, or compute in float32"
        )
