"""The task runner of Prefect for a `cluster` setting.

`local` starts one single-threaded process per core, for this run only. An address (`tcp://…`, `tls://…`) uses a
running cluster. A YAML file is a profile: the arguments of Prefect's DaskTaskRunner, so that any cluster class
(Slurm, SSH, Kubernetes) is a few lines of data:

    cluster_class: dask_jobqueue.SLURMCluster
    cluster_kwargs: {cores: 32, processes: 32, memory: 128GB, queue: cpu}
    adapt_kwargs: {minimum: 1, maximum: 20}
"""

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from dask import config  # pyright: ignore[reportPrivateImportUsage]
from distributed import SpecCluster, SSHCluster
from distributed.utils import import_term
from prefect_dask.task_runners import DaskTaskRunner
from pydantic import Field
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.strict import Strict, parse
from tokenmill.tasks.yaml_text import read_mapping

from . import on_host
from .cluster import local_arguments, local_cluster, require_scheduler
from .wait import job_queue

SSH = "distributed.SSHCluster"


class Profile(Strict, frozen=True):
    """Arguments of Prefect's DaskTaskRunner, from a YAML file."""

    address: str | None = None
    cluster_class: str | None = None
    cluster_kwargs: dict[str, Any] = Field(default_factory=dict)
    adapt_kwargs: dict[str, Any] = Field(default_factory=dict)
    client_kwargs: dict[str, Any] = Field(default_factory=dict)
    performance_report_path: str | None = None


def task_runner(cluster: str, workers: int | None, resources: Mapping[str, float]) -> DaskTaskRunner:
    """Return the Prefect task runner for a `cluster` setting; each worker of a local cluster has the `resources`.

    Raises InputError for a profile that cannot be used, and for an address where no scheduler answers.
    """
    if cluster == "local":
        return DaskTaskRunner(cluster_class=local_cluster, cluster_kwargs=local_arguments(workers, resources))
    path = Path(cluster)
    profile = Profile(address=cluster) if "://" in cluster else _profile(path)
    if profile.address:
        require_scheduler(profile.address)
        return DaskTaskRunner(**profile.model_dump())
    if profile.cluster_class == SSH:
        if not find_spec("asyncssh"):  # imported when it is used
            raise _not_installed(path, profile, "asyncssh", "it needs asyncssh")
        started: Callable[..., Any] = ssh_cluster
    else:
        handler = signal.getsignal(signal.SIGINT)
        try:
            started = cast("Callable[..., Any]", import_term(str(profile.cluster_class)))
        except (ImportError, AttributeError) as error:
            package = str(profile.cluster_class).split(".", maxsplit=1)[0].replace("_", "-")
            raise _not_installed(path, profile, package, str(error)) from error
        finally:
            # Importing a package may replace the handler of Ctrl-C: dask_jobqueue's exits with code 0.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, handler)
        if isinstance(started, type) and hasattr(started, "job_cls"):
            started = job_queue(started)
    chosen = profile.model_dump(exclude={"address", "cluster_class"})
    return DaskTaskRunner(cluster_class=_starting(started, path), **chosen)


def _starting(cluster: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """Starts a cluster of the profile. It catches every exception, because a cluster class may raise any type."""

    def start(**arguments: Any) -> Any:  # noqa: ANN401 - any cluster
        try:
            return cluster(**arguments)
        except Exception as error:
            raise RunError(f"cluster: {path}: its cluster cannot be started: {error}") from error

    return start


def _not_installed(path: Path, profile: Profile, package: str, why: str) -> InputError:
    return InputError(
        f"cluster: {path}: cluster_class {profile.cluster_class!r} cannot be used ({why}); check its name, or install "
        f"its package: pip install {package}"
    )


def _profile(path: Path) -> Profile:
    if not path.is_file():
        raise InputError(f"cluster: {str(path)!r} is not 'local', a scheduler address or an existing YAML profile")
    where = f"cluster: {path}"
    profile = parse(Profile, read_mapping(path.read_bytes(), where, "DaskTaskRunner arguments"), where)
    if bool(profile.address) == bool(profile.cluster_class):
        raise InputError(f"cluster: {path}: name either a cluster_class, which is started for the run, or an address")
    return profile


REACH_SECONDS = 30.0
"""How long a host may take to answer and to start Python."""

PRELOADED = ("distributed.scheduler.preload", "distributed.nanny.preload")


def ssh_cluster(
    hosts: list[str],
    connect_options: dict[str, Any] | list[dict[str, Any]] | None = None,
    remote_python: str | list[str] | None = None,
    **others: Any,  # noqa: ANN401 - the arguments of SSHCluster
) -> SpecCluster:
    """Start a scheduler on the first host and workers on the others, which end with this run.

    Raises RunError for hosts that cannot be used. Dask learns the scheduler's address from its log, at level INFO, and sends its own
    configuration to the hosts: with a quiet one it would wait forever.
    """
    options, pythons = connect_options or {}, remote_python or sys.executable
    each_options = options if isinstance(options, list) else [options] * len(hosts)
    each_python = pythons if isinstance(pythons, list) else [pythons] * len(hosts)

    async def problems() -> list[str | None]:
        return await asyncio.gather(*map(_problem, hosts, each_options, each_python))

    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop already
        found = thread.submit(asyncio.run, problems()).result()
    unusable = [f"{host}: {problem}" for host, problem in zip(hosts, found, strict=True) if problem]
    if unusable:
        raise RunError(
            f"hosts that cannot be used: {'; '.join(dict.fromkeys(unusable))}; check that `ssh HOST` works "
            "without a question, and that this installation is on the host (or name its Python in remote_python)"
        )
    preload = {key: [*config.get(key), on_host.__name__] for key in PRELOADED}
    with config.set({"logging.distributed": "info", **preload}):
        return SSHCluster(hosts, options, remote_python=pythons, **others)


async def _problem(host: str, options: Mapping[str, Any], python: str) -> str | None:
    """Why a host cannot be used, or None."""
    import asyncssh  # an SSH cluster alone needs it

    try:
        async with asyncio.timeout(REACH_SECONDS), asyncssh.connect(host, **options) as connection:
            ran = await connection.run(f"{python} -c 'import {on_host.__name__}'")
    except TimeoutError:
        return f"no answer within {REACH_SECONDS:.0f} s"
    except (OSError, asyncssh.Error) as error:
        return str(error)
    if not ran.exit_status:
        return None
    return str(ran.stderr).strip().rpartition("\n")[2] or f"{python} ended with exit code {ran.exit_status}"
