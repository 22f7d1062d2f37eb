"""Kill the processes that a run depends on. A run that loses its Dask scheduler or its Prefect server fails with an error,
and the same command finishes it with the same bytes. A run that loses its Prefect worker continues.
(Killed Dask workers: test_every_kind.py; runs: test_pretrain_flow.py.)
"""

import os
import signal
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import httpx
import psutil
import pytest
from distributed import Client
from prefect.client.schemas.actions import WorkPoolCreate
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards import wait
from tokenmill.tasks.shards.executor import wait_for
from tokenmill.tasks.shards.progress import UPDATE_SECONDS
from tokenmill.tasks.shards.wait import ClusterWatch

from tests.flows.cloning import REPOSITORY
from tests.flows.prefect_commands import PREFECT, free_port, running, serving, wait_until
from tests.flows.preparation_runs import DEADLINE, finish, wait_for_receipts
from tests.flows.preparation_runs import start_small as start
from tests.flows.standing_clusters import scheduler, worker
from tests.preparing import tree

pytestmark = pytest.mark.slow


def failed(process):
    """What a run that has ended with exit code 1 complained of."""
    _, complaint = process.communicate(timeout=2 * DEADLINE)
    assert process.returncode == 1, complaint
    return complaint


@contextmanager
def standing(folder, port):
    with ExitStack() as stack:
        address, process = stack.enter_context(scheduler(folder, port=port))
        stack.enter_context(worker(address, folder, "one"))
        yield address, process


def test_killed_scheduler_fails_the_run_and_a_retry_finishes(blend, expected, tmp_path, prefect_server):
    out, port = tmp_path / "out", free_port()
    with standing(tmp_path, port) as (address, process):
        run = start(blend, out, prefect_server, "--cluster", address)
        wait_for_receipts(out, 5, lambda: run.poll() is None)
        process.kill()
        complaint = failed(run)
    assert "lost the connection to the scheduler" in complaint
    assert "Traceback" not in complaint
    with standing(tmp_path, port) as (address, _):
        record = finish(start(blend, out, prefect_server, "--cluster", address))
    assert record["shards"]["reused"] >= 1
    assert tree(out) == expected


@pytest.mark.weekly
def test_a_killed_prefect_server_fails_the_run_and_the_same_command_finishes_it(blend, expected, tmp_path):
    out, home, port = tmp_path / "out", tmp_path / "home", free_port()
    home.mkdir()
    with serving(home, port=port) as server:
        hasty = SimpleNamespace(environment=server.environment | {"PREFECT_CLIENT_MAX_RETRIES": "1"})
        run = start(blend, out, hasty, "--workers", "2")
        wait_for_receipts(out, 5, lambda: run.poll() is None)
        os.killpg(server.process.pid, signal.SIGKILL)
        complaint = failed(run)
    assert f"tokenmill: the Prefect server at {server.environment['PREFECT_API_URL']} was lost" in complaint
    assert "Traceback" not in complaint
    assert not (out / "blend.json").exists()
    with serving(home, port=port) as server:
        record = finish(start(blend, out, server, "--workers", "2"))
    assert record["shards"]["reused"] >= 1
    assert tree(out) == expected


@pytest.mark.weekly
def test_a_prefect_server_that_is_back_in_time_is_not_missed(blend, expected, tmp_path):
    out, home, port = tmp_path / "out", tmp_path / "home", free_port()
    home.mkdir()
    with serving(home, port=port) as server:
        run = start(blend, out, server, "--workers", "2")
        wait_for_receipts(out, 5, lambda: run.poll() is None)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with serving(home, port=port):
        finish(run)
    assert tree(out) == expected


@pytest.fixture
def deployed(prefect_server):
    """A deployment of the flow that runs once at a time, in a work pool of its own."""
    client = prefect_server.client()
    client.create_work_pool(WorkPoolCreate(name="to-be-killed", type="process"))
    flow = client.create_flow_from_name("pretrain-data-prep")
    folder = {"prefect.deployments.steps.set_working_directory": {"directory": str(REPOSITORY)}}
    place = {"entrypoint": "tokenmill.flows.pretrain.pretrain_data_prep", "pull_steps": [folder]}
    deployment = client.create_deployment(flow, "killed", work_pool_name="to-be-killed", concurrency_limit=1, **place)
    yield client.read_deployment(deployment)
    client.delete_deployment(deployment)
    client.delete_work_pool("to-be-killed")


@pytest.mark.timeout(600)
def test_run_survives_a_killed_prefect_worker_and_frees_its_slot(blend, expected, tmp_path, prefect_server, deployed):
    out, log = tmp_path / "out", tmp_path / "worker.log"
    client = prefect_server.client()
    environment = prefect_server.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1"}
    parameters = {"blend": str(blend), "output_dir": str(out), "shard_size": "20kB", "workers": 2}
    with running([PREFECT, "worker", "start", "--pool", "to-be-killed"], environment, tmp_path, log) as worker:
        run = client.create_flow_run_from_deployment(deployed.id, parameters=parameters).id
        wait_until(lambda: state_of(client, run).is_running(), DEADLINE, log)
        wait_for_receipts(out, 5, lambda: True)
        assert slots_taken(client, deployed) == 1
        processes, began = psutil.Process(worker.pid).children(recursive=True), time.monotonic()
        worker.kill()
        wait_until(lambda: state_of(client, run).is_final(), DEADLINE)
        seconds = time.monotonic() - began
    assert state_of(client, run).is_completed()
    assert tree(out) == expected
    assert not psutil.wait_procs(processes, timeout=DEADLINE)[1]
    assert slots_taken(client, deployed) == 0
    assert progress_updates(prefect_server, run) <= seconds / UPDATE_SECONDS + 2, "those until then, and the last"


def state_of(client, run):
    return client.read_flow_run(run).state


def slots_taken(client, deployment):
    """How many runs of a deployment its limit counts."""
    limits = {limit.id: limit for limit in client.read_global_concurrency_limits()}
    return limits[deployment.global_concurrency_limit.id].active_slots


def progress_updates(server, run):
    """How often the server was told of a run's artifacts that it knew; each time it records an event."""
    wanted = {
        "event": {"name": ["prefect.artifact-collection.updated"]},
        "related": {"id": [f"prefect.flow-run.{run}"]},
    }
    answer = httpx.post(f"{server.url}/events/filter", json={"filter": wanted})
    return answer.raise_for_status().json()["total"]


def test_a_scheduler_that_hangs_with_its_connections_open_is_given_up(tmp_path, monkeypatch):
    for name, seconds in {"CHECK": 0.0, "ANSWER": 0.1, "SILENT": 1.0}.items():
        monkeypatch.setattr(wait, f"{name}_SECONDS", seconds)
    with scheduler(tmp_path) as (address, process), Client(address, set_as_default=False) as client:
        future = client.submit(sum, [1, 2])
        process.send_signal(signal.SIGSTOP)
        watch = ClusterWatch(client, {}, False, print)
        try:
            with pytest.raises(RunError, match=rf"the Dask scheduler at {address} has not answered for"):
                wait_for([future], watch.check, lambda: None)
        finally:
            process.send_signal(signal.SIGCONT)
