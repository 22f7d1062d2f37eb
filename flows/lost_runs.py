"""Flow runs whose process was killed. Nobody is left to report their end, so Prefect shows them as Running for ever.

    OUT/flow_run.json    the run at work in an output folder, removed when that run ends by itself

The next run in the folder finds the file and reports the end of the lost run, of its tasks and of the flows that it called.
That the run is lost, and not at work elsewhere, is told by the folder's lock, which the kernel takes from a dead process.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import orjson
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, StateType, TaskRun
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from tasks.errors import InputError
from tasks.shards.lock import locked_if_free
from tasks.shards.publish import publish_bytes
from tasks.storage import absolute, is_local

RECORD = "flow_run.json"
UNFINISHED = [each for each in StateType if each not in TERMINAL_STATES]


@contextmanager
def alone_in(output_dir: str) -> Generator[None]:
    """Be the only flow run at work in a local folder, and report the end of one that was killed there.

    An object store has no locks, so nothing is done there. Raises InputError while another run is at work in the folder.
    """
    if not is_local(output_dir):
        yield
        return
    place = absolute(output_dir)
    with locked_if_free(place) as free:
        if not free:
            raise InputError(
                f"output_dir={place}: another run is at work in this folder; wait for it, cancel it, or choose another folder"
            )
        with recorded_in(place):
            yield


@contextmanager
def recorded_in(output_dir: str) -> Generator[None]:
    """Record this flow run in a local folder while it works there, and report the end of one that was killed there.

    A lock that keeps other runs away must be held; an object store has none, so nothing is done there.
    """
    if not is_local(output_dir):
        yield
        return
    folder = absolute(output_dir)
    record = Path(folder, RECORD)
    if record.exists():
        _report_lost(UUID(orjson.loads(record.read_bytes())["id"]), folder)
    publish_bytes(str(record), orjson.dumps({"id": flow_run.id}))
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


def _report_lost(lost: UUID, folder: str) -> None:
    """Report that a run has crashed, unless the server knows its end, or does not know the run."""
    if str(lost) == flow_run.id:  # the same run, retried
        return
    crashed = Crashed(message=f"The process of this run was killed; the next run in {folder} reports it.")
    with get_client(sync_client=True) as client:
        for run in _unfinished(client, lost):
            for task in _unfinished_tasks(client, run):
                client.set_task_run_state(task.id, crashed, force=True)
            client.set_flow_run_state(run, crashed, force=True)


def _unfinished(client: SyncPrefectClient, run: UUID) -> Iterator[UUID]:
    """A run and all that it called, if it has not ended; called runs come first."""
    try:
        state = client.read_flow_run(run).state
    except ObjectNotFound:  # the run of another server, or one that was deleted
        return
    if state is None or state.type in TERMINAL_STATES:
        return
    of_run = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
    for called in client.read_flow_runs(flow_run_filter=of_run):
        yield from _unfinished(client, called.id)
    yield run


def _unfinished_tasks(client: SyncPrefectClient, run: UUID) -> Iterator[TaskRun]:
    """The task runs of a run that have not ended, page after page; they must be ended before the next is asked for."""
    unfinished = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=UNFINISHED)))
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
    while found := client.read_task_runs(flow_run_filter=of_run, task_run_filter=unfinished):
        yield from found
