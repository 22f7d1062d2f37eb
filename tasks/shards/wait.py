"""Wait for batches on Dask until all have ended, or until no worker can build the rest.

A Dask client is silent when its own thread ends, when the scheduler hangs with open connections, or when no worker
is left. So this checks the cluster every CHECK_SECONDS, and fails when it is lost. Without a worker, it reports every
ASK_SECONDS why the run waits.

A cluster started for a run asks a queue or Kubernetes for machines, and Dask doesn't report the answer. So a run without workers asks
itself (`waiting_for`), and ends if workers will never start: the queue rejects the jobs, holds them for a reason that waiting won't
fix, or jobs end before their workers join.

The wait ends after the setting `cluster_timeout`. Its default is a minute for a cluster that this run has started here or over
SSH, ten minutes for one that others have started, and no limit for Slurm or Kubernetes, where jobs may queue for days.
"""

import getpass
import math
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from distributed import LocalCluster, SpecCluster, Status
from distributed.deploy.spec import ProcessInterface
from httpx import HTTPError
from tokenmill.tasks.errors import RunError

from .cluster import ClusterLostError, declares, listed

KEPT = "finished shards are kept: run the same command again to continue"

ANSWER_SECONDS = 30
"""How long a check waits for a busy scheduler, or a command of Slurm."""

CURES = {
    "PartitionTimeLimit": "lower walltime to what `sinfo` shows for the partition",
    "PartitionNodeLimit": "ask for fewer nodes",
    "PartitionConfig": "lower cores and memory to fit a node of the partition (`sinfo --Node --long`)",
    "BadConstraints": "lower cores and memory, or remove a constraint",
    "InvalidAccount": "set account to one of `sacctmgr show associations user=$USER`",
    "InvalidQOS": "correct --qos in job_extra_directives",
    "AccountNotAllowed": "choose an account that the partition allows",
    "QOSNotAllowed": "choose a QOS that the partition allows",
    "AssocMaxWallDurationPerJobLimit": "lower walltime",
    "QOSMaxWallDurationPerJobLimit": "lower walltime",
    "AssocMaxCpuPerJobLimit": "lower cores",
    "QOSMaxCpuPerJobLimit": "lower cores",
    "AssocMaxMemPerJob": "lower memory",
    "QOSMaxMemoryPerJob": "lower memory",
}
"""Reasons for which Slurm never starts a pending job, and what cures them (`man squeue`, "Job reason codes")."""

LIVE = {
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "RESIZING", "SIGNALING", "SUSPENDED", "STOPPED",
    "UNKNOWN",
}  # fmt: skip
"""States of Slurm jobs that may not have ended."""

CLUSTER = "dask.org/cluster-name"
"""The label of the pods of a cluster."""

BROKEN_PODS = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff",
}  # fmt: skip
"""Reasons for which a container of a scheduled pod does not start."""


def job_queue(cluster: type[Any]) -> type[Any]:
    """Return a dask-jobqueue cluster class that notes rejections, and scales jobs with several workers.

    Otherwise Dask prints a traceback for a rejected job and waits for its workers; and if a job has several workers, it
    submits a job per worker, cancels jobs before they start, and never replaces one that has ended
    (dask-jobqueue issues 498 and 611).
    """

    class NotingJob(cluster.job_cls):
        async def start(self) -> None:
            try:
                await super().start()
            except (OSError, RuntimeError) as error:  # the command is missing, or ends with an error
                printed = str(error).rpartition("stderr:\n")[2].strip() or str(
                    error
                )  # dask-jobqueue puts it at the end
                refusals.append("; ".join(line.strip() for line in printed.splitlines() if line.strip()))
                await ProcessInterface.start(self)

    class Jobs(cluster):
        job_cls = NotingJob

        def scale_up(self, n: int) -> object:
            return self.scale(n)

        async def scale_down(self, workers: Collection[str]) -> None:
            """End the jobs all of whose workers are to end."""
            groups = {
                job: {job + member for member in spec.get("group", [""])} for job, spec in self.worker_spec.items()
            }
            await super().scale_down([job for job, members in groups.items() if members <= set(workers)])

    refusals: list[str] = []
    Jobs.refusals = refusals
    return Jobs


class Queue(Protocol):
    """What starts the workers of a run's cluster."""

    def replace_ended(self) -> None:
        """Called while there are workers: ask again for those that have ended."""
        ...

    def waiting_for(self) -> str:
        """Return the reason for the wait until the first worker starts. Raises RunError if workers will never start."""
        ...


