"""Flows that publish in an output folder: one run at a time, killed runs reported, errors as one sentence.

    OUT/flow_run.json    the run in progress, sealed; removed when that run ends

A killed process reports no end, so Prefect would show its run as Running forever. The next run in the folder finds the
file and reports the killed run, its tasks and its subflows as crashed. The folder's lock proves that the run is dead: the
kernel releases it with the process.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, cast
from uuid import UUID

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
from prefect.states import Completed, Crashed, Failed
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.lock import turn_in
from tokenmill.tasks.shards.manifest import BLEND
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.stage import tell
from tokenmill.tasks.storage import absolute, is_local, join

P = ParamSpec("P")

RECORD = "flow_run.json"
UNFINISHED = [each for each in StateType if each not in TERMINAL_STATES]


def publishing(function: Callable[P, dict[str, Any]]) -> Callable[P, dict[str, Any]]:
    """A flow that publishes in an `output_dir`.

    Runs with the same output folder take turns; a waiting run names the other. The message of an InputError or RunError
    becomes the message of the failed run; the caller gets the error itself.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        output_dir = signature(function).bind(*args, **kwargs).arguments["output_dir"]
        try:
            with turn_in(output_dir, tell), _recorded_in(output_dir):
                return _finished(function(*args, **kwargs))
        except (InputError, RunError) as error:
            return cast("dict[str, Any]", Failed(message=str(error), data=error))

    return run


def _finished(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record; for a preparation in a final state, the one with its outputs."""
    made = next(iter(record.values())) if len(record) == 1 else None
    if not isinstance(made, dict) or not {"documents", "tokens", "shards"} <= made.keys():
        return record
    tokens = f"{made['tokens']:,} tokens" if made["tokens"] else f"{made['documents']:,} documents"
    shards = made["shards"]["total"]
    message = f"{tokens} in {shards:,} shard{'s' * (shards != 1)} → {join(made['path'], BLEND)}"
    return cast("dict[str, Any]", Completed(message=message, data=record))


@contextmanager
def _recorded_in(output_dir: str) -> Generator[None]:
    """Record this flow run in its output folder, and report a run that was killed there.

    The folder's lock must be held. Object stores lack locks, so runs aren't recorded there.
    """
    folder = absolute(output_dir)
    if not is_local(folder):
        yield
        return
    record = Path(folder, RECORD)
    if lost := _lost_run(record):
        _report_lost(lost, folder)
    publish_bytes(str(record), sealed({"id": flow_run.id, "volatile": {}}))
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


def _lost_run(record: Path) -> UUID | None:
    """The recorded run, or None without a valid record."""
    with suppress(FileNotFoundError, ValueError, KeyError):
        return UUID(unsealed(record.read_bytes())["id"])
    return None


def _report_lost(lost: UUID, folder: str) -> None:
    """Report a run as crashed, unless it has ended or the server does not have it."""
    if str(lost) == flow_run.id:  # the same run, retried
        return
    crashed = Crashed(message=f"The process of this run was killed; the next run in {folder} reports it.")
    with get_client(sync_client=True) as client:
        for run in _unfinished(client, lost):
            for task in _unfinished_tasks(client, run):
                client.set_task_run_state(task.id, crashed, force=True)
            client.set_flow_run_state(run, crashed, force=True)


def _unfinished(client: SyncPrefectClient, run: UUID) -> Iterator[UUID]:
    """A run and its subflows, if it has not ended; subflows first."""
    try:
        state = client.read_flow_run(run).state
    except ObjectNotFound:  # a run of another server, or deleted
        return
    if state is None or state.type in TERMINAL_STATES:
        return
    of_run = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
    for called in client.read_flow_runs(flow_run_filter=of_run):
        yield from _unfinished(client, called.id)
    yield run


def _unfinished_tasks(client: SyncPrefectClient, run: UUID) -> Iterator[TaskRun]:
    """Yield unfinished task runs of a run. End all on one page before asking for the next."""
    unfinished = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=UNFINISHED)))
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
    while found := client.read_task_runs(flow_run_filter=of_run, task_run_filter=unfinished):
        yield from found
