"""Errors for users. A message states what is wrong, which value, where, and the remedy.

`InputError`: the user must change the call, the blend or a source (exit code 2). `RunError`: the work began and failed
(exit code 1). Any other exception is a defect and keeps its traceback.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class InputError(ValueError):
    """The user must change their input; the message says how."""


class RunError(RuntimeError):
    """The work began and failed; the message names the cause and the remedy."""


class PartlyFailedError(RunError):
    """Some parts of the work failed; `record` holds the result of each part, as commands print it."""

    def __init__(self, message: str, record: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.record = record


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean …?` for a misspelt name, or the list of known names if none is similar."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
