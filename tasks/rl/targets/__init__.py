"""Targets: the programs that read prepared rows, and their requirements for a row.

A module in this folder declares its targets as `TARGETS`; adding a file adds a target. Trainers check little: an invalid row
crashes a run hours later, or the model learns from the wrong field. So rows are checked here, at 0.5 to 2 µs per row and 0.4 µs
per message. A check sees one row, so the recipe must give all rows the same fields and types.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal, cast

from tokenmill.tasks.rl.rows import RowTarget

MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]

TARGETS: Mapping[str, RowTarget] = {
    target.name: target
    for declared in [[RowTarget("none")], *(module.TARGETS for module in MODULES)]
    for target in cast("list[RowTarget]", declared)
}
"""Every target by name; `none` accepts any row."""

if TYPE_CHECKING:
    TargetName = str
else:
    TargetName = Literal[tuple(TARGETS)]
