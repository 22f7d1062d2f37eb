"""Wait for batches on Dask until all have ended, or until no worker can build the rest.

A Dask client reports nothing when its own thread ends, when the scheduler hangs with open connections, or when no worker
is left. So this checks the cluster every CHECK_SECONDS, and fails when it is lost.

Dask's setting `distributed.scheduler.no-workers-timeout` limits the wait for a worker. Without it the limit is ten
minutes, or a day on a cluster started for the run on other machines, whose jobs may queue.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from dask import config  # pyright: ignore[reportPrivateImportUsage]
from dask.utils import parse_timedelta
from distributed import Client, LocalCluster, Status
from tokenmill.tasks.errors import RunError

from .cluster import ClusterLostError, declares, listed

CHECK_SECONDS = 5.0

ANSWER_SECONDS = 30.0
"""How long a check waits for a busy scheduler."""

SILENT_SECONDS = 300.0
"""How long a scheduler may be silent: as long as its workers (`worker-ttl`)."""

LONGEST_SECONDS, QUEUE_SECONDS = 600.0, 86_400.0

ALIVE = {Status.undefined, Status.created, Status.init, Status.starting, Status.running, Status.paused}

KEPT = "finished shards are kept: run the same command again to continue"


@dataclass
class ClusterWatch:
    """Watches the cluster of a run; an `adaptive` cluster starts and stops workers as needed.

    Calls `tell` with a sentence when the run begins to wait for a worker with the `resources`.
    """

    client: Client
    resources: Mapping[str, float]
    adaptive: bool
    tell: Callable[[str], None]
    _checked: float = field(default_factory=time.monotonic, init=False)
    _answered: float = field(default_factory=time.monotonic, init=False)
    _staffed: float = field(default_factory=time.monotonic, init=False)
    _announced: bool = field(default=False, init=False)

    def check(self) -> None:
        """Check the cluster, at most once in CHECK_SECONDS.

        Raises RunError when the scheduler does not answer, or there has been no suitable worker for too long, and
        ClusterLostError when the client has ended.
        """
        if time.monotonic() - self._checked < CHECK_SECONDS:
            return
        self._require_client()
        workers = self._workers()
        self._checked = time.monotonic()
        if workers is None:
            self._require_answer()
            return
        self._answered = self._checked
        if any(declares(worker, self.resources) for worker in workers.values()):
            self._staffed, self._announced = self._checked, False
            return
        self._require_future_workers()

    @property
    def _client(self) -> Any:  # noqa: ANN401 - distributed is barely typed
        return self.client

    def _require_client(self) -> None:
        if self._client.status not in {"running", "connecting"} or self._client.loop.asyncio_loop.is_closed():
            raise ClusterLostError(f"the connection to the Dask cluster of this run is lost; {KEPT}")

    def _workers(self) -> Mapping[str, Any] | None:
        """The scheduler's record of each worker, or None when it does not answer."""
        try:
            identity = self._client.sync(self._client.scheduler.identity, n_workers=-1, callback_timeout=ANSWER_SECONDS)
        except OSError:  # a TimeoutError is one
            return None
        return cast("Mapping[str, Any]", identity["workers"])

    def _require_answer(self) -> None:
        silent = time.monotonic() - self._answered
        if silent > SILENT_SECONDS:
            raise RunError(
                f"the Dask scheduler at {self._client.scheduler.address} has not answered for {silent:,.0f} s; {KEPT}"
            )

    def _require_future_workers(self) -> None:
        cluster, address = self._client.cluster, self._client.scheduler.address
        wanted = f"a worker with the resources {listed(self.resources)}" if self.resources else "a worker"
        if isinstance(cluster, LocalCluster) and not self.adaptive and not _can_restart(cluster):
            raise RunError(f"all Dask workers of this run have ended; {KEPT}")
        queued = cluster is not None and not isinstance(cluster, LocalCluster)
        patience, waited = _patience(queued=queued), self._checked - self._staffed
        if waited > patience:
            raise RunError(
                f"the Dask cluster at {address} has not had {wanted} for {waited:,.0f} s; {KEPT} once it has workers, "
                "or allow more time: DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT=2h"
            )
        if not self._announced:
            self.tell(f"waiting up to {patience:,.0f} s for {wanted} of the Dask cluster at {address}")
            self._announced = True


def _can_restart(cluster: LocalCluster) -> bool:
    """Whether any worker, or a nanny that restarts one, is alive."""
    return any(worker.status in ALIVE for worker in cluster.workers.values())


def _patience(*, queued: bool) -> float:
    """Seconds to wait for a worker."""
    chosen = config.get("distributed.scheduler.no-workers-timeout", None)
    return parse_timedelta(chosen) if chosen else QUEUE_SECONDS if queued else LONGEST_SECONDS
