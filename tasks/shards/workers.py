"""A pool of Dask workers; for a run that Prefect does not show, they are processes on this machine, or on a standing cluster.

Such workers import no Prefect. There are no more processes than shards: one takes 1.5 CPU-seconds to start.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast
from uuid import uuid4

from distributed import Client

from .build import Announce
from .cluster import (
    asking_for,
    grow,
    local_arguments,
    local_cluster,
    local_size,
    require_scheduler,
    require_tokenmill,
    started,
    workers_built_with,
)
from .code import built_with, require_same_here, require_same_there
from .executor import Pool, RunAll, Submitted, announce, build_work, results_of, submitted
from .kind import Needs, Stage
from .plan import PlannedShard
from .progress import say
from .retry import with_retries
from .settings import ClusterSettings
from .store import Store
from .wait import ClusterWatch


@dataclass
class WorkerPool(Pool):
    """Workers with the `resources`. An `adaptive` cluster starts them as needed; `most_workers` may be more than there are."""

    client: Client
    resources: Mapping[str, float]
    most_workers: int = 0
    adaptive: bool = False
    timeout: float | None = None

    def slots(self) -> int:
        threads = cast("dict[str, int]", self.client.nthreads())
        return max(1, sum(threads.values()), self.most_workers)

    def listen(self, handle: Announce) -> Announce:
        topic = f"shards-{uuid4()}"  # an existing cluster may serve other runs
        self.client.subscribe_topic(topic, lambda event: handle(event[1]))
        return partial(announce, topic)

    def submit(self, name: str, calls: Sequence[Mapping[str, Any]]) -> list[Submitted]:  # noqa: ARG002 - a name in Prefect
        self.require_same_code(calls)
        with asking_for(self.client, self.resources):
            # Not pure: Dask would return the kept result of an equal call.
            return [submitted(self.client.submit(build_work, **call, pure=False)) for call in calls]

    def require_same_code(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Raises InputError if a worker would build other shards than this process."""
        stage, store = cast("Stage", calls[0]["stage"]), cast("Store", calls[0]["store"])
        require_same_there(store.built_with, workers_built_with(self.client, stage.build.__module__, store.built_with))

    def watch(self) -> Callable[[], None]:
        return ClusterWatch(self.client, self.resources, self.adaptive, self.tell, self.timeout).check

    def tell(self, sentence: str) -> None:
        say(sentence)


FindPool = Callable[[Stage, Sequence[PlannedShard]], Pool]


@contextmanager
def pool_for(
    settings: ClusterSettings, needs: Needs, start: Callable[[int], AbstractContextManager[WorkerPool]] | None = None
) -> Generator[FindPool]:
    """The workers of all stages of a run, which start (by default as `workers_of` does) with the first shard to build."""
    pools: list[WorkerPool] = []
    begin = start or partial(workers_of, settings, resources=needs.resources)
    with ExitStack() as stack:

        def pool(_stage: Stage, pending: Sequence[PlannedShard]) -> WorkerPool:
            workers = local_size(len(pending), needs.workers)
            if not pools:
                pools.append(stack.enter_context(begin(workers)))
            (found,) = pools
            if settings.cluster == "local":
                grow(found.client, workers)
                found.most_workers = workers
            return found

        yield pool


@contextmanager
def calls_on_workers(settings: ClusterSettings, module: str) -> Generator[RunAll]:
    """A context that calls functions on one cluster, which starts with the first call, without Prefect's tasks.

    Workers need the same code as this process of the packages that `module` is made of.
    """
    pools: list[WorkerPool] = []
    with ExitStack() as stack:

        def run_all(name: str, function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]) -> list[Any]:
            if calls and not pools:
                workers = local_size(len(calls), settings.workers)
                pools.append(stack.enter_context(workers_of(settings, workers)))
            if not calls:
                return []
            (pool,), planned = pools, built_with(module, ())
            require_same_there(planned, workers_built_with(pool.client, module, planned))
            submit = partial(pool.client.submit, _call, module, planned, function, pure=False)
            return results_of([submitted(submit(call)) for call in calls], name, pool.watch())

        yield run_all


def _call(module: str, planned: Mapping[str, str], function: Callable[..., Any], call: Mapping[str, Any]) -> object:
    require_same_here(module, planned)
    return with_retries(function, **call)


@contextmanager
def workers_of(
    settings: ClusterSettings, workers: int, resources: Mapping[str, float] = MappingProxyType({})
) -> Generator[WorkerPool]:
    """The workers of a `cluster` setting, without Prefect's tasks; its task runner starts the clusters of profiles."""
    if settings.cluster == "local":
        cluster = local_cluster(**local_arguments(workers, resources))
        with started(cluster), started(Client(cluster)) as client:
            yield WorkerPool(client, resources, workers)
        return
    if "://" in settings.cluster:
        require_scheduler(settings.cluster)
        with started(Client(settings.cluster)) as client:
            require_tokenmill(client)
            yield WorkerPool(client, resources, timeout=settings.cluster_timeout)
        return
    from .runner import task_runner  # noqa: PLC0415 - imports Prefect

    with started(task_runner(settings.cluster, settings.workers, resources)) as runner:
        require_tokenmill(runner.client)
        adaptive = bool(runner.adapt_kwargs)
        yield WorkerPool(runner.client, resources, adaptive=adaptive, timeout=settings.cluster_timeout)
