"""`prefect deploy` on a server that already has the deployments: keep the changes made there.

Prefect resets a deployment to prefect.yaml every time: it resumes paused deployments, switches off schedules declared
with `active: false`, and resets parameters. This module applies only what changed in prefect.yaml since the last
deployment. Pauses and existing schedules are kept. It also closes the parameter schema of tokenmill's flows.

A Prefect variable per deployment stores digests of the applied choices.
"""

import json
import sys
from collections.abc import Callable, Coroutine, Mapping
from hashlib import sha256
from typing import Any, cast
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.variables import Variable

FIELDS = {"tags", "concurrency_limit", "concurrency_options", "job_variables"}
"""Fields that users can change on a server besides parameters, schedules and the pause."""

Values = Mapping[str, Mapping[str, Any]]
"""Values by name, for `parameters` and for `fields`."""

Create = Callable[..., Coroutine[Any, Any, UUID]]
Update = Callable[[PrefectClient, UUID, DeploymentUpdate], Coroutine[Any, Any, None]]


def keep_choices() -> None:
    """Wrap the methods of Prefect's client that create and update deployments."""
    create: Create | None = getattr(PrefectClient, "create_deployment", None)
    update: Update | None = getattr(PrefectClient, "update_deployment", None)
    if create and update:
        PrefectClient.create_deployment = recording(create)  # pyright: ignore[reportAttributeAccessIssue]
        PrefectClient.update_deployment = keeping(update)  # pyright: ignore[reportAttributeAccessIssue]


def recording(create: Create) -> Create:
    """`create`, recording the declared values."""

    async def create_deployment(client: PrefectClient, **fields: Any) -> UUID:  # noqa: ANN401 - those of Prefect
        schema = closed(fields.pop("parameter_openapi_schema", None), fields.get("entrypoint"))
        deployment_id = await create(client, parameter_openapi_schema=schema, **fields)
        declared = {name: value for name, value in fields.items() if name in {"parameters", *FIELDS}}
        await _record(deployment_id, fields["name"], _declared(DeploymentUpdate(**declared)))
        return deployment_id

    return create_deployment


def keeping(update: Update) -> Update:
    """`update`, applying only declared values that changed, and recording them."""

    async def update_deployment(client: PrefectClient, deployment_id: UUID, deployment: DeploymentUpdate) -> None:
        current = await client.read_deployment(deployment_id)
        if _declares_other_schedules(deployment, current):
            sys.stderr.write(
                f"{current.name} keeps its schedules, which differ from prefect.yaml. To apply prefect.yaml, run "
                "`prefect deployment schedule clear` and deploy again.\n"
            )
        declared = _declared(deployment)
        recorded = cast("Values | None", await Variable.aget(_variable(deployment_id)))
        limit = current.global_concurrency_limit.limit if current.global_concurrency_limit else None
        fields = current.model_dump(mode="json", include=FIELDS) | {"concurrency_limit": limit}
        applied = merged(declared, recorded, {"parameters": current.parameters, "fields": fields})
        kept = {"paused", "schedules"} if current.schedules else {"paused"}
        # A field that the update omits keeps its value on the server.
        rest = deployment.model_dump(exclude={*kept, *FIELDS, "parameters"}, exclude_unset=True)
        rest["parameter_openapi_schema"] = closed(rest.get("parameter_openapi_schema"), deployment.entrypoint)
        await update(
            client, deployment_id, DeploymentUpdate(**rest, parameters=applied["parameters"], **applied["fields"])
        )
        await _record(deployment_id, current.name, declared)

    return update_deployment


def closed(schema: Mapping[str, Any] | None, entrypoint: str | None) -> dict[str, Any] | None:
    """Return the parameter schema so that a server rejects a misspelt one, which would crash the run. Other flows may take any."""
    if not schema or not str(entrypoint).startswith("tokenmill."):
        return dict(schema) if schema else None
    return {**schema, "additionalProperties": False}


def merged(declared: Values, recorded: Values | None, current: Values) -> dict[str, dict[str, Any]]:
    """Return the `current` values of the server, overwritten by `declared` values whose digest differs from the `recorded` one.

    Before the first deployment (`recorded` is None), all `declared` values.
    """
    if recorded is None:
        return {part: dict(values) for part, values in declared.items()}
    found: dict[str, dict[str, Any]] = {}
    for part, values in declared.items():
        now, before = digests(values), recorded[part]
        changed = {name for name in {**now, **before} if now.get(name) != before.get(name)}
        kept = {name: value for name, value in current[part].items() if name not in changed}
        found[part] = kept | {name: value for name, value in values.items() if name in changed}
    return found


def _declared(deployment: DeploymentUpdate) -> Values:
    return {"parameters": deployment.parameters or {}, "fields": deployment.model_dump(mode="json", include=FIELDS)}


def _declares_other_schedules(deployment: DeploymentUpdate, current: DeploymentResponse) -> bool:
    existing = [schedule.schedule for schedule in current.schedules]
    return bool(existing) and any(schedule.schedule not in existing for schedule in deployment.schedules or [])


def digests(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest per value, because a Prefect variable holds at most 5,000 characters."""
    written = {name: json.dumps(value, sort_keys=True).encode() for name, value in values.items()}
    return {name: sha256(data).hexdigest()[:16] for name, data in written.items()}


async def _record(deployment_id: UUID, name: str, declared: Values) -> None:
    recorded = {part: digests(values) for part, values in declared.items()}
    await Variable.aset(_variable(deployment_id), cast("Any", recorded), tags=["prefect.yaml", name], overwrite=True)


def _variable(deployment_id: UUID) -> str:
    return f"declared-{deployment_id}"
