"""`make up` and `make down`, as a person runs them in a fresh clone: the deployments are there, one runs on the Dask
cluster beside the server, and nothing is left running.
"""

import re
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

from tests.flows.cloning import clone_into
from tests.flows.prefect_commands import clean_environment, free_port
from tests.flows.preparation_runs import ran

pytestmark = pytest.mark.weekly


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return clone_into(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def environment(clone):
    return clean_environment() | {
        "BIN": str(Path(sys.executable).parent),
        "RUN": str(clone / "run"),
        "PREFECT_HOME": str(clone / "home"),
        "PREFECT_PORT": str(free_port()),
        "DASK_PORT": str(free_port()),
        "DASHBOARD_PORT": str(free_port()),
        "WORKERS": "1",
    }


def local(clone, environment, command):
    """What `make up` or `make down` printed."""
    done = ran(clone / "deployments/local.sh", command, cwd=clone, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def started(clone):
    """Processes that run in the clone."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == clone and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture(scope="module")
def printed(clone, environment):
    try:
        yield local(clone, environment, "up")
    finally:
        local(clone, environment, "down")


def test_printed_command_runs_on_the_dask_cluster(printed, clone, environment):
    url, command = re.search(r"run: +PREFECT_API_URL=(\S+) (.*)", printed).groups()
    address = re.search(r"-p (cluster=\S+)", printed)[1]
    output = clone / "prepared"
    command = [*command.split(), "--watch", "-p", address, "-p", f"output_dir={output}"]
    done = ran(*command, cwd=clone, env=environment | {"PREFECT_API_URL": url})
    assert done.returncode == 0, done.stdout + done.stderr
    with SyncPrefectClient(api=url) as client:
        run = client.read_flow_run(UUID(re.search(r"UUID: (\S+)", done.stdout)[1]))
    assert run.state.is_completed()
    assert run.parameters["cluster"] == address.partition("=")[2]
    assert (output / "blend.json").exists()
    dashboard = re.search(r"^Dask: +(\S+)", printed, re.MULTILINE)[1]
    assert "127.0.0.1" in urlopen(dashboard, timeout=30).read().decode()  # the address of its worker
    with SyncPrefectClient(api=url) as client:
        chosen = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]), key=ArtifactFilterKey(like_="%-report-%")
        )
        (artifact,) = client.read_artifacts(artifact_filter=chosen)
    assert f"(file://{output}/report.html)" in artifact.data


def test_services_listen_on_loopback_only(printed, clone):
    listening = {
        connection.laddr.ip
        for process in started(clone)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_up_twice_starts_services_once(printed, clone, environment):
    before = {path.name: path.read_text() for path in (clone / "run").glob("*.pid")}
    assert set(before) == {f"{name}.pid" for name in ("server", "scheduler", "workers", "worker", "gpu-worker")}
    with SyncPrefectClient(api=f"http://127.0.0.1:{environment['PREFECT_PORT']}/api") as client:
        nightly = client.read_deployment_by_name("reprep-changed-blends/reprep-changed-blends")
        client.update_deployment_schedule(nightly.id, nightly.schedules[0].id, active=True)
        local(clone, environment, "up")
        (schedule,) = client.read_deployment_by_name("reprep-changed-blends/reprep-changed-blends").schedules
    assert schedule.active, "what a person switched on stays on"
    assert {path.name: path.read_text() for path in (clone / "run").glob("*.pid")} == before


def test_down_stops_all_processes(printed, clone, environment):
    assert len(started(clone)) >= 5
    local(clone, environment, "down")
    assert started(clone) == []
    assert not list((clone / "run").glob("*.pid"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(environment["PREFECT_PORT"])))


def test_what_up_prints_is_short_and_ends_with_three_addresses(printed, clone, environment):
    lines = printed.strip().splitlines()
    assert len(lines) <= 10
    ports = [int(environment[name]) for name in ("PREFECT_PORT", "DASHBOARD_PORT", "PREFECT_PORT")]
    assert [urlsplit(line.split()[-1]).port for line in lines[-3:]] == ports
    assert "prefect worker start" not in printed, "workers run already"
    assert "12 deployments" in (clone / "run/deploy.log").read_text()
