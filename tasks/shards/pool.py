"""Build shards on a pool of Dask workers: batches, progress, and one error that names every failure.

The run lets all batches finish, so that their receipts are kept. How a batch is submitted is the pool's: as a Prefect task
(`stage`), or directly (`local`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from distributed import Client, Future
from tokenmill.tasks.errors import RunError

from .build import batches
from .cluster import asking_for, listen, slots
from .plan import PlannedShard, shard_record
from .preparation import BuildShards, Step
from .progress import ProgressBar, ProgressDisplay, Tally
from .store import Store
from .wait import ClusterWatch, wait_for

MOST_REPORTED = 5


@dataclass(frozen=True, slots=True)
class Submitted:
    """A task on the workers: its Dask future and, once that is done, what failed it (None: nothing)."""

    future: Future[Any]
    failure: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers for batches of shards.

    Each has the `resources`. An `adaptive` pool starts them as needed, up to `most_workers`. `submit` takes the name of a
    step, the number of a batch, and the keywords of the function that builds it. `bar` takes the name of a step and returns
    what shows its percentage. `tell` is for sentences that a user must see, `log` for the others.
    """

    client: Client
    resources: Mapping[str, float]
    adaptive: bool
    most_workers: int
    submit: Callable[[str, int, Mapping[str, Any]], Submitted]
    bar: Callable[[str], Callable[[float], object]]
    tell: Callable[[str], object]
    log: Callable[[str], object]


def building_on(pool: Callable[[int], Pool]) -> BuildShards:
    """Builds shards on the pool, which is asked for when there are shards to build; it takes their number."""

    def build_shards(
        step: Step, pending: Sequence[PlannedShard], store: Store, arguments: Mapping[str, Any], *, rebuild: bool
    ) -> None:
        if pending:
            common = {"step": step, "store": store, "arguments": arguments, "rebuild": rebuild}
            _build(pool(len(pending)), step.name, pending, common)

    return build_shards


def _build(pool: Pool, name: str, pending: Sequence[PlannedShard], common: Mapping[str, Any]) -> None:
    tally = Tally(len(pending), sum(shard.part.size for shard in pending))
    topic = f"shards-{uuid4()}"  # an existing cluster may serve other runs
    listen(pool.client, topic, tally.add)
    work = [[shard_record(shard) for shard in batch] for batch in batches(pending, slots(pool.client, pool.most_workers))]
    pool.log(f"{name}: {len(pending)} shards ({tally.source_bytes / 1e9:.2f} GB) in {len(work)} batches")
    with asking_for(pool.client, pool.resources):
        submitted = [
            pool.submit(name, number, {"batch": batch, "topic": topic, **common})
            for number, batch in enumerate(work, 1)
        ]
    if failures := _failures(pool, submitted, tally, name):
        raise RunError(
            f"{len(failures)} of {len(work)} batches failed: {some(failures)}; finished shards are kept: fix the cause and "
            "run the same command again"
        )
    pool.log(tally.sentence())


def _failures(pool: Pool, submitted: Sequence[Submitted], tally: Tally, name: str) -> list[str]:
    """Wait for every batch, showing progress; returns the failures. Raises as `ClusterWatch.check` does."""
    bar = ProgressBar(pool.bar(name), time.monotonic())
    watch = ClusterWatch(pool.client, pool.resources, pool.adaptive, pool.tell)
    with ProgressDisplay(tally) as display:

        def show() -> None:
            display.refresh()
            bar.show(tally.share, time.monotonic())

        failures = failures_of(submitted, "batch", watch, show)
    bar.end(tally.share if failures else 1.0, time.monotonic())
    return failures


def failures_of(
    submitted: Sequence[Submitted], noun: str, watch: ClusterWatch, show: Callable[[], None] = lambda: None
) -> list[str]:
    """Wait for all tasks, calling `show` about every second; returns what failed, each as `<noun> <number>: <error>`."""
    wait_for([each.future for each in submitted], watch.check, show)
    found = [each.failure() for each in submitted]
    return [f"{noun} {number}: {failure}" for number, failure in enumerate(found, 1) if failure]


def some(failures: Sequence[str]) -> str:
    """The first failures, as many as fit in a message."""
    return "; ".join(failures[:MOST_REPORTED])
