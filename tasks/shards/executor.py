"""Build shards: batches, progress, receipts, and one error that names every failure.

A pool is what runs batches: this process (here), workers on Dask (`workers`), or Prefect tasks on Dask (`stage`). All three run
`build_work`, which is the only place that retries. All batches are tried, so that their receipts are kept.

A worker takes 1.5 CPU-seconds to start, in which one core tokenizes 150 MB, so this process builds few bytes itself: in a
thread, because Ctrl-C and progress must not wait for a shard, and in several if a stage allows it.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, wraps
from threading import Event
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.sources.opening import find_places
from tokenmill.tasks.threads import cores

from .build import Announce, batches, build_batch, may_pass
from .code import built_with, require_same_here
from .kind import LITTLE_BYTES, BuildShards, Needs, Stage
from .plan import PlannedShard, shard_record
from .progress import ProgressBar, ProgressDisplay, Tally
from .receipt import Receipt
from .store import Store
from .worker import announce

LITTLE_IN_THREADS = 2_000_000_000
"""`LITTLE_BYTES` of stages in threads: two cores pack so many bytes of tokens in about 8 s, and tokenize them in 10."""

MOST_THREADS = 4
"""A sixth of packing is in Python, so more threads would wait for each other."""

RETRY_SECONDS = (2.0, 4.0, 8.0)
"""Average waits before a batch is tried again."""

MOST_REPORTED = 5

REFRESH_SECONDS = 1.0

P = ParamSpec("P")
R = TypeVar("R")

RunAll = Callable[[str, Callable[..., Any], Sequence[Mapping[str, Any]]], list[Any]]
"""Calls a function with the keywords of each call, as tasks of a name; returns the results in order. Raises RunError."""


class Future(Protocol):
    """Work in progress, of Dask or of `concurrent.futures`."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def add_done_callback(self, call: Callable[[Any], object], /) -> object:
        """Call a function when it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Submitted:
    """A future and, once it is done, what failed it (None: nothing), or else its result."""

    future: Future
    failure: Callable[[], str | None]
    result: Callable[[], Any]


def submitted(future: Any) -> Submitted:  # noqa: ANN401 - of Dask or concurrent.futures
    """A future that raises what failed it."""
    return Submitted(future, partial(_failure_of, future), future.result)


def _failure_of(future: Any) -> str | None:  # noqa: ANN401 - see `submitted`
    error = future.exception()
    return None if error is None else in_words(error)


class Pool(Protocol):
    """What runs batches of shards."""

    @property
    def slots(self) -> int:
        """Batches that run at once."""
        ...

    def listen(self, handle: Announce) -> str | Announce:
        """Call `handle` with each record that is announced under the topic, which is returned; itself in this process."""
        ...

    def submit(self, name: str, calls: Sequence[Mapping[str, Any]]) -> list[Submitted]:
        """Build batches in the stage of that name: call `build_work` with the keywords of each."""
        ...

    def watch(self) -> Callable[[], None]:
        """A function to call every second, which raises when the pool is lost."""
        ...

    def bar(self, name: str) -> Callable[[float], object]:
        """What shows the percentage of a stage."""
        ...

    def log(self, sentence: str) -> None:
        """Log a sentence."""
        ...


def building_on(pool: Callable[[int], Pool], libraries: tuple[str, ...]) -> BuildShards:
    """Builds shards on a pool, which is asked for when there are shards to build; it takes their number.

    Receipts record the code and the versions of the `libraries`.
    """

    def build_shards(
        stage: Stage, pending: Sequence[PlannedShard], store: Store, arguments: Mapping[str, Any], *, rebuild: bool
    ) -> Sequence[Receipt]:
        if not pending:
            return ()
        made = replace(store, built_with=built_with(stage.build.__module__, libraries))
        common = {"stage": stage, "store": made, "arguments": arguments, "rebuild": rebuild}
        return _build(pool(len(pending)), stage.name, pending, common)

    return build_shards


def _build(pool: Pool, name: str, pending: Sequence[PlannedShard], common: Mapping[str, Any]) -> list[Receipt]:
    tally = Tally(len(pending), sum(shard.part.size for shard in pending))
    topic = pool.listen(tally.add)
    find_places(shard.part for shard in pending)
    work = [[shard_record(shard) for shard in batch] for batch in batches(pending, pool.slots)]
    pool.log(f"{name}: {len(pending)} shards ({tally.source_bytes / 1e9:.2f} GB) in {len(work)} batches")
    futures = pool.submit(name, [{"batch": batch, "topic": topic, **common} for batch in work])
    if failures := _failures(pool, futures, tally, name):
        raise RunError(
            f"{len(failures)} of {len(work)} batches failed: {_some(failures)}; finished shards are kept: fix the cause and "
            "run the same command again"
        )
    pool.log(tally.sentence())
    return [receipt for batch in futures for receipt in batch.result()]


def build_work(
    batch: Sequence[Mapping[str, Any]],
    topic: str | Announce,
    stage: Stage,
    store: Store,
    arguments: Mapping[str, Any],
    *,
    rebuild: bool,
) -> list[Receipt]:
    """The body of every batch: build its shards, try again after errors that may pass, and return the receipts.

    Raises RunError unless this process has the code of the run.
    """
    require_same_here(stage.build.__module__, store.built_with)
    told = partial(announce, topic) if isinstance(topic, str) else topic
    return patiently(build_batch, batch, store, stage.building(arguments), told, rebuild=rebuild)


def _failures(pool: Pool, futures: Sequence[Submitted], tally: Tally, name: str) -> list[str]:
    """Wait for every batch, showing progress; returns the failures. Raises when the pool is lost."""
    bar = ProgressBar(pool.bar(name), time.monotonic())
    with ProgressDisplay(tally) as display:

        def show() -> None:
            display.refresh()
            bar.show(tally.share, time.monotonic())

        failures = _failures_of(futures, "batch", pool.watch(), show)
    bar.end(tally.share if failures else 1.0, time.monotonic())
    return failures


def _failures_of(
    futures: Sequence[Submitted], noun: str, check: Callable[[], None], show: Callable[[], None] = lambda: None
) -> list[str]:
    """Wait as `wait_for` does; returns what failed, each as `<noun> <number>: <error>`."""
    wait_for([each.future for each in futures], check, show)
    found = [each.failure() for each in futures]
    return [f"{noun} {number}: {failure}" for number, failure in enumerate(found, 1) if failure]


def results_of(futures: Sequence[Submitted], name: str, check: Callable[[], None]) -> list[Any]:
    """Wait for tasks of a name; returns their results. Raises RunError if any failed."""
    if failures := _failures_of(futures, name, check):
        raise RunError(
            f"{len(failures)} of {len(futures)} tasks failed: {_some(failures)}; fix the cause and run again"
        )
    return [each.result() for each in futures]


def run_here(_name: str, function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """See RunAll: calls in this process, one after the other."""
    return [function(**call) for call in calls]


def _some(failures: Sequence[str]) -> str:
    """The first failures, as many as fit in a message."""
    return "; ".join(failures[:MOST_REPORTED])


def wait_for(futures: Sequence[Future], check: Callable[[], None], show: Callable[[], None]) -> None:
    """Wait until all futures have succeeded or failed. About every second, call `check`, which may raise, and `show`."""
    woken = Event()
    for future in futures:
        future.add_done_callback(lambda _: woken.set())
    pending = list(futures)
    while pending := [future for future in pending if not future.done()]:
        if not woken.wait(REFRESH_SECONDS):
            check()
        woken.clear()
        show()


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


def patient(function: Callable[P, R]) -> Callable[P, R]:
    """A function that calls `patiently`."""

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        return patiently(function, *arguments, **keywords)

    return call


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

    def listen(self, handle: Announce) -> Announce:
        return handle

    def submit(self, name: str, calls: Sequence[Mapping[str, Any]]) -> list[Submitted]:  # noqa: ARG002 - for Prefect
        return [submitted(self._threads.submit(build_work, **call)) for call in calls]

    def watch(self) -> Callable[[], None]:
        return lambda: None

    def bar(self, name: str) -> Callable[[float], object]:  # noqa: ARG002 - for Prefect
        return lambda _: None

    def log(self, sentence: str) -> None: ...
