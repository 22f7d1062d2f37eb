"""Build shards on a pool: batches, progress, and one error that names every failure.

A pool is workers on Dask, to which Prefect may submit (`workers`, `stage`), or this process (`here`). All batches are tried, so
that their receipts are kept.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Protocol

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.sources.opening import find_places

from .build import Announce, batches
from .code import built_with
from .kind import BuildShards, Stage
from .plan import PlannedShard, shard_record
from .progress import ProgressBar, ProgressDisplay, Tally
from .receipt import Receipt
from .store import Store

RunAll = Callable[[str, Callable[..., Any], Sequence[Mapping[str, Any]]], list[Any]]
"""Calls a function with the keywords of each call, as tasks of a name; returns the results in order. Raises RunError."""

MOST_REPORTED = 5

REFRESH_SECONDS = 1.0


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


class Pool(Protocol):
    """What runs batches of shards."""

    @property
    def slots(self) -> int:
        """Batches that run at once."""
        ...

    def listen(self, handle: Announce) -> str:
        """Call `handle` with each record that is announced under the topic, which is returned."""
        ...

    def submit(self, name: str, calls: Sequence[Mapping[str, Any]]) -> list[Submitted]:
        """Build batches, given the keywords of each, in the stage of that name."""
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
    submitted = pool.submit(name, [{"batch": batch, "topic": topic, **common} for batch in work])
    if failures := _failures(pool, submitted, tally, name):
        raise RunError(
            f"{len(failures)} of {len(work)} batches failed: {some(failures)}; finished shards are kept: fix the cause and "
            "run the same command again"
        )
    pool.log(tally.sentence())
    return [receipt for batch in submitted for receipt in batch.result()]


def _failures(pool: Pool, submitted: Sequence[Submitted], tally: Tally, name: str) -> list[str]:
    """Wait for every batch, showing progress; returns the failures. Raises when the pool is lost."""
    bar = ProgressBar(pool.bar(name), time.monotonic())
    with ProgressDisplay(tally) as display:

        def show() -> None:
            display.refresh()
            bar.show(tally.share, time.monotonic())

        failures = failures_of(submitted, "batch", pool.watch(), show)
    bar.end(tally.share if failures else 1.0, time.monotonic())
    return failures


def failures_of(
    submitted: Sequence[Submitted], noun: str, check: Callable[[], None], show: Callable[[], None] = lambda: None
) -> list[str]:
    """Wait as `wait_for` does; returns what failed, each as `<noun> <number>: <error>`."""
    wait_for([each.future for each in submitted], check, show)
    found = [each.failure() for each in submitted]
    return [f"{noun} {number}: {failure}" for number, failure in enumerate(found, 1) if failure]


def require_done(submitted: Sequence[Submitted], name: str, check: Callable[[], None]) -> None:
    """Wait for tasks of a name as `failures_of` does. Raises RunError if any failed."""
    if failures := failures_of(submitted, name, check):
        raise RunError(
            f"{len(failures)} of {len(submitted)} tasks failed: {some(failures)}; fix the cause and run again"
        )


def run_here(_name: str, function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """See RunAll: calls in this process, one after the other."""
    return [function(**call) for call in calls]


def some(failures: Sequence[str]) -> str:
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
