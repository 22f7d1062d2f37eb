"""A pool of Dask workers; for a run that Prefect does not show, they are processes on this machine, or on a standing cluster.

Such workers import no Prefect. There are no more processes than shards: one takes 1.5 CPU-seconds to start.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from distributed import Client

from .build import Announce
from .cluster import (
    asking_for,
    grow,
    listen,
    local_arguments,
    local_cluster,
    local_size,
    require_scheduler,
    require_tokenmill,
    slots,
    started,
    workers_built_with,
)
from .code import built_with, require_same_here, require_same_there
from .executor import RunAll, Submitted, build_work, building_on, patiently, results_of, submitted
from .kind import BuildShards, Needs, Stage
from .progress import say
from .settings import ClusterSettings
from .store import Store
from .wait import ClusterWatch


@dataclass
class WorkerPool:
    """Workers with the `resources`. An `adaptive` cluster starts them as needed; `most_workers` may be more than there are."""

    client: Client
    resources: Mapping[str, float]
    most_workers: int = 0
    adaptive: bool = False
    timeout: float | None = None

    @property
    def slots(self) -> int:
        """See Pool."""
        return slots(self.client, self.most_workers)

    def listen(self, handle: Announce) -> str:
        """See Pool."""
        topic = f"shards-{uuid4()}"  # an existing cluster may serve other runs
        listen(self.client, topic, handle)
        return topic

    def submit(self, name: str, calls: Sequence[Mapping[str, Any]]) -> list[Submitted]:  # noqa: ARG002 - a name in Prefect
        """See Pool."""
        self.require_same_code(calls)
        with asking_for(self.client, self.resources):
            return [submitted(self.client.submit(build_work, **call, pure=False)) for call in calls]

    def require_same_code(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Raises InputError if a worker would build other shards than this process."""
        stage, store = cast("Stage", calls[0]["stage"]), cast("Store", calls[0]["store"])
        require_same_there(store.built_with, workers_built_with(self.client, stage.build.__module__, store.built_with))

    def watch(self) -> Callable[[], None]:
        """See Pool."""
        return ClusterWatch(self.client, self.resources, self.adaptive, self.tell, self.timeout).check

    def bar(self, name: str) -> Callable[[float], object]:  # noqa: ARG002 - a name in Prefect
        """See Pool. The terminal has one."""
        return lambda _: None

    def log(self, sentence: str) -> None:
        """See Pool. The terminal shows the same figures."""

    def tell(self, sentence: str) -> None:
        """Show a sentence."""
        say(sentence)


@contextmanager
def local_workers(needs: Needs) -> Generator[BuildShards]:
    """A context that builds shards on one cluster for all steps of a run; the cluster starts with the first shard to build."""
    clients: list[Client] = []
    with ExitStack() as stack:

        def pool(shards: int) -> WorkerPool:
            workers = local_size(shards, needs.workers)
            if not clients:
                clients.append(stack.enter_context(started(_cluster(workers, needs.resources))))
            (client,) = clients
            grow(client, workers)
            return WorkerPool(client, needs.resources, workers)

        yield building_on(pool, needs.libraries)


@contextmanager
def standing_workers(address: str, needs: Needs, timeout: float | None) -> Generator[BuildShards]:
    """A context that builds shards on a cluster that others have started; it is reached with the first shard to build."""
    clients: list[Client] = []
    with ExitStack() as stack:

        def pool(_: int) -> WorkerPool:
            if not clients:
                require_scheduler(address)
                clients.append(stack.enter_context(started(Client(address))))
                require_tokenmill(clients[0])
            return WorkerPool(clients[0], needs.resources, timeout=timeout)

        yield building_on(pool, needs.libraries)


@contextmanager
def calls_on_workers(settings: ClusterSettings, module: str) -> Generator[RunAll]:
    """A context that calls functions on one cluster, which starts with the first call, without Prefect's tasks.

    Workers need the same code as this process of the packages that `module` is made of.
    """
    pools: list[WorkerPool] = []
    with ExitStack() as stack:

        def run_all(name: str, function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]) -> list[Any]:
            if calls and not pools:
                pools.append(stack.enter_context(started(_pool(settings, len(calls)))))
            return [result for pool in pools for result in _results(pool, module, name, function, calls)]

        yield run_all


def _results(
    pool: WorkerPool, module: str, name: str, function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]
) -> list[Any]:
    client, planned = pool.client, built_with(module, ())
    require_tokenmill(client)
    require_same_there(planned, workers_built_with(client, module, planned))
    futures = [submitted(client.submit(_call, module, planned, function, call, pure=False)) for call in calls]
    return results_of(futures, name, pool.watch())


def _call(module: str, planned: Mapping[str, str], function: Callable[..., Any], call: Mapping[str, Any]) -> object:
    require_same_here(module, planned)
    return patiently(function, **call)


@contextmanager
def _pool(settings: ClusterSettings, calls: int) -> Generator[WorkerPool]:
    """The workers of a `cluster` setting; Prefect's task runner reaches or starts those that aren't local."""
    if settings.cluster == "local":
        with _cluster(local_size(calls, settings.workers), {}) as client:
            yield WorkerPool(client, {})
        return
    from .runner import task_runner  # noqa: PLC0415 - imports Prefect

    with task_runner(settings.cluster, settings.workers, {}) as runner:
        yield WorkerPool(runner.client, {}, adaptive=bool(runner.adapt_kwargs), timeout=settings.cluster_timeout)


@contextmanager
def _cluster(workers: int, resources: Mapping[str, float]) -> Generator[Client]:
    with local_cluster(**local_arguments(workers, resources)) as cluster, Client(cluster) as client:
        yield client
