"""Where Dask runs, and how workers tell of their progress.

`local` starts one single-threaded process per core, for this run only. An address (`tcp://…`, `tls://…`) uses a
standing cluster. A YAML file names a profile: the arguments of Prefect's DaskTaskRunner, so that any cluster class
(Slurm, SSH, Kubernetes) is a few lines of data:

    cluster_class: dask_jobqueue.SLURMCluster
    cluster_kwargs: {cores: 32, processes: 32, memory: 128GB, queue: cpu}
    adapt_kwargs: {minimum: 1, maximum: 20}
"""

import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import dask
import yaml
from distributed import Client, get_worker
from prefect_dask.task_runners import DaskTaskRunner

from tasks.errors import InputError

CONNECT_TIMEOUT = "30s"

LOCAL: dict[str, Any] = {
    "threads_per_worker": 1,
    "dashboard_address": "127.0.0.1:0",  # any free port: two runs on one machine must not want the same one
    "env": {"PREFECT_PLUGINS_ENABLED": "false"},  # plugins serve commands; Dask imports Prefect where they cannot start
}


def task_runner(cluster: str, workers: int | None, resources: Mapping[str, float]) -> DaskTaskRunner:
    """The Prefect task runner for a `cluster` setting; workers of a local one have `resources` each.

    Raises InputError for a profile that is not there or is not a mapping.
    """
    if cluster == "local":
        return DaskTaskRunner(cluster_kwargs={**LOCAL, "n_workers": workers or cores(), "resources": dict(resources)})
    if "://" in cluster:
        return DaskTaskRunner(address=cluster, client_kwargs={"timeout": CONNECT_TIMEOUT})
    return DaskTaskRunner(**_profile(Path(cluster)))


def _profile(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(
            f"cluster: {str(path)!r} is neither 'local', a scheduler address nor a YAML profile that exists"
        )
    profile = yaml.safe_load(path.read_bytes())
    if not isinstance(profile, dict):
        raise InputError(f"cluster: {path} must hold a mapping of DaskTaskRunner arguments")
    return profile


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def slots(client: Client) -> int:
    """Tasks that the cluster runs at once right now; an adaptive one may not have started any worker yet."""
    threads = cast("dict[str, int]", client.nthreads())
    return max(1, sum(threads.values()))


@contextmanager
def asking_for(client: Client, resources: Mapping[str, float]) -> Generator[None]:
    """What is submitted within runs on workers that have `resources`, each of them one task at a time.

    Raises InputError when there are workers and none declares them: the tasks would wait for ever.
    """
    known = cast("Mapping[str, Any]", client.scheduler_info()["workers"]).values()
    if known and not any(_declares(worker, resources) for worker in known):
        wanted = ",".join(f"{name}={amount:g}" for name, amount in resources.items())
        raise InputError(
            f"cluster: none of its {len(known)} workers has the resources {wanted}; start them with "
            f"`dask worker --nthreads 1 --resources {wanted}`, one per GPU, or name them in the profile"
        )
    with dask.annotate(**({"resources": dict(resources)} if resources else {})):  # pyright: ignore[reportPrivateImportUsage]
        yield


def _declares(worker: Mapping[str, Any], resources: Mapping[str, float]) -> bool:
    return all(worker["resources"].get(name, 0) >= amount for name, amount in resources.items())


def worker_number() -> int:
    """The number of this process among the workers of a cluster, as its name ends in it; 0 where there is none."""
    try:
        found = re.search(r"\d+$", str(get_worker().name))
    except ValueError:
        return 0
    return int(found[0]) if found else 0


def announce(topic: str, record: dict[str, Any]) -> None:
    """Tell whoever watches the run that a shard is done; nothing when this process is not a Dask worker."""
    try:
        worker = get_worker()
    except ValueError:
        return
    worker.log_event(topic, record)


def listen(client: Client, topic: str, heard: Callable[[dict[str, Any]], None]) -> None:
    """Call `heard` with each record that a worker announces under `topic`, from the client's own thread."""
    client.subscribe_topic(topic, lambda event: heard(event[1]))
