"""Cases of a torture on all cores."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Case = TypeVar("Case")
Outcome = TypeVar("Outcome")


def each(work: Callable[[Case], Outcome], cases: Sequence[Case]) -> Iterator[Outcome]:
    """What `work` returns for each case, in order. A single case runs in this process, where a debugger sees it."""
    if len(cases) == 1:
        yield work(*cases)
        return
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), initializer=_use_one_thread) as pool:
        try:
            for number, done in enumerate(pool.map(work, cases), 1):
                print(f"\r{number} of {len(cases)}", end="", file=sys.stderr)
                yield done
        finally:
            print(file=sys.stderr)
            pool.shutdown(wait=True, cancel_futures=True)


def _use_one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
