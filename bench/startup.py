"""How long a person waits at a terminal: commands that only look, and preparations of the bundled tiny blends.

A command that is typed often must answer at once, so `--help`, `plan` and `verify` may not import Prefect or Dask, which
takes seconds; nor may a preparation without a server that builds little or nothing. Wall
time of the whole process, the median of five after one that is not counted; beside it, an interpreter that imports
Prefect and distributed and does nothing else. Which modules were imported is asked of the interpreter (`-X importtime`).
"""

import re
import sys
from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path

from bench import child, flow
from bench.bench import Bench
from bench.child import Child
from bench.record import Measure

TARGET = 0.7
PREPARED, REUSED, CONVERSATIONS = 5.0, 2.0, 6.0
RUNS = 5
HEAVY = ("prefect", "prefect_dask", "distributed", "dask", "torch", "transformers")


def measure(bench: Bench) -> list[Measure]:
    """One row for each command, and for each preparation."""
    heavy = [child.run([sys.executable, "-c", "import prefect, distributed"]) for _ in range(RUNS)]
    importing = child.median(heavy, "wall_seconds").wall_seconds
    with bench.scratch() as folder:
        flow.pretrain(bench, bench.one_document().path, folder, "--workers", 1)
        blend = str(flow.write_blend(folder / "looked_at.json", bench.one_document().path))
        commands = [["--help"], ["plan", blend], ["verify", str(folder / "prepared")]]
        looking = [_row(bench, command[0], repeat(command), importing, TARGET) for command in commands]
        return [*looking, *_preparations(bench, folder, importing)]


def _preparations(bench: Bench, folder: Path, importing: float) -> list[Measure]:
    """Of the tiny blends: into a new folder each time, and into the same folder again."""

    def again(kind: str, blend: str) -> Iterator[list[str]]:
        return (_preparing(kind, blend, folder / f"{kind}-{number}") for number in count())

    reused = repeat(_preparing("pretrain", "tiny", folder / "reused"))
    return [
        _row(bench, "pretrain blends/tiny.json", again("pretrain", "tiny"), importing, PREPARED),
        _row(bench, "the same, reused", reused, importing, REUSED),
        _row(bench, "sft blends/tiny-sft.json", again("sft", "tiny-sft"), importing, CONVERSATIONS),
    ]


def _preparing(kind: str, blend: str, out: Path) -> list[str]:
    return [kind, f"blends/{blend}.json", "--output-dir", str(out)]


def _row(bench: Bench, title: str, commands: Iterator[list[str]], importing: float, target: float) -> Measure:
    """`commands` gives the command of each run."""
    runs = [_tokenmill(bench, next(commands)) for _ in range(RUNS + 1)][1:]
    middle = child.median(runs, "wall_seconds")
    wall = middle.wall_seconds
    found = sorted(_imported(_tokenmill(bench, next(commands), "-X", "importtime").stderr) & set(HEAVY))
    name = f"tokenmill {title}" + (f" (IMPORTS {', '.join(found)})" if found else "")
    facts = {"heavy_modules": found, "importing_prefect_seconds": importing, "cpu_seconds": middle.cpu_seconds}
    other = f"{importing:.2f} s to import Prefect"
    return Measure(
        name,
        f"{wall:.2f} s wall, {middle.cpu_seconds:.2f} s CPU",
        other,
        wall,
        "s",
        target,
        at_least=False,
        facts=facts,
    )


def _tokenmill(bench: Bench, command: list[str], *interpreter: str) -> Child:
    return child.run([sys.executable, *interpreter, child.TOKENMILL, *command], flow.environment(bench))


def _imported(report: str) -> set[str]:
    """Top-level names of all modules in a report of `-X importtime`: `import time: 12 | 34 |   package.module`."""
    names = re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", report, re.MULTILINE)
    return {name.split(".")[0] for name in names}
