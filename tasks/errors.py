"""Errors for users. A message states the problem, the value, the location, and the remedy.

`InputError`: the user must change the call, the blend or a source (exit code 2). `RunError`: the work began and failed
(exit code 1). Any other exception is a defect and keeps its traceback.
"""

import difflib
from collections.abc import Iterable, Mapping
from importlib.metadata import requires
from shlex import quote
from typing import Any

CLOSE = 0.65
"""The similarity, 0 to 1, from which a name may be a mistyped other name: `wbe` and `web` have 0.67, `text` and `test` 0.75."""


class InputError(ValueError):
    """The user must change their input; the message explains how."""


class RunError(RuntimeError):
    """The work began and failed; the message names the cause and the remedy."""


class PartlyFailedError(RunError):
    """Some parts of the work failed; `record` holds the result of each part, as commands print it."""

    def __init__(self, message: str, record: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.record = record


def pip_install(extra: str) -> str:
    """Return the command that installs an extra's packages by their own names, which every index has."""
    asked = [line.partition(";")[0].strip() for line in requires("tokenmill") or () if f'extra == "{extra}"' in line]
    return f"pip install {' '.join(map(quote, asked))}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean …?` for a misspelt name, or the list of known names if none is close."""
    names = sorted(known)
    close = closest(name, names)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(names)}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` is a misspelling of, if any. An ending such as .json, which many names share, does not count."""
    stem, dot, ending = name.partition(".")
    stems = {each.removesuffix(f"{dot}{ending}"): each for each in known}
    close = difflib.get_close_matches(stem or name, stems, n=1, cutoff=CLOSE)
    return stems[close[0]] if close else None
