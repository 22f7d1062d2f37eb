"""`prefect deployment run pretrain-data-prep`: the bare name of a deployment is enough where only one has it.

Prefect wants FLOW/DEPLOYMENT and answers a bare name with a traceback. This Prefect plugin, switched on in
prefect.toml, widens one public method of Prefect's client, and only in `prefect deployment …` commands, which load the
client anyway; every other process pays for the import of this module alone. Should a later Prefect look deployments
up in another way, nothing here has an effect, and FLOW/DEPLOYMENT works as ever.
"""

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prefect.plugins import register_hook

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.responses import DeploymentResponse
    from prefect.plugins import HookContext

    Read = Callable[[PrefectClient, str], Awaitable[DeploymentResponse]]

COMMANDS = {"deployment", "deployments"}


@register_hook
def setup_environment(*, ctx: "HookContext") -> None:  # noqa: ARG001 - Prefect calls it with this name
    """Called by Prefect while it is imported; whatever it raises is logged, and Prefect goes on."""
    if COMMANDS.isdisjoint(sys.argv):
        return
    from prefect.client.orchestration import PrefectClient  # noqa: PLC0415 - only these commands load it anyway

    read = getattr(PrefectClient, "read_deployment_by_name", None)
    if read:
        PrefectClient.read_deployment_by_name = with_bare_names(read)  # pyright: ignore[reportAttributeAccessIssue]


def with_bare_names(read: "Read") -> "Read":
    """`read`, which wants FLOW/DEPLOYMENT, for bare names too. Ends the command unless exactly one has the name."""

    async def read_deployment_by_name(client: "PrefectClient", name: str) -> "DeploymentResponse":
        if "/" in name:
            return await read(client, name)
        flows = await _flows_with_deployment(client, name)
        if len(flows) != 1:
            raise SystemExit(_which(name, flows))
        return await read(client, f"{flows[0]}/{name}")

    return read_deployment_by_name


async def _flows_with_deployment(client: "PrefectClient", name: str) -> list[str]:
    """The names of the flows that have a deployment of this name, in order."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName  # noqa: PLC0415 - as above

    named = DeploymentFilter(name=DeploymentFilterName(any_=[name]))
    return sorted(flow.name for flow in await client.read_flows(deployment_filter=named))


def _which(name: str, flows: list[str]) -> str:
    if not flows:
        return (
            f"No deployment is called {name!r}; see `prefect deployment ls`, or make ours with `prefect deploy --all`."
        )
    return f"Several deployments are called {name!r}; name one of: {', '.join(f'{flow}/{name}' for flow in flows)}"
