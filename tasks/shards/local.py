"""Build shards on worker processes of this machine, for a run that no Prefect server shows.

Batches, retries, receipts and errors are as in Prefect. But these workers import no Prefect, and start in 1 CPU-second
instead of 2.3, and there are no more of them than shards.
"""

import random
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

from distributed import Client, Future, LocalCluster
from tokenmill.tasks.threads import cores

from .build import build_batch, may_pass
from .cluster import local_arguments, local_cluster, started
from .pool import Pool, Submitted, building_on
from .preparation import BuildShards, Needs, Step
from .progress import say
from .store import Store
from .worker import announce

RETRY_SECONDS = (2.0, 4.0, 8.0)
"""Average waits before a batch is tried again."""


@contextmanager
def local_workers(needs: Needs) -> Generator[BuildShards]:
    """A context that builds shards on one cluster for all steps of a run; the cluster starts with the first shard to build."""
    most = needs.workers or cores()
    clients: list[Client] = []
    with ExitStack() as stack:

        def pool(shards: int) -> Pool:
            workers = min(shards, most)
            if not clients:
                clients.append(stack.enter_context(started(_cluster(workers, needs.resources))))
            (client,) = clients
            _grow(client, workers)
            return Pool(client, needs.resources, False, workers, partial(_submit, client), lambda _: _unseen, say, _unseen)

        yield building_on(pool)


@contextmanager
def _cluster(workers: int, resources: Mapping[str, float]) -> Generator[Client]:
    with local_cluster(**local_arguments(workers, resources)) as cluster, Client(cluster) as client:
        yield client


def _grow(client: Client, workers: int) -> None:
    """Start further workers if a later step has more shards than the first."""
    cluster = cast("LocalCluster", client.cluster)
    if len(cluster.workers) < workers:
        cluster.scale(workers)


def _unseen(_: object) -> None:
    """Nobody reads the log of this run, or its bar on a server."""


def _submit(client: Client, _name: str, _number: int, keywords: Mapping[str, Any]) -> Submitted:
    future: Future[Any] = client.submit(_build_batch, **keywords, pure=False)
    return Submitted(future, partial(_failure, future))


def _failure(future: "Future[Any]") -> str | None:
    error = future.exception()
    return None if error is None else f"{type(error).__name__}: {error}"


def _build_batch(
    batch: Sequence[Mapping[str, Any]],
    topic: str,
    step: Step,
    store: Store,
    arguments: Mapping[str, Any],
    *,
    rebuild: bool,
) -> None:
    """Build shards without a receipt, report each to the run, and try again after errors that may pass."""
    build = partial(build_batch, batch, store, step.building(arguments), partial(announce, topic), rebuild=rebuild)
    for seconds in RETRY_SECONDS:
        try:
            build()
        except OSError as error:
            if not may_pass(error):
                raise
            time.sleep(seconds * random.uniform(0.5, 1.5))  # noqa: S311 - keeps workers from trying all at once
        else:
            return
    build()
