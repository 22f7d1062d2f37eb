"""The Prefect server of a run: the configured one, or a temporary one.

`flow` makes all flows here, so that a flow called by a command or a script has a server before it starts. (A Prefect
worker does not call flows this way, and has a server.)
"""

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect import Flow, get_client, tags
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_ENABLED, get_current_settings
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.console import never_end_by_printing
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.renamed import renamed
from tokenmill.tasks.shards.worker import exit_if_imported
from tokenmill.tasks.storage import is_writable

P = ParamSpec("P")
R = TypeVar("R")


class ServedFlow(Flow[P, R]):
    """A flow that provides its own Prefect server when called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the flow's own parameters and result
        """Run the flow. Errors as in `prefect_server`, and the flow's."""
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


def flow(*, name: str, description: str | None = None) -> Callable[[Callable[P, R]], ServedFlow[P, R]]:
    """Makes a function a flow with a server. Its result is not stored; its description is by default the docstring."""
    return lambda function: ServedFlow(
        function, name=name, description=description, flow_run_name=run_name, persist_result=False
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
        _start_temporary()
    try:
        yield
    except httpx.HTTPError as error:  # other clients fetch data
        raise RunError(
            f"the Prefect server at {address or 'a temporary address'} was lost ({type(error).__name__}: {error}); finished "
            "shards are kept: start the server and run the same command again"
        ) from error


def _start_temporary() -> None:
    settings = get_current_settings()
    elsewhere = settings.server.database.model_fields_set & {"connection_url", "host"}
    if not elsewhere and not is_writable(str(settings.home)):
        raise InputError(
            f"PREFECT_HOME: {settings.home} cannot be written, and a temporary Prefect server keeps its database there; set "
            "PREFECT_HOME to a different folder, or PREFECT_API_URL to the address of a server"
        )
    from .temporary_server import TemporaryServer  # 2 s to import

    TemporaryServer().start()


def _require_server(address: str) -> None:
    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
        if error is None:
            _require_password(client, address)
    if error is not None:
        raise InputError(
            f"PREFECT_API_URL: no Prefect server answers at {address}; start it with `prefect server start`, or unset "
            "the address (`prefect config unset PREFECT_API_URL`) to run with a temporary one"
        )


def _require_password(client: SyncPrefectClient, address: str) -> None:
    try:
        client.api_version()
    except PrefectHTTPStatusError as error:
        if error.response.status_code != HTTPStatus.UNAUTHORIZED:
            raise
        raise InputError(
            f"PREFECT_API_AUTH_STRING: the Prefect server at {address} rejects this password; use the value of its "
            "PREFECT_SERVER_API_AUTH_STRING"
        ) from error
