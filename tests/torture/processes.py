"""Cases of a torture on all cores."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Outcome = TypeVar("Outcome")


def each(work: Callable[[str], Outcome], seeds: Sequence[str]) -> Iterator[Outcome]:
    """What `work` returns for each seed, in order. A single seed is worked on in this process, where a debugger sees it."""
    if len(seeds) == 1:
        yield work(*seeds)
        return
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), initializer=_use_one_thread) as pool:
        try:
            for number, done in enumerate(pool.map(work, seeds), 1):
                print(f"\r{number} of {len(seeds)}", end="", file=sys.stderr)
                yield done
        finally:
            print(file=sys.stderr)
            pool.shutdown(wait=True, cancel_futures=True)


def _use_one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
