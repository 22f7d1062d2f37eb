"""A measurement and where it is kept: one row of the table, one entry of the JSON record of a run.

A number of its own says nothing on another machine. Each measure therefore stands beside a peer or a roofline taken in
the same run, and what comes out of the two is compared with a target. A target missed is shown, never an error.
"""

import itertools
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = (
    "tokenmill", "gigatoken", "tokenizers", "megatron-core", "torch", "orjson", "pyarrow", "numpy", "xxhash",
    "prefect", "prefect-dask", "distributed", "jinja2", "transformers", "trl", "datasketch",
)  # fmt: skip


HEAD = """\
| measure | tokenmill | peer or roofline | result | target | load before | date |
|---|---|---|---:|---:|---:|---|
"""
"""Of the table in `bench/RESULTS.md`."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One row: what was measured, ours, the peer's or the roofline's, what comes out of the two, and its target.

    `result` is a ratio (`unit` is x), a share (%) or a difference (s, ms); `at_least` says which side of the target
    is the good one. `facts` go into the record alone. A `check` fails a run on a GPU, or its dry run, if it misses its target.
    """

    name: str
    ours: str
    other: str
    result: float
    unit: str
    target: float
    at_least: bool
    facts: dict[str, Any] = field(default_factory=dict)
    check: bool = False

    @property
    def holds(self) -> bool:
        """Whether the result is a number and, of a check, on the good side of the target; 0 may be."""
        good = self.result >= self.target if self.at_least else self.result <= self.target
        return math.isfinite(self.result) and (good or not self.check)

    @property
    def reached(self) -> str:
        """The result with its unit."""
        return f"{self.result:.4g} {self.unit}"

    @property
    def wanted(self) -> str:
        """The target with its side and unit."""
        return f"{'≥' if self.at_least else '≤'} {self.target:g} {self.unit}"

    @property
    def met(self) -> bool:
        """Whether the result is on the good side of the target.

        None of these can be negative or nothing in truth: such a result was lost in the noise, and meets no target.
        """
        if self.check:
            return self.holds
        if self.result <= 0:
            return False
        return self.result >= self.target if self.at_least else self.result <= self.target


def show(measures: Sequence[Measure], load: float) -> None:
    """Print the table; `load` is how many processes wanted to run when it was begun."""
    busy = load > (os.cpu_count() or 1) / 4
    caption = f"load before: {load:.2f}" + (": the machine was busy, wall times say little" if busy else "")
    table = Table(title="tokenmill against its peers and rooflines", caption=caption)
    for heading in ("measure", "ours", "peer or roofline"):
        table.add_column(heading, overflow="fold")
    for heading in ("result", "target", "met"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in measures:
        met = "[green]yes[/]" if row.met else "[yellow]no[/]"
        table.add_row(row.name, row.ours, row.other, row.reached, row.wanted, met)
    Console(width=max(110, Console().width)).print(table)


def document(path: Path, measures: Sequence[Measure], load: float) -> None:
    """Replace the rows of these measures in the table of a Markdown page; rows of other runs stay, with their dates."""
    before, head, rest = path.read_text("utf-8").partition(HEAD)
    lines = rest.splitlines(keepends=True)
    rows = {line.split(" | ")[0]: line for line in itertools.takewhile(lambda line: line.startswith("|"), lines)}
    behind = "".join(lines[len(rows) :])
    today = datetime.now(UTC).date().isoformat()
    for row in measures:
        cells = [f"| {row.name}", row.ours, row.other, row.reached, row.wanted, f"{load:.1f}", f"{today} |\n"]
        rows[cells[0]] = " | ".join(cells)
    path.write_text(before + head + "".join(rows.values()) + behind, "utf-8")


def append(path: Path, measures: Sequence[Measure], failures: dict[str, str], settings: dict[str, Any]) -> None:
    """Add the record of one run to a JSON-lines file: what, when, with which versions, on which processor."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "settings": settings,
        "measures": [{**asdict(row), "met": row.met} for row in measures],
        "failures": failures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


def _processor() -> str:
    """The processor's name as Linux tells it, else as Python does."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text("utf-8").splitlines() if described.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
