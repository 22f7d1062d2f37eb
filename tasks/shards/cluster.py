"""Where Dask runs, and how workers report progress.

`local` starts one single-threaded process per core, for this run only. An address (`tcp://…`, `tls://…`) uses a
running cluster. A YAML file is a profile: the arguments of Prefect's DaskTaskRunner, so that any cluster class
(Slurm, SSH, Kubernetes) is a few lines of data:

    cluster_class: dask_jobqueue.SLURMCluster
    cluster_kwargs: {cores: 32, processes: 32, memory: 128GB, queue: cpu}
    adapt_kwargs: {minimum: 1, maximum: 20}

TLS, timeouts and all other options come from Dask's own configuration (DASK_DISTRIBUTED__…). Dask gives up on a worker whose
network is cut after `distributed.comm.timeouts.tcp` (30 s), and a worker that hangs with open connections after one to two
times `distributed.scheduler.worker-ttl` (5 minutes); another worker then builds its shards. Healthy workers on busy machines
can be silent for seconds, and four lost workers fail a batch, so keep both above 15 s.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any, cast
from urllib.parse import urlsplit

import dask
import yaml
from dask import config  # pyright: ignore[reportPrivateImportUsage]
from distributed import Client, LocalCluster, Security
from distributed.comm.core import connect
from prefect_dask.task_runners import DaskTaskRunner
from pydantic import Field
from tokenmill.tasks.console import log_errors_as_sentences, never_end_by_printing
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.strict import Strict, parse
from tokenmill.tasks.threads import cores

# In workers, too: they import this module with their first task.
never_end_by_printing()
log_errors_as_sentences()

LOCAL: dict[str, Any] = {
    "threads_per_worker": 1,
    "dashboard_address": "127.0.0.1:0",  # any free port, so that two runs on one machine do not collide
}

LOOPBACK = ("127.0.0.1", "localhost", "::1")

STARTS = 3
"""Attempts to start a local cluster whose workers die during startup."""

CALLED_WHILE_IMPORTED = 99
"""Exit code of a worker whose imported main script calls a flow at import time."""

# Only commands need plugins, which cannot start where workers import Prefect.
config.update_defaults({"distributed": {"nanny": {"environ": {"PREFECT_PLUGINS_ENABLED": "false"}}}})


class ClusterLostError(RunError):
    """The client of a cluster has ended, so the cluster cannot be closed either."""


class Profile(Strict, frozen=True):
    """Arguments of Prefect's DaskTaskRunner, from a YAML file."""

    address: str | None = None
    cluster_class: str | None = None
    cluster_kwargs: dict[str, Any] = Field(default_factory=dict)
    adapt_kwargs: dict[str, Any] = Field(default_factory=dict)
    client_kwargs: dict[str, Any] = Field(default_factory=dict)
    performance_report_path: str | None = None


def task_runner(cluster: str, workers: int | None, resources: Mapping[str, float]) -> DaskTaskRunner:
    """The Prefect task runner for a `cluster` setting; each worker of a local cluster has the `resources`.

    Raises InputError for a profile that cannot be used, and for an address where no scheduler answers.
    """
    if cluster == "local":
        chosen = {**LOCAL, "n_workers": workers or cores(), "resources": dict(resources)}
        return DaskTaskRunner(cluster_class=local_cluster, cluster_kwargs=chosen)
    if "://" in cluster:
        return _running(Profile(address=cluster))
    return _named(Path(cluster))


@contextmanager
def started(runner: DaskTaskRunner) -> Generator[DaskTaskRunner]:
    """The runner with its cluster, which is closed at the end; workers of a lost cluster end with this process."""
    with ExitStack() as stack:
        stack.enter_context(runner)
        try:
            yield runner
        except ClusterLostError:
            stack.pop_all()
            raise


class _Workers(LocalCluster):
    """A local cluster that does not wait for its workers when the run is interrupted."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the cluster. Ctrl-C and SIGTERM kill the workers; the next run rebuilds their unfinished shards."""
        if kind is not None and not issubclass(kind, Exception):
            for nanny in self.workers.values():
                nanny.close_gracefully()  # no new worker starts
                if nanny.pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(nanny.pid, signal.SIGKILL)
        super().__exit__(kind, error, trace)


def local_cluster(**kwargs: Any) -> _Workers:  # noqa: ANN401 - the arguments of LocalCluster
    """Start a local cluster, and restart it if a worker is killed during startup.

    Raises InputError when the main script, which workers import, calls a flow at import time, and RunError when workers die
    during startup STARTS times in a row.
    """
    deaths: list[RuntimeError] = []
    while len(deaths) < STARTS:
        try:
            return _start(kwargs)
        except RuntimeError as error:
            if _main_module_calls_a_flow():
                raise InputError(
                    f"{sys.argv[0]}: the script calls a flow when it is imported, and each worker imports it; put the call "
                    'under `if __name__ == "__main__":`'
                ) from None
            deaths.append(error)
    raise RunError(
        f"Dask workers died during startup {STARTS} times in a row ({deaths[-1].__cause__ or deaths[-1]}); give them "
        "more memory, or reduce workers"
    ) from deaths[-1]


def _start(arguments: Mapping[str, Any]) -> _Workers:
    """Start workers that ignore Ctrl-C, which a terminal sends to all processes: the run ends them itself.

    Processes inherit the blocked signals of the thread that starts them.
    """
    thread = ThreadPoolExecutor(1, initializer=_block_interrupts)
    start = thread.submit(_Workers, **arguments)
    thread.shutdown(wait=False)
    try:
        return start.result()
    except KeyboardInterrupt:
        start.add_done_callback(_close)
        raise