class JobQueue:
    """The jobs of a cluster of dask-jobqueue. Slurm is asked for states and reasons, others only for rejected jobs."""

    def __init__(self, cluster: Any) -> None:  # noqa: ANN401 - dask_jobqueue is not typed, nor always installed
        self._cluster = cluster
        self._command = str(cluster.job_cls.submit_command)
        self._lost: list[str] = []

    def replace_ended(self) -> None:
        self._lost.clear()
        self._cluster.refusals.clear()  # such as for a limit on jobs; those that run are enough
        self._replace(self._jobs()[1])

    def waiting_for(self) -> str:
        if self._cluster.refusals:
            raise RunError(
                f"{self._command} rejects worker jobs: {self._cluster.refusals[-1]}; correct queue, account, "
                f"walltime, cores or memory in the profile; {KEPT}"
            )
        live, ended = self._jobs()
        hopeless = {job: reason for job, (_, reason) in live.items() if reason in CURES}
        if live and hopeless.keys() == live.keys():
            job, reason = next(iter(hopeless.items()))
            raise RunError(f"Slurm will not start job {job} ({reason}); {CURES[reason]}; {KEPT}")
        if ended and self._lost:
            raise RunError(f"jobs end before their workers join: {_end_of(ended[-1])}; {KEPT}")
        self._lost += ended
        self._replace(ended)
        counts = Counter(f"{state} ({reason})" if reason != "None" else state for state, reason in live.values())
        states = [f"{count:,} {which}" for which, count in counts.items()]
        return f"its jobs: {', '.join(states) or 'none submitted yet'}"

    def _jobs(self) -> tuple[dict[str, tuple[str, str]], list[str]]:
        """State and reason of each job that has not ended, and the jobs that have."""
        jobs = [str(job.job_id) for job in list(self._cluster.workers.values()) if job.job_id]
        if self._command != "sbatch" or not jobs:
            return dict.fromkeys(jobs, ("submitted", "None")), []
        told = slurm_jobs(jobs)
        live = {job: which for job, which in told.items() if which[0] in LIVE}
        return live, [job for job in jobs if job not in live]

    def _replace(self, ended: Collection[str]) -> None:
        if not ended:
            return
        cluster, wanted = self._cluster, len(self._cluster.worker_spec)

        async def forget() -> None:
            for name in [name for name, job in cluster.workers.items() if str(job.job_id) in ended]:
                cluster.worker_spec.pop(name, None)
                cluster.workers.pop(name)

        cluster.sync(forget)
        cluster.scale(jobs=wanted)


class PodQueue:
    """The pods of a cluster of dask-kubernetes, whose operator replaces them."""

    def __init__(self, cluster: Any) -> None:  # noqa: ANN401 - dask_kubernetes is not always installed
        self._name, self._namespace = str(cluster.name), str(cluster.namespace)

    def replace_ended(self) -> None:
        """See Queue."""

    def waiting_for(self) -> str:
        import kr8s  # dask-kubernetes needs it

        label = f"{CLUSTER}={self._name}"
        try:
            pods = list(cast("Iterable[Any]", kr8s.get("pods", namespace=self._namespace, label_selector=label)))
        except (HTTPError, kr8s.ServerError, kr8s.APITimeoutError) as error:
            return f"its pods are not known: {error}"
        told = [(str(pod.name), *pod_state(pod.raw)) for pod in pods]
        for name, reason, words in told:
            if reason in BROKEN_PODS:
                raise RunError(
                    f"Kubernetes cannot start pod {name} ({reason}: {words}); correct image, command or secrets in the "
                    f"profile; {KEPT}"
                )
        counts = Counter(f"{reason} ({words})" if words else reason for _, reason, words in told)
        return f"its pods: {', '.join(f'{count:,} {which}' for which, count in counts.items()) or 'none created yet'}"


def pod_state(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Why a pod is not ready, and the message of Kubernetes: a container's state, a condition, or its phase."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses", []):
        if waiting := container.get("state", {}).get("waiting"):
            return waiting.get("reason", "Waiting"), waiting.get("message", "")
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", "Pending"), condition.get("message", "")
    return status.get("phase", "Pending"), ""


def slurm_jobs(jobs: Collection[str]) -> dict[str, tuple[str, str]]:
    """State and reason of each job: GONE if Slurm has forgotten it, as it does minutes after the end; UNKNOWN if it is silent."""
    asked = _asked("squeue", f"--user={getpass.getuser()}", "--noheader", "--states=all", "--format=%i|%T|%r")
    if asked.returncode:
        return dict.fromkeys(jobs, ("UNKNOWN", " ".join(asked.stderr.split())))
    told = {job: (state, reason) for job, state, reason in (line.split("|", 2) for line in asked.stdout.splitlines())}
    return {job: told.get(job, ("GONE", "None")) for job in jobs}


def _end_of(job: str) -> str:
    """How a job ended: its state, and the last line of its output, if Slurm still knows them."""
    known: dict[str, str] = {}
    for word in _asked("scontrol", "show", "job", job).stdout.split():
        key, _, value = word.partition("=")
        known[key] = value
    path = known.get("StdErr", "").replace("%J", job).replace("%j", job)  # some versions show the pattern
    try:
        lines = Path(path).read_text("utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "(nothing)")
    except OSError as error:
        last = f"({error.strerror})"
    return f"job {job} is {known.get('JobState', 'gone')}, and its output {path} ends with: {last}"


def _asked(*command: str) -> subprocess.CompletedProcess[str]:
    """Return the output of a Slurm command. A controller that doesn't answer isn't a reason to end a run."""
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=ANSWER_SECONDS)  # noqa: S603 - ours
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]}: no answer for {ANSWER_SECONDS} s")


