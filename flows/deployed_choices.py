"""`prefect deploy` on a server that has the deployments already: changes made there are kept.

Prefect resets a deployment to prefect.yaml every time: it resumes paused deployments, switches off schedules declared
with `active: false`, and resets parameters. This module applies only what changed in prefect.yaml since the last
deployment. Pauses stay, and so do existing schedules.

A Prefect variable per deployment stores digests of what was applied.
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
"""What else people can change on a server, beside parameters, schedules and the pause."""

Values = Mapping[str, Mapping[str, Any]]
"""Values by name, for `parameters` and for `fields`."""

Create = Callable[..., Coroutine[Any, Any, UUID]]
Update = Callable[[PrefectClient, UUID, DeploymentUpdate], Coroutine[Any, Any, None]]


def keep_choices() -> None:
    """Wrap the methods of Prefect's client that create and update deployments."""
    create: Create | None = getattr(PrefectClient, "create_deployment", None)
    update: Update | None = getattr(PrefectClient, "update_deployment", None)
    if create and update:
        PrefectClient.create_deployment = noting(create)  # pyright: ignore[reportAttributeAccessIssue]
        PrefectClient.update_deployment = keeping(update)  # pyright: ignore[reportAttributeAccessIssue]


def noting(create: Create) -> Create:
    """`create`, recording what is declared."""

    async def create_deployment(client: PrefectClient, **fields: Any) -> UUID:  # noqa: ANN401 - those of Prefect
        deployment_id = await create(client, **fields)
        declared = {name: value for name, value in fields.items() if name in {"parameters", *FIELDS}}
        await _note(deployment_id, fields["name"], _declared(DeploymentUpdate(**declared)))
        return deployment_id

    return create_deployment


def keeping(update: Update) -> Update:
    """`update`, applying only declarations that changed, and recording them."""

    async def update_deployment(client: PrefectClient, deployment_id: UUID, deployment: DeploymentUpdate) -> None:
        current = await client.read_deployment(deployment_id)
        if _declares_other_schedules(deployment, current):
            sys.stderr.write(
                f"{current.name} keeps its schedules, which differ from prefect.yaml. To apply prefect.yaml, run "
                "`prefect deployment schedule clear` and deploy again.\n"
            )
        declared = _declared(deployment)
        applied = merged(declared, await _noted(deployment_id), _standing(current))
        stays = {"paused", "schedules"} if current.schedules else {"paused"}
        rest = deployment.model_dump(exclude={*stays, *FIELDS, "parameters"}, exclude_unset=True)
        await update(
            client, deployment_id, DeploymentUpdate(**rest, parameters=applied["parameters"], **applied["fields"])
        )
        await _note(deployment_id, current.name, declared)

    return update_deployment


def merged(declared: Values, noted: Values | None, standing: Values) -> dict[str, dict[str, Any]]:
    """`standing` values of the server, overwritten by `declared` values whose digest is not the one `noted`.

    Before the first deployment (`noted` is None), all `declared` values.
    """
    if noted is None:
        return {part: dict(values) for part, values in declared.items()}
    return {part: _merged(values, noted[part], standing[part]) for part, values in declared.items()}


def _merged(declared: Mapping[str, Any], noted: Mapping[str, str], standing: Mapping[str, Any]) -> dict[str, Any]:
    now = digests(declared)
    anew = {name for name in {**now, **noted} if now.get(name) != noted.get(name)}
    stays = {name: value for name, value in standing.items() if name not in anew}
    return stays | {name: value for name, value in declared.items() if name in anew}


def _declared(deployment: DeploymentUpdate) -> Values:
    return {"parameters": deployment.parameters or {}, "fields": deployment.model_dump(mode="json", include=FIELDS)}


def _standing(current: DeploymentResponse) -> Values:
    limit = current.global_concurrency_limit.limit if current.global_concurrency_limit else None
    fields = current.model_dump(mode="json", include=FIELDS) | {"concurrency_limit": limit}
    return {"parameters": current.parameters, "fields": fields}


def _declares_other_schedules(deployment: DeploymentUpdate, current: DeploymentResponse) -> bool:
    there = [schedule.schedule for schedule in current.schedules]
    return bool(there) and any(schedule.schedule not in there for schedule in deployment.schedules or [])


def digests(values: Mapping[str, Any]) -> dict[str, str]:
    """A digest per value, because a Prefect variable holds at most 5,000 characters."""
    written = {name: json.dumps(value, sort_keys=True).encode() for name, value in values.items()}
    return {name: sha256(data).hexdigest()[:16] for name, data in written.items()}


async def _note(deployment_id: UUID, name: str, declared: Values) -> None:
    noted = {part: digests(values) for part, values in declared.items()}
    await Variable.aset(_variable(deployment_id), cast("Any", noted), tags=["prefect.yaml", name], overwrite=True)


async def _noted(deployment_id: UUID) -> Values | None:
    return cast("Values | None", await Variable.aget(_variable(deployment_id)))


def _variable(deployment_id: UUID) -> str:
    return f"declared-{deployment_id}"
