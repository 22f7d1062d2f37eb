"""Prefect on a PostgreSQL of its own: runs outlive a killed server, and the server deletes old runs."""

import asyncio
import os
import signal
from contextlib import ExitStack

import asyncpg
import pytest
from prefect.client.schemas.actions import ArtifactCreate, LogCreate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, LogFilter, LogFilterFlowRunId
from prefect.states import Completed
from prefect.types._datetime import now

from tests.flows.databases import MISSING, postgresql
from tests.flows.deployed_runs import deployed, small_blend
from tests.flows.prefect_commands import free_port, serving, wait_until
from tests.flows.preparation_runs import DEADLINE, receipts
from tests.flows.standing_clusters import scheduler, worker
from tests.preparing import prepare, tree

pytestmark = [pytest.mark.weekly, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

RUNS, SHARD_SIZE = 4, 20_000
VACUUM = {"PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs"}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A server that was killed while runs worked, and started again: a client, the runs' folders and ids, and earlier runs."""
    folder, port = tmp_path_factory.mktemp("postgresql"), free_port()
    (folder / "home").mkdir()
    blend, outs = small_blend(folder, 1_500), [folder / f"out-{number}" for number in range(RUNS)]
    prepare(str(blend), folder / "expected", shard_size=SHARD_SIZE)
    with ExitStack() as servers, ExitStack() as clients:
        own = servers.enter_context(postgresql("fsync=off"))
        server = servers.enter_context(serving(folder / "home", port=port, **own, **VACUUM))
        address, _ = clients.enter_context(scheduler(folder))
        clients.enter_context(worker(address, folder, "one"))
        found = clients.enter_context(deployed(server, folder))
        earlier = {age: ended_run(found) for age in ("old", "young")}
        asyncio.run(grow_old(own, earlier["old"]))
        runs = found.start(blend, outs, shard_size=SHARD_SIZE, cluster=address)
        wait_until(lambda: sum(map(receipts, outs)) > RUNS * 4, DEADLINE, folder / "worker.log")
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        servers.enter_context(serving(folder / "home", port=port, **own, **VACUUM))
        yield found, folder, runs, earlier


def ended_run(found):
    """A run of the deployment that is said to have completed, with a log and an artifact."""
    with found.server.client() as client:
        run = client.create_flow_run_from_deployment(found.id, parameters={"blend": "b.json", "output_dir": "out"}).id
        client.set_flow_run_state(run, Completed(), force=True)
        line = {"name": "test", "level": 20, "message": "done", "timestamp": now(), "flow_run_id": run}
        client.create_logs([LogCreate(**line)])
        client.create_artifact(ArtifactCreate(key=f"of-{run}", type="markdown", data="done", flow_run_id=run))
    return run


async def grow_old(own, run):
    """Let a run have ended 91 days ago."""
    connection = await asyncpg.connect(*(address.replace("+asyncpg", "") for address in own.values()))
    await connection.execute("UPDATE flow_run SET end_time = now() - interval '91 days' WHERE id = $1", run)
    await connection.close()


def test_no_run_is_lost_when_its_server_is_killed_and_started_again(killed):
    found, folder, runs, _ = killed
    finals = {"Completed", "Failed", "Crashed", "Cancelled"}
    wait_until(lambda: not found.states(runs).keys() - finals, 2 * DEADLINE, folder / "worker.log")
    assert found.states(runs) == {"Completed": RUNS}
    for number in range(RUNS):
        assert tree(folder / f"out-{number}") == tree(folder / "expected")


def test_runs_that_are_older_than_90_days_are_deleted_with_their_logs_and_artifacts(killed):
    found, _, _, earlier = killed
    wait_until(lambda: not kept(found, earlier["old"]), DEADLINE)
    assert kept(found, earlier["young"]) == ["run", "log", "artifact"]


def kept(found, run):
    """What the server still has of a run."""
    logs = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))
    artifacts = ArtifactFilter(key=ArtifactFilterKey(any_=[f"of-{run}"]))
    with found.server.client() as client:
        there = {
            "run": found.states([run]),
            "log": client.read_logs(log_filter=logs),
            "artifact": client.read_artifacts(artifact_filter=artifacts),
        }
    return [name for name, value in there.items() if value]
