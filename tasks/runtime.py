"""The machine as processes use it: pyarrow without pandas, threads for I/O, and compiled C functions.

With its first array, pyarrow imports pandas where that is installed, to recognize its objects: 0.15 s, and tokenmill has none.
It makes one attempt, and a second one only for calls that need pandas, such as `to_pandas`.

Threads map one function over many small reads or requests. A future costs 22 µs and 1.6 kB, 1.6 GB for a million items, so up
to 64 items share one. Few items are not grouped, so that four large files keep four threads busy.

`pip` compiles the C functions of a package. They are plain C called with ctypes: other threads run meanwhile.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TypeVar

from tokenmill.tasks.errors import RunError


class _NoPandas(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:  # noqa: ARG002 - of Python
        """Raises ImportError for pandas."""
        if fullname == "pandas":
            raise ImportError(fullname)


def set_up_arrow() -> None:
    """Set up pyarrow in a process that runs only this program's code."""
    import pyarrow as pa  # takes 0.1 s, which not every command needs

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.scalar(0)
    finally:
        sys.meta_path.remove(finder)


LONGEST_RUN = 64
RUNS_PER_THREAD = 8
"""The minimum per thread, given enough items, so that all threads finish at about the same time."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def in_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """Return the results of `function`, in order; an error is raised in place of its result. One item doesn't use a thread."""
    if len(items) <= 1:
        yield from map(function, items)
        return
    length = min(LONGEST_RUN, max(1, len(items) // (threads * RUNS_PER_THREAD)))
    runs = (items[start : start + length] for start in range(0, len(items), length))
    with ThreadPoolExecutor(threads) as pool:
        for results in pool.map(lambda run: [function(item) for item in run], runs):
            yield from results


def load(module: str) -> ctypes.CDLL:
    """Return the functions of `kernel.c` beside a Python file. Raises RunError if they cannot be loaded."""
    file = Path(module).with_name("compiled.abi3.so")
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise RunError(f"{file}: cannot be loaded ({error}); install tokenmill again, with a C compiler") from error