CHECK_SECONDS = 5.0

ASK_SECONDS = 30.0

SILENT_SECONDS = 300.0
"""How long a scheduler may be silent: as long as its workers (`worker-ttl`)."""

STARTED_SECONDS, STANDING_SECONDS = 60.0, 600.0

ALIVE = {Status.undefined, Status.created, Status.init, Status.starting, Status.running, Status.paused}


@dataclass
class ClusterWatch:
    """Watches the cluster of a run; an `adaptive` cluster starts and stops workers as needed.

    Announces that the run waits for a worker with the `resources`, for at most `timeout` seconds (None: as in
    the module docstring).
    """

    client: Any  # a distributed.Client, which is barely typed
    resources: Mapping[str, float]
    adaptive: bool
    tell: Callable[[str], None]
    timeout: float | None = None
    _queue: Queue | None = field(default=None, init=False)
    _checked: float = field(default_factory=time.monotonic, init=False)
    _answered: float = field(default_factory=time.monotonic, init=False)
    _staffed: float = field(default_factory=time.monotonic, init=False)
    _asked: float = field(default=-math.inf, init=False)
    _began: float = field(default_factory=time.time, init=False)

    def __post_init__(self) -> None:
        cluster = self.client.cluster
        if hasattr(cluster, "refusals"):
            self._queue = JobQueue(cluster)
        elif type(cluster).__name__ == "KubeCluster":
            self._queue = PodQueue(cluster)

    def check(self) -> None:
        """Check the cluster, at most once in CHECK_SECONDS.

        Raises RunError when the scheduler does not answer, or there has been no suitable worker for too long, and
        ClusterLostError when the client has ended.
        """
        if time.monotonic() - self._checked < CHECK_SECONDS:
            return
        client = self.client
        if client.status not in {"running", "connecting"} or client.loop.asyncio_loop.is_closed():
            raise ClusterLostError(f"the connection to the Dask cluster of this run is lost; {KEPT}")
        address, workers = str(client.scheduler.address), None
        with suppress(OSError):  # a TimeoutError is one
            workers = client.sync(client.scheduler.identity, n_workers=-1, callback_timeout=ANSWER_SECONDS)["workers"]
        self._checked = time.monotonic()
        if workers is None:
            silent = self._checked - self._answered
            if silent > SILENT_SECONDS:
                raise RunError(f"the Dask scheduler at {address} has not answered for {silent:,.0f} s; {KEPT}")
            return
        self._answered = self._checked
        asks = self._checked - self._asked >= ASK_SECONDS
        self._asked = self._checked if asks else self._asked
        if any(declares(worker, self.resources) for worker in workers.values()):
            self._staffed = self._checked
            if asks and self._queue:
                self._queue.replace_ended()
            return
        cluster, waited = client.cluster, self._checked - self._staffed
        alive = isinstance(cluster, LocalCluster) and any(each.status in ALIVE for each in cluster.workers.values())
        if isinstance(cluster, LocalCluster) and not self.adaptive and not alive:
            raise RunError(f"all Dask workers of this run have ended; {KEPT}")
        wanted = f"a worker with the resources {listed(self.resources)}" if self.resources else "a worker"
        if waited > self._patience:
            raise RunError(
                f"the Dask cluster at {address} has not had {wanted} for {waited:,.0f} s{self._ended()}; {KEPT} "
                "once it has workers, or allow more seconds with cluster_timeout"
            )
        if asks:
            limit = f" up to {self._patience:,.0f} s" if math.isfinite(self._patience) else ""
            state = f"; {self._queue.waiting_for()}" if self._queue else ""
            self.tell(f"waiting{limit} for {wanted} of the Dask cluster at {address}{state}{self._ended()}")

    def _ended(self) -> str:
        """How many workers have joined since the run began, and are gone: one without tokenmill ends with its first batch."""
        events = cast("Sequence[tuple[float, Mapping[str, Any]]]", self.client.get_events("all"))
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
        cluster = self.client.cluster
        if self.timeout is not None:
            return self.timeout
        if cluster is None:
            return STANDING_SECONDS
        started_here = isinstance(cluster, LocalCluster) or type(cluster) is SpecCluster  # the latter by SSHCluster
        return STARTED_SECONDS if started_here else math.inf
