"""Flows with a Prefect server: the configured one, or a temporary one.

`flow` makes all flows here, so that a flow called by a command or a script has a server before it starts. (A Prefect
worker does not call flows this way, and has a server.)
"""

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from http import HTTPStatus
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast
from uuid import UUID

import httpx
from prefect import Flow, get_client, tags
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_ENABLED, get_current_settings
from prefect.states import Completed, Crashed, Failed
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.console import never_end_by_printing
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.renamed import renamed
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.executor import exit_if_imported
from tokenmill.tasks.shards.manifest import BLEND
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.stage import tell
from tokenmill.tasks.shards.store import turn_in
from tokenmill.tasks.storage import absolute, is_local, is_writable, join

P = ParamSpec("P")
R = TypeVar("R")


class ServedFlow(Flow[P, R]):
    """A flow that provides its own Prefect server when called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the flow's own parameters and result
        # Before Prefect's own error, which doesn't know the new name.
        self._require_new_names(kwargs)
        if FlowRunContext.get() is not None:
            return super().__call__(*args, **kwargs)
        exit_if_imported()
        never_end_by_printing()  # before server connections take the numbers of closed streams
        with prefect_server(), tags("tokenmill", self.name):
            return super().__call__(*args, **kwargs)

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Validate as Prefect does; deployments can have parameters of earlier versions."""
        self._require_new_names(parameters)
        return super().validate_parameters(parameters)

    def _require_new_names(self, parameters: Mapping[str, Any]) -> None:
        known = inspect.signature(self.fn).parameters
        for sentence in (renamed(name, known.keys()) for name in parameters.keys() - known.keys()):
            if sentence is not None:
                raise InputError(f"{self.name}: {sentence}")


def flow(
    *, name: str, description: str | None = None
) -> Callable[[Callable[P, dict[str, Any]]], ServedFlow[P, dict[str, Any]]]:
    """Makes a function that publishes in an `output_dir` a flow with a server; its description is by default the docstring."""
    return lambda function: ServedFlow(
        publishing(function), name=name, description=description, flow_run_name=run_name, persist_result=False
    )


INPUTS = ("blend", "blends", "data", "training")
"""Parameters that name the inputs of a run."""


def run_name() -> str:
    """Return the name of a run: its input (the first dataset of a blend without a file; without either, the flow), and the last
    folder of its output.
    """
    given = flow_run.parameters
    read: object = next((given[name] for name in INPUTS if given.get(name)), flow_run.flow_name)
    if isinstance(read, str):
        named = read.rstrip("/").rpartition("/")[2].removesuffix(".json")
    else:
        named = next(iter(Blend.model_validate(read).parts().values()))[0].name
    return f"{named}-{str(given['output_dir']).rstrip('/').rpartition('/')[2]}"


@contextmanager
def prefect_server() -> Generator[None]:
    """A Prefect server for the `with` block.

    Raises InputError when the configured server doesn't answer or rejects this process, and RunError when none can be
    started or the connection is lost.
    """
    address = PREFECT_API_URL.value()
    if address is not None:
        _require_server(address)
    elif PREFECT_SERVER_EPHEMERAL_ENABLED.value():
        settings = get_current_settings()
        elsewhere = settings.server.database.model_fields_set & {"connection_url", "host"}
        if not elsewhere and not is_writable(str(settings.home)):
            raise InputError(
                f"PREFECT_HOME: {settings.home} cannot be written, and a temporary Prefect server keeps its database there; set "
                "PREFECT_HOME to a different folder, or PREFECT_API_URL to the address of a server"
            )
        from .temporary_server import TemporaryServer  # 2 s to import

        TemporaryServer().start()
    try:
        yield
    except httpx.HTTPError as error:  # other clients fetch data
        raise RunError(
            f"the Prefect server at {address or 'a temporary address'} was lost ({type(error).__name__}: {error}); finished "
            "shards are kept: start the server and run the same command again"
        ) from error


def _require_server(address: str) -> None:
    with get_client(sync_client=True) as client:
        if client.api_healthcheck() is not None:
            raise InputError(
                f"PREFECT_API_URL: no Prefect server answers at {address}; start it with `prefect server start`, or unset "
                "the address (`prefect config unset PREFECT_API_URL`) to run with a temporary one"
            )
        try:
            client.api_version()  # unlike the health check, it needs a password
        except PrefectHTTPStatusError as error:
            if error.response.status_code != HTTPStatus.UNAUTHORIZED:
                raise
            raise InputError(
                f"PREFECT_API_AUTH_STRING: the Prefect server at {address} rejects this password; use the value of its "
                "PREFECT_SERVER_API_AUTH_STRING"
            ) from error


RECORD = "flow_run.json"
UNFINISHED = TaskRunFilter(
    state=TaskRunFilterState(
        type=TaskRunFilterStateType(any_=[each for each in StateType if each not in TERMINAL_STATES])
    )
)


def publishing(function: Callable[P, dict[str, Any]]) -> Callable[P, dict[str, Any]]:
    """Return a flow that publishes in an `output_dir`.

    Runs with the same output folder take turns; a waiting run names the other. OUT/flow_run.json records the run in progress: a
    killed process reports no end, so Prefect would show its run as Running forever. The next run in the folder finds the file and
    reports that run, its tasks and its subflows as crashed; the folder's lock, which the kernel releases, proves that it is dead.

    The message of an InputError or RunError becomes the message of the failed run; the caller gets the error itself.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        output_dir = signature(function).bind(*args, **kwargs).arguments["output_dir"]
        try:
            with turn_in(output_dir, tell), _recorded_in(output_dir):
                record = function(*args, **kwargs)
        except (InputError, RunError) as error:
            return cast("dict[str, Any]", Failed(message=str(error), data=error))
        made = next(iter(record.values())) if len(record) == 1 else None
        if not isinstance(made, dict) or not {"documents", "tokens", "shards"} <= made.keys():
            return record
        # Prefect shows the message of a final state: the outputs of a preparation.
        tokens = counted(made["tokens"], "token") if made["tokens"] else counted(made["documents"], "document")
        message = f"{tokens} in {counted(made['shards']['total'], 'shard')} → {join(made['path'], BLEND)}"
        return cast("dict[str, Any]", Completed(message=message, data=record))

    return run


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
    lost = None
    with suppress(FileNotFoundError, ValueError, KeyError):  # no valid record
        lost = UUID(unsealed(record.read_bytes())["id"])
    if lost and str(lost) != flow_run.id:  # otherwise the same run, retried
        crashed = Crashed(message=f"The process of this run was killed; the next run in {folder} reports it.")
        with get_client(sync_client=True) as client:
            for run in _unfinished(client, lost):
                of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
                # The server answers with a page of tasks; ending them all makes room for the next.
                while tasks := client.read_task_runs(flow_run_filter=of_run, task_run_filter=UNFINISHED):
                    for task in tasks:
                        client.set_task_run_state(task.id, crashed, force=True)
                client.set_flow_run_state(run, crashed, force=True)
    publish_bytes(str(record), sealed({"id": flow_run.id, "volatile": {}}))
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


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
