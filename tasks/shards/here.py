"""Build shards in this process: a worker takes 1.5 CPU-seconds to start, in which one core tokenizes 150 MB.

The work is in a thread, so that Ctrl-C and progress need not wait for a shard; in several if a stage allows it.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from tokenmill.tasks.threads import cores

from .build import Announce, build_batch, may_pass
from .kind import LITTLE_BYTES, Needs, Stage
from .plan import PlannedShard
from .pool import Submitted, building_on
from .receipt import Receipt
from .store import Store

LITTLE_IN_THREADS = 2_000_000_000
"""`LITTLE_BYTES` of stages in threads: two cores pack so many bytes of tokens in about 8 s, and tokenize them in 10."""

MOST_THREADS = 4
"""A sixth of packing is in Python, so more threads would wait for each other."""

RETRY_SECONDS = (2.0, 4.0, 8.0)
"""Average waits before a batch is tried again."""

P = ParamSpec("P")
R = TypeVar("R")


def is_little(stage: Stage, pending: Sequence[PlannedShard], needs: Needs) -> bool:
    """Whether this process builds the shards: they are small, and neither a number of workers nor a resource is asked for."""
    most = LITTLE_IN_THREADS if stage.in_threads else LITTLE_BYTES
    return not (needs.workers or needs.resources) and sum(shard.part.size for shard in pending) < most


def build_here(
    stage: Stage,
    pending: Sequence[PlannedShard],
    store: Store,
    arguments: Mapping[str, Any],
    *,
    rebuild: bool,
    libraries: tuple[str, ...] = (),
) -> Sequence[Receipt]:
    """See BuildShards, and `building_on`."""
    slots = min(cores(), MOST_THREADS) if stage.in_threads else 1
    threads = ThreadPoolExecutor(slots)
    try:
        return building_on(lambda _: _Here(threads, slots), libraries)(
            stage, pending, store, arguments, rebuild=rebuild
        )
    finally:
        threads.shutdown(cancel_futures=True)  # after Ctrl-C, no other shard begins


class _Here:
    """A pool that is this process."""

    def __init__(self, threads: ThreadPoolExecutor, slots: int) -> None:
        self.slots = slots
        self._threads = threads
        self._announce: Announce = lambda _: None

    def listen(self, handle: Announce) -> str:
        self._announce = handle
        return "here"

    def submit(self, name: str, calls: Sequence[Mapping[str, Any]]) -> list[Submitted]:  # noqa: ARG002 - for Prefect
        futures = [self._threads.submit(self._build, **call) for call in calls]
        return [Submitted(future, partial(failure_of, future), future.result) for future in futures]

    def _build(
        self,
        batch: Sequence[Mapping[str, Any]],
        topic: str,  # noqa: ARG002 - there is one listener
        stage: Stage,
        store: Store,
        arguments: Mapping[str, Any],
        *,
        rebuild: bool,
    ) -> list[Receipt]:
        return patiently(build_batch, batch, store, stage.building(arguments), self._announce, rebuild=rebuild)

    def watch(self) -> Callable[[], None]:
        return lambda: None

    def bar(self, name: str) -> Callable[[float], object]:  # noqa: ARG002 - for Prefect
        return lambda _: None

    def log(self, sentence: str) -> None: ...


def patiently(work: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
    """The result of a call that is tried again after errors that may pass."""
    for seconds in RETRY_SECONDS:
        try:
            return work(*arguments, **keywords)
        except OSError as error:
            if not may_pass(error):
                raise
            time.sleep(seconds * random.uniform(0.5, 1.5))  # noqa: S311 - so that workers do not try again all at once
    return work(*arguments, **keywords)


def failure_of(future: Any) -> str | None:  # noqa: ANN401 - of Dask or concurrent.futures
    """The error that failed a batch, in words; None without one. The batch has ended."""
    error = future.exception()
    return None if error is None else in_words(error)


def in_words(error: BaseException) -> str:
    """An error of a batch, with its type."""
    words: object = error
    if type(error).__name__ == "KilledWorker":  # Dask is not imported here
        found = cast("Any", error)
        words = (
            f"{found.allowed_failures + 1} workers in a row ended while they worked on it, the last at {found.last_worker.address}; "
            "its log shows why: too little memory, a library that crashed, or no tokenmill there"
        )
    return f"{type(error).__name__}: {words}"
