"""A measured process: its CPU seconds, wall seconds and peak memory, as the kernel counted them.

Whole processes are compared, from exec to exit, because that is what a user pays: imports, loading the tokenizer and
every check included. CPU seconds are user + system, of the process and of the children it waited for; unlike
wall time they change little when other work shares the machine.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": ""}
"""The last of them: modules are compiled once, by the first process, as they are for users."""


@dataclass(frozen=True, slots=True)
class Child:
    """What a process that ended well cost, and what it wrote to stdout and stderr.

    `peak_bytes` is the largest resident set. Linux counts the parent's at the time of the fork as well, so the process
    that measures has to stay smaller than what it measures: it imports no array library.
    """

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    stdout: str
    stderr: str


class ChildFailedError(RuntimeError):
    """A measured process exited with an error: there is no result to report."""


def run(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
    """Run a command in the repository's root and measure it. Raises ChildFailedError, with the end of its stderr."""
    with TemporaryFile() as out, TemporaryFile() as err:
        start = time.perf_counter()
        process = subprocess.Popen(
            arguments, cwd=ROOT, stdout=out, stderr=err, env={**os.environ, **ENVIRONMENT, **(environment or {})}
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout, stderr = (_content(file) for file in (out, err))
    if process.returncode != 0:
        raise ChildFailedError(f"exit code {process.returncode}: {' '.join(arguments)}\n{stderr[-3000:]}")
    return Child(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024, stdout, stderr)


def python(module: str, *arguments: object) -> Child:
    """Run a module of this repository with this interpreter."""
    return run([sys.executable, "-m", module, *map(str, arguments)])


TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))
"""The command that users type, as it is installed beside this interpreter."""


def median(children: Sequence[Child], cost: str = "cpu_seconds") -> Child:
    """The child in the middle by one of its costs."""
    return sorted(children, key=lambda child: getattr(child, cost))[len(children) // 2]


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")
