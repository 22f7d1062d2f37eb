"""Wait for batches on Dask until all have ended, or until no worker can build the rest.

A Dask client is silent when its own thread ends, when the scheduler hangs with open connections, or when no worker
is left. So this checks the cluster every CHECK_SECONDS, and fails when it is lost. Without a worker, it reports every
ASK_SECONDS why the run waits.

The wait ends after the setting `cluster_timeout`. Its default is a minute for a cluster that this run has started here or over
SSH, ten minutes for one that others have started, and no limit for Slurm or Kubernetes, where jobs may queue for days.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from distributed import Client, LocalCluster, SpecCluster, Status
from tokenmill.tasks.errors import RunError

from .cluster import ClusterLostError, declares, listed
from .queues import KEPT, Queue, queue_of

CHECK_SECONDS = 5.0

ASK_SECONDS = 30.0

ANSWER_SECONDS = 30.0
"""How long a check waits for a busy scheduler."""

SILENT_SECONDS = 300.0
"""How long a scheduler may be silent: as long as its workers (`worker-ttl`)."""

STARTED_SECONDS, STANDING_SECONDS = 60.0, 600.0

ALIVE = {Status.undefined, Status.created, Status.init, Status.starting, Status.running, Status.paused}


@dataclass
class ClusterWatch:
    """Watches the cluster of a run; an `adaptive` cluster starts and stops workers as needed.

    Calls `tell` with a sentence while the run waits for a worker with the `resources`, for at most `timeout` seconds (None: as in
    the module docstring).
    """

    client: Client
    resources: Mapping[str, float]
    adaptive: bool
    tell: Callable[[str], None]
    timeout: float | None = None
    _queue: Queue | None = field(init=False)
    _checked: float = field(default_factory=time.monotonic, init=False)
    _answered: float = field(default_factory=time.monotonic, init=False)
    _staffed: float = field(default_factory=time.monotonic, init=False)
    _asked: float = field(default=-math.inf, init=False)
    _began: float = field(default_factory=time.time, init=False)

    def __post_init__(self) -> None:
        self._queue = queue_of(self._client.cluster)

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
        staffed = any(declares(worker, self.resources) for worker in workers.values())
        if staffed:
            self._staffed = self._checked
        else:
            self._require_future_workers()
        if self._checked - self._asked >= ASK_SECONDS:
            self._asked = self._checked
            self._ask(staffed=staffed)

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
        cluster, waited = self._client.cluster, self._checked - self._staffed
        if isinstance(cluster, LocalCluster) and not self.adaptive and not _can_restart(cluster):
            raise RunError(f"all Dask workers of this run have ended; {KEPT}")
        if waited > self._patience:
            raise RunError(
                f"the Dask cluster at {self._address} has not had {self._wanted} for {waited:,.0f} s{self._ended()}; {KEPT} "
                "once it has workers, or allow more seconds with cluster_timeout"
            )

    def _ask(self, *, staffed: bool) -> None:
        """Report why the run waits. Raises RunError if workers will never start."""
        if staffed and self._queue:
            self._queue.replace_ended()
        elif not staffed:
            limit = f" up to {self._patience:,.0f} s" if math.isfinite(self._patience) else ""
            state = f"; {self._queue.waiting_for()}" if self._queue else ""
            self.tell(f"waiting{limit} for {self._wanted} of the Dask cluster at {self._address}{state}{self._ended()}")

    def _ended(self) -> str:
        """How many workers have joined since the run began, and are gone: one without tokenmill ends with its first batch."""
        events = cast("Sequence[tuple[float, Mapping[str, Any]]]", self._client.get_events("all"))
        joined = [
            event["worker"] for time, event in events if time > self._began and event.get("action") == "add-worker"
        ]
        if not joined:
            return ""
        hosts = ", ".join(sorted({str(urlsplit(worker).hostname) for worker in joined}))
        count = f"{len(joined)} workers have" if len(joined) > 1 else "1 worker has"
        return f"; {count} joined, on {hosts}, and ended: the log there shows why, for example that tokenmill is not installed"

    @property
    def _patience(self) -> float:
        """Seconds to wait for a worker."""
        cluster = self._client.cluster
        if self.timeout is not None:
            return self.timeout
        if cluster is None:
            return STANDING_SECONDS
        started_here = isinstance(cluster, LocalCluster) or type(cluster) is SpecCluster  # the latter by SSHCluster
        return STARTED_SECONDS if started_here else math.inf

    @property
    def _wanted(self) -> str:
        return f"a worker with the resources {listed(self.resources)}" if self.resources else "a worker"

    @property
    def _address(self) -> str:
        return str(self._client.scheduler.address)


def _can_restart(cluster: LocalCluster) -> bool:
    """Whether any worker, or a nanny that restarts one, is alive."""
    return any(worker.status in ALIVE for worker in cluster.workers.values())
