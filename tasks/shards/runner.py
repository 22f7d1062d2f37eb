"""The task runner of Prefect for a `cluster` setting.

`local` starts one single-threaded process per core, for this run only. An address (`tcp://…`, `tls://…`) uses a
running cluster. A YAML file is a profile: the arguments of Prefect's DaskTaskRunner, so that any cluster class
(Slurm, SSH, Kubernetes) is a few lines of data:

    cluster_class: dask_jobqueue.SLURMCluster
    cluster_kwargs: {cores: 32, processes: 32, memory: 128GB, queue: cpu}
    adapt_kwargs: {minimum: 1, maximum: 20}
"""

import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from distributed.utils import import_term
from prefect_dask.task_runners import DaskTaskRunner
from pydantic import Field
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.strict import Strict, parse
from tokenmill.tasks.yaml_text import read_mapping

from .cluster import local_arguments, local_cluster, require_scheduler
from .queues import job_queue
from .ssh import ssh_cluster

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
    """The Prefect task runner for a `cluster` setting; each worker of a local cluster has the `resources`.

    Raises InputError for a profile that cannot be used, and for an address where no scheduler answers.
    """
    if cluster == "local":
        return DaskTaskRunner(cluster_class=local_cluster, cluster_kwargs=local_arguments(workers, resources))
    if "://" in cluster:
        return _running(Profile(address=cluster))
    return _named(Path(cluster))


def _running(profile: Profile) -> DaskTaskRunner:
    require_scheduler(str(profile.address))
    return DaskTaskRunner(**profile.model_dump())


def _named(path: Path) -> DaskTaskRunner:
    profile = _profile(path)
    if profile.address:
        return _running(profile)
    package = str(profile.cluster_class).split(".", maxsplit=1)[0].replace("_", "-")
    if profile.cluster_class == SSH and not find_spec("asyncssh"):  # imported when it is used
        raise _not_installed(path, profile, "asyncssh", "it needs asyncssh")
    try:
        with _keeping_ctrl_c():
            cluster = _cluster_class(str(profile.cluster_class))
    except (ImportError, AttributeError) as error:
        raise _not_installed(path, profile, package, str(error)) from error
    return DaskTaskRunner(
        cluster_class=_starting(cluster, path), **profile.model_dump(exclude={"address", "cluster_class"})
    )


def _cluster_class(name: str) -> Callable[..., Any]:
    """Return the cluster class with that name, which explains why workers don't start."""
    if name == SSH:
        return ssh_cluster
    found = cast("Callable[..., Any]", import_term(name))
    return job_queue(found) if isinstance(found, type) and hasattr(found, "job_cls") else found


def _starting(cluster: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """Starts a cluster of the profile. It catches every exception, because a cluster class may raise any type."""

    def start(**arguments: Any) -> Any:  # noqa: ANN401 - any cluster
        try:
            return cluster(**arguments)
        except Exception as error:
            raise RunError(f"cluster: {path}: its cluster cannot be started: {error}") from error

    return start


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
    where = f"cluster: {path}"
    profile = parse(Profile, read_mapping(path.read_bytes(), where, "DaskTaskRunner arguments"), where)
    if bool(profile.address) == bool(profile.cluster_class):
        raise InputError(f"cluster: {path}: name either a cluster_class, which is started for the run, or an address")
    return profile
