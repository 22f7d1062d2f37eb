"""Errors that teach: what is wrong, which value, where it stands, and what to do about it.

Two kinds reach a person. An `InputError` says that the call, the blend or a source cannot be used as it is (exit
code 2: nothing was started). A `RunError` says that the work began and cannot be finished honestly (exit code 1).
Everything else is a defect and keeps its traceback.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class InputError(ValueError):
    """Something a person wrote or pointed at cannot be used; the message carries the remedy."""


class RunError(RuntimeError):
    """The work began but its result cannot be vouched for; the message names what failed and the remedy."""


class PartlyFailedError(RunError):
    """Some parts of the work failed and others did not; `record` says what became of each, as commands print it."""

    def __init__(self, message: str, record: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.record = record


def nearest(name: str, known: Iterable[str]) -> str:
    """A `; did you mean …` clause for a misspelt name, or the list of known names when nothing is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
