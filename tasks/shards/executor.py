"""Build shards: batches, progress, receipts, and one error that names every failure.

A pool is what runs batches: this process (here), workers on Dask (`workers`), or Prefect tasks on Dask (`stage`). All three run
`build_work`, which is the only place that retries. All batches are tried, so that their receipts are kept.

A worker takes 1.5 CPU-seconds to start, in which one core tokenizes 150 MB, so this process builds few bytes itself: in a
thread, because Ctrl-C and progress must not wait for a shard, and in several if a stage allows it.
"""

import logging
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, cast

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.runtime import cores, set_up_arrow
from tokenmill.tasks.sources.files import PLACES, places_of
from tokenmill.tasks.sources.opening import find_places

from .build import Announce, batches, build_batch
from .code import built_with, require_same_here
from .kind import LITTLE_BYTES, BuildShards, Needs, Stage
from .plan import PlannedShard
from .progress import ProgressBar, Tally, say, shown
from .receipt import Receipt
from .retry import with_retries
from .store import Store

LITTLE_IN_THREADS = 2_000_000_000
"""`LITTLE_BYTES` of stages in threads: two cores pack so many bytes of tokens in about 8 s, and tokenize them in 10."""

MOST_THREADS = 4
"""A sixth of packing is in Python, so more threads would wait for each other."""

MOST_REPORTED = 5

REFRESH_SECONDS = 1.0


RunAll = Callable[[str, Callable[..., Any], Sequence[Mapping[str, Any]]], list[Any]]
"""Calls a function with the keywords of each call, as tasks of a name; returns the results in order. Raises RunError."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A future and, once it is done, what failed it (None: nothing), or else its result."""

    future: Any
    failure: Callable[[], str | None]
    result: Callable[[], Any]


def submitted(future: Any) -> Submitted:  # noqa: ANN401 - of Dask or concurrent.futures
    """Return a future that raises what failed it."""

    def failure() -> str | None:
        error = future.exception()
        return None if error is None else in_words(error)

    return Submitted(future, failure, future.result)


class Pool:
    """Runs batches of shards; by default without progress, and it can't be lost."""

    def slots(self) -> int:
        """Batches that run at once."""
        return 1

    def listen(self, handle: Announce) -> Announce:
        """Return a function for batches, which calls `handle` in this process with each record that it is given."""
        return handle

    def submit(self, name: str, calls: Sequence[Mapping[str, Any]]) -> list[Submitted]:
        """Build batches in the stage of that name: call `build_work` with the keywords of each."""
        raise NotImplementedError

    def watch(self) -> Callable[[], None]:
        """Return a function to call every second, which raises when the pool is lost."""
        return lambda: None

    def bar(self, name: str) -> Callable[[float], object]:  # noqa: ARG002 - a name in Prefect
        """What shows the percentage of a stage."""
        return lambda _: None

    def log(self, sentence: str) -> None:
        """Log a sentence; the terminal shows the same figures."""

    def explain(self) -> None:
        """Raise a better error for failed batches, if there is one."""

    def close(self) -> None:
        """Don't begin further batches."""


def building_on(pool: Callable[[Stage, Sequence[PlannedShard]], Pool], libraries: tuple[str, ...]) -> BuildShards:
    """Builds shards on a pool, which is asked for when there are shards to build.

    Receipts record the code and the versions of the `libraries`.
    """

    def build_shards(
        stage: Stage, pending: Sequence[PlannedShard], store: Store, arguments: Mapping[str, Any], *, rebuild: bool
    ) -> Sequence[Receipt]:
        if not pending:
            return ()
        say(f"{stage.name.replace('-', ' ')}: {len(pending):,} to build")
        # Receipts name the code, and workers with other code refuse the batch.
        made = replace(store, built_with=built_with(stage.build.__module__, libraries))
        chosen, tally = pool(stage, pending), Tally(len(pending), sum(shard.part.size for shard in pending))
        find_places(shard.part for shard in pending)
        tell = chosen.listen(tally.add)
        common = {"tell": tell, "stage": stage, "store": made, "arguments": arguments, "rebuild": rebuild}
        calls = [
            {"batch": batch, "places": places_of(shard.part for shard in batch), **common}
            for batch in batches(pending, chosen.slots())
        ]
        chosen.log(f"{stage.name}: {len(pending)} shards ({tally.source_bytes / 1e9:.2f} GB) in {len(calls)} batches")
        try:
            futures = chosen.submit(stage.name, calls)
            bar = ProgressBar(chosen.bar(stage.name), time.monotonic())
            with shown(tally) as refresh:

                def show() -> None:
                    refresh()
                    bar.show(tally.share, time.monotonic())

                failures = _failures_of(futures, "batch", chosen.watch(), show)
            bar.end(tally.share if failures else 1.0, time.monotonic())
        finally:
            chosen.close()
        # All batches were tried, so that what could be built has its receipt.
        if failures:
            chosen.explain()
            raise RunError(
                f"{len(failures)} of {len(calls)} batches failed: {'; '.join(failures[:MOST_REPORTED])}; finished shards are kept: fix the cause "
                "and run the same command again"
            )
        chosen.log(tally.sentence())
        return [receipt for batch in futures for receipt in batch.result()]

    return build_shards


