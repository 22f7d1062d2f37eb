"""`prefect deployment run pretrain-data-prep`: the bare name of a deployment is enough if it is unique.

Prefect requires FLOW/DEPLOYMENT, and a bare name gives a traceback. This Prefect plugin, switched on in
prefect.toml, extends one public method of Prefect's client, and only in `prefect deployment …` commands. It imports
only modules that `import prefect` has already loaded. If a later Prefect looks deployments up differently,
it isn't used, and FLOW/DEPLOYMENT still works. For `prefect deploy` see `flows.deployed_choices`.
"""

import sys
from collections.abc import Callable, Coroutine
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.plugins import HookContext, register_hook

Read = Callable[[PrefectClient, str], Coroutine[Any, Any, DeploymentResponse]]


@register_hook
def setup_environment(*, ctx: HookContext) -> None:  # noqa: ARG001 - Prefect passes it by this name
    """Prefect calls this while it is imported; it logs any exception and continues."""
    read: Read | None = getattr(PrefectClient, "read_deployment_by_name", None)
    if read and not {"deployment", "deployments"}.isdisjoint(sys.argv):
        PrefectClient.read_deployment_by_name = with_bare_names(read)  # pyright: ignore[reportAttributeAccessIssue]
    if "deploy" in sys.argv:
        from .deployed_choices import keep_choices  # noqa: PLC0415 - only for this command

        keep_choices()


def with_bare_names(read: Read) -> Read:
    """`read`, which requires FLOW/DEPLOYMENT, extended to bare names. Ends the command unless exactly one has the name."""

    async def read_deployment_by_name(client: PrefectClient, name: str) -> DeploymentResponse:
        if "/" in name:
            return await read(client, name)
        named = DeploymentFilter(name=DeploymentFilterName(any_=[name]))
        flows = sorted(flow.name for flow in await client.read_flows(deployment_filter=named))
        if not flows:
            raise SystemExit(
                f"No deployment is called {name!r}; list them with `prefect deployment ls`, or create ours with `tokenmill deploy`."
            )
        if len(flows) > 1:
            named_so = ", ".join(f"{flow}/{name}" for flow in flows)
            raise SystemExit(f"Several deployments are called {name!r}; name one of: {named_so}")
        return await read(client, f"{flows[0]}/{name}")

    return read_deployment_by_name