def _close(start: "Future[_Workers]") -> None:
    if start.exception() is None:
        start.result().close()


def _block_interrupts() -> None:
    resource_tracker.ensure_running()  # it would start with the first process and unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _main_module_calls_a_flow() -> bool:
    """Whether importing this process's main module, as a worker does, calls a flow."""
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    return process.exitcode == CALLED_WHILE_IMPORTED


def _running(profile: Profile) -> DaskTaskRunner:
    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop already
        thread.submit(asyncio.run, _reach(str(profile.address))).result()
    return DaskTaskRunner(**profile.model_dump())


async def _reach(address: str) -> None:
    """Connect to the scheduler. Raises InputError when it does not answer within Dask's connection timeout, 30 s."""
    try:
        comm = await connect(address, **cast("dict[str, Any]", Security().get_connection_args("client")))
    except (OSError, TypeError, ValueError) as error:  # no server, no certificates, or no address
        raise InputError(
            f"cluster: no Dask scheduler answers at {address} ({error}); start it with `dask scheduler`, check host "
            "and port; if it uses TLS, give a tls:// address and set the certificates in DASK_DISTRIBUTED__COMM__TLS__…"
        ) from error
    await comm.close()


def _named(path: Path) -> DaskTaskRunner:
    profile = _profile(path)
    if profile.address:
        return _running(profile)
    package = str(profile.cluster_class).split(".", maxsplit=1)[0].replace("_", "-")
    if profile.cluster_class == "distributed.SSHCluster" and not find_spec("asyncssh"):  # imported when it is used
        raise _not_installed(path, profile, "asyncssh", "it needs asyncssh")
    try:
        with _keeping_ctrl_c():
            return DaskTaskRunner(**profile.model_dump())
    except (ImportError, AttributeError) as error:
        raise _not_installed(path, profile, package, str(error)) from error


@contextmanager
def _keeping_ctrl_c() -> Generator[None]:
    """Restore the Ctrl-C handler that importing a package replaced: dask_jobqueue's exits with code 0."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def _not_installed(path: Path, profile: Profile, package: str, why: str) -> InputError:
    return InputError(
        f"cluster: {path}: cluster_class {profile.cluster_class!r} cannot be used ({why}); check its name, or install "
        f"its package: pip install {package}"
    )


def _profile(path: Path) -> Profile:
    if not path.is_file():
        raise InputError(f"cluster: {str(path)!r} is not 'local', a scheduler address or an existing YAML profile")
    try:
        written = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise InputError(f"cluster: {path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(written, dict):
        raise InputError(f"cluster: {path} must hold a mapping of DaskTaskRunner arguments")
    profile = parse(Profile, cast("dict[str, Any]", written), f"cluster: {path}")
    if bool(profile.address) == bool(profile.cluster_class):
        raise InputError(f"cluster: {path}: name either a cluster_class, which is started for the run, or an address")
    return profile


def slots(client: Client, most_workers: int = 0) -> int:
    """Tasks that the cluster runs at once, with its current workers or the `most_workers` it may grow to."""
    threads = cast("dict[str, int]", client.nthreads())
    return max(1, sum(threads.values()), most_workers)


@contextmanager
def asking_for(client: Client, resources: Mapping[str, float]) -> Generator[None]:
    """Within this context, submitted tasks run on workers that have `resources`, one task per worker at a time.

    Raises InputError if there are workers and none declares the resources: the tasks would wait forever.
    """
    known = cast("Mapping[str, Any]", client.scheduler_info()["workers"]).values()
    if known and not any(declares(worker, resources) for worker in known):
        wanted = listed(resources)
        raise InputError(
            f"cluster: none of its {len(known)} workers has the resources {wanted}; start them as "
            f"`CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS --nthreads 1 --resources {wanted} --name gpu-0` (0, 1, … one per "
            "GPU), or name them in the profile"
        )
    with dask.annotate(**({"resources": dict(resources)} if resources else {})):  # pyright: ignore[reportPrivateImportUsage]
        yield


def listed(resources: Mapping[str, float]) -> str:
    """Resources as `dask worker --resources` takes them."""
    return ",".join(f"{name}={amount:g}" for name, amount in resources.items())


def declares(worker: Mapping[str, Any], resources: Mapping[str, float]) -> bool:
    """Whether a worker, as recorded by the scheduler, has enough of all `resources`."""
    return all(worker["resources"].get(name, 0) >= amount for name, amount in resources.items())


def require_reached(client: Client, server: str) -> None:
    """Raises InputError if the Prefect `server` has a local address and workers on other machines cannot reach it.

    Workers report each task to the server; without it, their tasks would fail one by one, half a minute later.
    """
    place = urlsplit(server)
    if place.hostname not in LOOPBACK or client.status != "running":  # without a scheduler, workers cannot be asked
        return
    answers = cast("dict[str, bool]", client.run(_reaches, place.hostname, place.port, on_error="ignore"))
    cut_off = [worker for worker, reached in answers.items() if not reached]
    if cut_off:
        raise InputError(
            f"PREFECT_API_URL: {len(cut_off)} of {len(answers)} workers, {cut_off[0]} among them, cannot reach a Prefect "
            f"server at {server}, an address local to each machine; start one with `prefect server start --host` and "
            "an address that they can reach, and set PREFECT_API_URL to it"
        )


def _reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def listen(client: Client, topic: str, handle: Callable[[dict[str, Any]], None]) -> None:
    """Call `handle` with each record that a worker announces under `topic`, from the client's own thread."""
    client.subscribe_topic(topic, lambda event: handle(event[1]))