def build_work(
    batch: Sequence[PlannedShard],
    places: Mapping[str, str],
    tell: Announce,
    stage: Stage,
    store: Store,
    arguments: Mapping[str, Any],
    *,
    rebuild: bool,
) -> list[Receipt]:
    """Return the body of every batch: build its shards, try again after errors that may pass, and return the receipts.

    `places` are where files of the Hub are. Raises RunError unless this process has the code of the run.
    """
    # Workers then need not ask the Hub again.
    PLACES.update(places)
    require_same_here(stage.build.__module__, store.built_with)
    return with_retries(build_batch, batch, store, stage.building(arguments), tell, rebuild=rebuild)


def _failures_of(
    futures: Sequence[Submitted], noun: str, check: Callable[[], None], show: Callable[[], None] = lambda: None
) -> list[str]:
    """Wait for all futures; returns what failed them. Raises, by `check`, when the pool is lost."""
    wait_for([each.future for each in futures], check, show)
    found = [each.failure() for each in futures]
    return [f"{noun} {number}: {failure}" for number, failure in enumerate(found, 1) if failure]


def results_of(futures: Sequence[Submitted], name: str, check: Callable[[], None]) -> list[Any]:
    """Wait for tasks of a name; returns their results. Raises RunError if any failed."""
    if failures := _failures_of(futures, name, check):
        raise RunError(
            f"{len(failures)} of {len(futures)} tasks failed: {'; '.join(failures[:MOST_REPORTED])}; fix the cause and run again"
        )
    return [each.result() for each in futures]


def run_here(_name: str, function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """See RunAll: calls in this process, one after the other."""
    return [function(**call) for call in calls]


def wait_for(futures: Sequence[Any], check: Callable[[], None], show: Callable[[], None]) -> None:
    """Wait until all futures have succeeded or failed. About every second, call `check`, which may raise, and `show`."""
    woken = Event()
    for future in futures:
        # The end of the last batch ends the wait at once, not after a second.
        future.add_done_callback(lambda _: woken.set())
    pending = list(futures)
    while pending := [future for future in pending if not future.done()]:
        if not woken.wait(REFRESH_SECONDS):
            check()
        woken.clear()
        show()


def in_words(error: BaseException) -> str:
    """Return an error of a batch, with its type."""
    words: object = error
    if type(error).__name__ == "KilledWorker":  # Dask is not imported here
        found = cast("Any", error)
        words = (
            f"{found.allowed_failures + 1} workers in a row ended while they worked on it, the last at {found.last_worker.address}; "
            "its log shows why: too little memory, a library that crashed, or no tokenmill there"
        )
    return f"{type(error).__name__}: {words}"


def is_little(stage: Stage, pending: Sequence[PlannedShard], needs: Needs) -> bool:
    """Return whether this process builds the shards: they are small, and neither a number of workers nor a resource is asked for."""
    most = LITTLE_IN_THREADS if stage.in_threads else LITTLE_BYTES
    return not (needs.workers or needs.resources) and sum(shard.part.size for shard in pending) < most


class _Here(Pool):
    """A pool that is this process."""

    def __init__(self, threads: int) -> None:
        self._threads, self._slots = ThreadPoolExecutor(threads), threads

    def slots(self) -> int:
        return self._slots

    def submit(self, name: str, calls: Sequence[Mapping[str, Any]]) -> list[Submitted]:  # noqa: ARG002 - for Prefect
        return [submitted(self._threads.submit(build_work, **call)) for call in calls]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def here(stage: Stage, _pending: Sequence[PlannedShard] = ()) -> Pool:
    """Return a pool of this process for a stage, with threads if it allows them."""
    return _Here(min(cores(), MOST_THREADS) if stage.in_threads else 1)


CALLED_WHILE_IMPORTED = 99
"""Exit code of a worker whose imported main script starts a run at import time."""


REPORTED_BY_THE_RUN = ("Compute Failed", "Failed to communicate with scheduler during heartbeat")
"""Tracebacks that a worker of a local cluster doesn't log: a failed batch, and a scheduler that closed while it was asked."""


def dask_setup(_worker: object) -> None:
    """Called by Dask in the workers of a local cluster, which serve one run."""
    set_up_arrow()
    logging.getLogger("distributed.worker").addFilter(
        lambda record: not record.getMessage().startswith(REPORTED_BY_THE_RUN)
    )


def exit_if_imported() -> None:
    """Exit from a worker that starts a run while it imports the script that started it; the script reports the reason.

    Python marks a process as `_inheriting` while it imports its parent's main module, and doesn't start processes then.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(CALLED_WHILE_IMPORTED)


def worker_number() -> int | None:
    """Return the number at the end of this worker's name; 0 outside a cluster, None for a name without a number.

    The name of an unnamed worker is its address, and a port is not a worker number.
    """
    worker = _this_worker()
    if worker is None:
        return 0
    name = str(worker.name)
    found = None if "://" in name else re.search(r"\d+$", name)
    return int(found[0]) if found else None


def announce(topic: str, record: dict[str, Any]) -> None:
    """Report a finished shard to the run; without effect outside a Dask worker."""
    worker = _this_worker()
    if worker is not None:
        worker.log_event(topic, record)


def _this_worker() -> Any:  # noqa: ANN401 - distributed.Worker, or None
    distributed = sys.modules.get("distributed")
    try:
        return distributed.get_worker() if distributed else None
    except ValueError:
        return None
