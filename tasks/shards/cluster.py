"""Local clusters of Dask workers, and a run's requirements for the workers of any cluster.

A local cluster has single-threaded processes, one per core by default, and serves one run. TLS, timeouts and all other
options are in Dask's own configuration (DASK_DISTRIBUTED__…). Dask gives up on a worker whose network is cut after `distributed.comm.timeouts.tcp` (30 s), and a worker that hangs with open connections after one to two
times `distributed.scheduler.worker-ttl` (5 minutes); a different worker then builds its shards. Healthy workers on busy machines
can be silent for seconds, and four lost workers fail a batch, so keep both above 15 s.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from pkgutil import resolve_name
from types import TracebackType
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import dask
from dask import config  # pyright: ignore[reportPrivateImportUsage]
from distributed import Client, LocalCluster, Security
from distributed.comm.core import connect
from distributed.system import MEMORY_LIMIT
from tokenmill.tasks.console import log_errors_as_sentences, never_end_by_printing
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.runtime import cores

from . import code
from .code import require_same_there
from .executor import CALLED_WHILE_IMPORTED

# In workers, too: they import this module with their first task.
never_end_by_printing()
log_errors_as_sentences()

LOCAL: dict[str, Any] = {
    "threads_per_worker": 1,
    "dashboard_address": "127.0.0.1:0",  # any free port, so that two runs on one machine do not collide
    "preload": ["tokenmill.tasks.shards.executor"],
}

LOOPBACK = ("127.0.0.1", "localhost", "::1")

WORKER_BYTES = 400 << 20
"""Memory of a worker that encodes text."""

STARTS = 3
"""Attempts to start a local cluster whose workers die during startup."""

Entered = TypeVar("Entered")

# Only commands need plugins, which cannot start where workers import Prefect.
config.update_defaults({"distributed": {"nanny": {"environ": {"PREFECT_PLUGINS_ENABLED": "false"}}}})


class ClusterLostError(RunError):
    """The client of a cluster has ended, so the cluster cannot be closed either."""


@contextmanager
def started(cluster: AbstractContextManager[Entered]) -> Generator[Entered]:
    """A cluster, or a runner with one, which is closed at the end; workers of a lost cluster end with this process."""
    with ExitStack() as stack:
        entered = stack.enter_context(cluster)
        try:
            yield entered
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


def local_size(shards: int, wanted: int | None) -> int:
    """Workers of a local cluster: as many as `wanted` (None: one per core), but no more than shards, and than fit into memory."""
    return max(1, min(shards, wanted or cores(), MEMORY_LIMIT // WORKER_BYTES))


def grow(client: Client, workers: int) -> None:
    """Start further workers of a local cluster if a later step has more shards than the first."""
    cluster = cast("LocalCluster", client.cluster)
    if len(cluster.workers) < workers:
        cluster.scale(workers)


def local_arguments(workers: int | None, resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the arguments of a local cluster: its workers (None: one per core), each with the `resources`."""
    return {**LOCAL, "n_workers": workers or cores(), "resources": dict(resources)}


def local_cluster(**kwargs: Any) -> _Workers:  # noqa: ANN401 - the arguments of LocalCluster
    """Start a local cluster, and restart it if a worker is killed during startup.

    Raises InputError when the main script, which workers import, calls a flow at import time, and RunError when workers die
    during startup STARTS times in a row.
    """
    deaths: list[RuntimeError] = []
    # One worker may be killed by chance, such as a moment without memory; three in a row aren't.
    while len(deaths) < STARTS:
        # Processes inherit the blocked signals of the thread that starts them, so workers ignore Ctrl-C, which a terminal
        # sends to all processes: the run ends them itself.
        thread = ThreadPoolExecutor(1, initializer=_block_interrupts)
        start = thread.submit(_Workers, **kwargs)
        thread.shutdown(wait=False)
        try:
            return start.result()
        except KeyboardInterrupt:
            start.add_done_callback(lambda done: done.exception() or done.result().close())
            raise
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


def _block_interrupts() -> None:
    resource_tracker.ensure_running()  # it would start with the first process and unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _main_module_calls_a_flow() -> bool:
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    return process.exitcode == CALLED_WHILE_IMPORTED


def require_scheduler(address: str) -> None:
    """Raises InputError when no scheduler answers at an address within Dask's connection timeout, 30 s."""

    async def reach() -> None:
        comm = await connect(address, **cast("dict[str, Any]", Security().get_connection_args("client")))
        await comm.close()

    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop already
            thread.submit(asyncio.run, reach()).result()
    except (OSError, TypeError, ValueError) as error:  # no server, no certificates, or no address
        raise InputError(
            f"cluster: no Dask scheduler answers at {address} ({error}); start it with `dask scheduler`, check host "
            "and port; if it uses TLS, give a tls:// address and set the certificates in DASK_DISTRIBUTED__COMM__TLS__…"
        ) from error


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
    """Return whether a worker, as recorded by the scheduler, has enough of all `resources`."""
    return all(worker["resources"].get(name, 0) >= amount for name, amount in resources.items())


def require_tokenmill(client: Client) -> None:
    """Raises InputError for workers that lack tokenmill, or have one without the check of its code.

    Nothing of tokenmill is sent: a worker process without it would end by the first message.
    """
    if client.status == "running":  # without a scheduler, workers cannot be asked
        answers = cast("dict[str, object]", client.run(resolve_name, f"{code.__name__}:DIGESTS", on_error="return"))
        version = code.built_with(__name__, ())
        require_same_there(
            version, {one: each if isinstance(each, Exception) else version for one, each in answers.items()}
        )


def workers_built_with(client: Client, module: str, libraries: Iterable[str]) -> dict[str, object]:
    """Return each worker's code for a step of the `module` (see `built_with`), by address, or the exception that it raised."""
    if client.status != "running":
        return {}
    return cast("dict[str, object]", client.run(code.built_with, module, tuple(libraries), on_error="return"))


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
