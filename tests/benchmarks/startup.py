"""How long the commands that only look take: `tokenmill --help`, `plan` and `verify`.

A command that is typed often must answer at once, so these may not import Prefect or Dask, which takes seconds. Wall
time of the whole process, the median of five after one that is not counted; beside it, an interpreter that imports
Prefect and distributed and does nothing else. Which modules were imported is asked of the interpreter (`-X importtime`).
"""

import re
import sys

from tests.benchmarks import child, flow
from tests.benchmarks.bench import Bench
from tests.benchmarks.child import Child
from tests.benchmarks.record import Measure

TARGET = 0.7
RUNS = 5
HEAVY = ("prefect", "prefect_dask", "distributed", "dask", "torch", "transformers")


def measure(bench: Bench) -> list[Measure]:
    """One row for each command."""
    heavy = [child.run([sys.executable, "-c", "import prefect, distributed"]) for _ in range(RUNS)]
    importing = child.median(heavy, "wall_seconds").wall_seconds
    with bench.scratch() as folder:
        flow.pretrain(bench, bench.one_document().path, folder, "--workers", 1)
        blend = str(flow.write_blend(folder / "looked_at.json", bench.one_document().path))
        commands = [["--help"], ["plan", blend], ["verify", str(folder / "prepared")]]
        return [_row(bench, command, importing) for command in commands]


def _row(bench: Bench, command: list[str], importing: float) -> Measure:
    runs = [_tokenmill(bench, command) for _ in range(RUNS + 1)][1:]
    middle = child.median(runs, "wall_seconds")
    wall = middle.wall_seconds
    found = sorted(_imported(_tokenmill(bench, command, "-X", "importtime").stderr) & set(HEAVY))
    name = f"tokenmill {command[0]}" + (f" (IMPORTS {', '.join(found)})" if found else "")
    facts = {"heavy_modules": found, "importing_prefect_seconds": importing, "cpu_seconds": middle.cpu_seconds}
    other = f"{importing:.2f} s to import Prefect"
    return Measure(
        name,
        f"{wall:.2f} s wall, {middle.cpu_seconds:.2f} s CPU",
        other,
        wall,
        "s",
        TARGET,
        at_least=False,
        facts=facts,
    )


def _tokenmill(bench: Bench, command: list[str], *interpreter: str) -> Child:
    return child.run([sys.executable, *interpreter, child.TOKENMILL, *command], flow.environment(bench))


def _imported(report: str) -> set[str]:
    """Top-level names of all modules in a report of `-X importtime`: `import time: 12 | 34 |   package.module`."""
    names = re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", report, re.MULTILINE)
    return {name.split(".")[0] for name in names}
