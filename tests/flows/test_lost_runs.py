"""A run whose process was killed: the next run in the same folder reports its end."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterParentFlowRunId
from prefect.runtime import flow_run
from tokenmill.flows.prefect_server import RECORD, publishing
from tokenmill.tasks.seal import sealed, unsealed

pytestmark = pytest.mark.slow


@task
def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@flow
def calls_a_task_that_is_killed():
    is_killed()


@flow
@publishing
def works_in(output_dir, kill=False):
    """Work in a folder as a pipeline does, whose stages are flows; the name of the run."""
    assert recorded_in(output_dir) == flow_run.id
    if kill:
        calls_a_task_that_is_killed()
    return flow_run.id


def killed_in(folder, server):
    """The run of a process that was killed while it worked in a folder."""
    program = "import sys; from tests.flows.test_lost_runs import works_in; works_in(sys.argv[1], kill=True)"
    done = subprocess.run([sys.executable, "-c", program, str(folder)], env=server.environment, check=False)
    assert done.returncode == -signal.SIGKILL
    return UUID(recorded_in(folder))


def recorded_in(folder):
    return unsealed(Path(folder, RECORD).read_bytes())["id"]


def states(client, run):
    """The states of a run, of its tasks, and of what it called, by name."""
    (found,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))
    of_run = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
    called = [state for each in client.read_flow_runs(flow_run_filter=of_run) for state in states(client, each.id)]
    tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))
    return [found.state.name, *(each.state.name for each in tasks), *called]


def test_the_next_run_in_a_folder_ends_the_one_that_was_killed_there_and_all_that_it_called(prefect_api, tmp_path):
    lost = killed_in(tmp_path, prefect_api)
    with prefect_api.client() as client:
        assert set(states(client, lost)) == {"Running"}
        after = UUID(works_in(str(tmp_path)))
        found = states(client, lost)
        assert len(found) >= 3
        assert set(found) == {"Crashed"}
        assert str(tmp_path) in client.read_flow_run(lost).state.message
        assert states(client, after) == ["Completed"]
    assert not (tmp_path / RECORD).exists()


def test_foreign_or_orphaned_runs_do_not_block(prefect_api, tmp_path):
    (tmp_path / RECORD).write_bytes(sealed({"id": str(UUID(int=7)), "volatile": {}}))
    works_in(str(tmp_path))
    assert not (tmp_path / RECORD).exists()


@pytest.mark.parametrize("bit", [0, 82, 300])
def test_a_record_with_a_flipped_bit_reports_no_run_and_stops_none(prefect_api, tmp_path, bit):
    record = tmp_path / RECORD
    damaged = bytearray(sealed({"id": str(UUID(int=7)), "volatile": {}}))
    damaged[bit // 8] ^= 1 << bit % 8
    record.write_bytes(damaged)
    works_in(str(tmp_path))
    assert not record.exists()
