"""`tokenmill deploy`: the deployments of prefect.yaml, on a Prefect server, from a clone or an installed tokenmill.

A folder without a prefect.yaml gets prefect.yaml, prefect.toml and the small blends they name, ready to edit.
`prefect deploy --all` does the rest.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.workers.process import ProcessWorker
from rich.console import Console
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.publish import publish_bytes

from .prefect_server import prefect_server

DECLARED = "prefect.yaml"
SETTINGS = "prefect.toml"
BLENDS = ("blends/tiny*.json", "blends/tiny/*", "blends/nightly/*/*")

PACKAGE = Path(__file__).parents[1]
"""The package has prefect.yaml, prefect.toml and the blends in its folder, as a clone has them in its root."""


def write_project(folder: Path) -> list[str]:
    """Write prefect.yaml, prefect.toml and blends into a folder without prefect.yaml; returns the written names.

    Existing files are kept. prefect.yaml is written last, so that the next call completes an interrupted one.
    """
    if (folder / DECLARED).exists():
        return []
    blends = [path for pattern in BLENDS for path in sorted(PACKAGE.glob(pattern)) if path.is_file()]
    files = {str(path.relative_to(PACKAGE)): path for path in blends}
    files |= {name: PACKAGE / name for name in (SETTINGS, DECLARED)}
    missing = {name: path for name, path in files.items() if not (folder / name).exists()}
    for name, path in missing.items():
        publish_bytes(str(folder / name), path.read_bytes())
    return list(missing)


def require_server() -> None:
    """Raises InputError unless a Prefect server is configured."""
    if PREFECT_API_URL.value() is None:
        raise InputError(
            "PREFECT_API_URL: no Prefect server is configured; start one with `prefect server start`, then run "
            "`prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )


def deploy(folder: Path) -> dict[str, DeploymentResponse]:
    """Create missing work pools and apply the prefect.yaml of a folder; returns the deployments by full name.

    Changes made on the server are kept (see `flows.deployed_choices`). Raises InputError when no server answers or
    prefect.yaml lists no deployments, and RunError when Prefect fails.
    """
    declared = _declared(folder)
    with prefect_server(), get_client(sync_client=True) as client:
        for name in {pool["name"] for each in declared if (pool := each.get("work_pool")) and pool.get("name")}:
            try:
                client.read_work_pool(name)
            except ObjectNotFound:  # its workers start runs as processes
                template = ProcessWorker.get_default_base_job_template()
                made = WorkPoolCreate(name=name, type=ProcessWorker.type, base_job_template=template)
                client.create_work_pool(made)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "prefect", "--no-prompt", "deploy", "--all"],
            cwd=folder,
            env={"DO_NOT_TRACK": "1", **os.environ, "PREFECT_PLUGINS_ENABLED": "true"},  # a plugin keeps users' changes
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RunError(f"prefect deploy --all failed in {folder}:\n{done.stdout.strip()[-2000:]}")
        named = DeploymentFilter(name=DeploymentFilterName(any_=[each["name"] for each in declared]))
        flows = {flow.id: flow.name for flow in client.read_flows(deployment_filter=named)}
        found = client.read_deployments(deployment_filter=named)
    return {f"{flows[each.flow_id]}/{each.name}": each for each in found}


def _declared(folder: Path) -> Sequence[Mapping[str, Any]]:
    try:
        found: Any = yaml.safe_load((folder / DECLARED).read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / DECLARED}: not valid YAML: {' '.join(str(error).split())}") from error
    deployments = found.get("deployments") if isinstance(found, dict) else None
    if not isinstance(deployments, list) or not all(isinstance(each, dict) and "name" in each for each in deployments):
        raise InputError(f"{folder / DECLARED}: declares no deployments with names; see Prefect's documentation")
    return cast("Sequence[Mapping[str, Any]]", deployments)


def print_deployments(deployments: Mapping[str, DeploymentResponse], terminal: Console) -> None:
    """Print how to start the workers, and how to switch on the schedules that are off."""
    terminal.print(f"{len(deployments)} deployments at {PREFECT_API_URL.value()}; their runs wait for workers:")
    for pool in sorted({each.work_pool_name for each in deployments.values() if each.work_pool_name}):
        terminal.print(f"  prefect worker start --pool {pool}", markup=False)
    for name, deployment in deployments.items():
        for schedule in deployment.schedules:
            if not schedule.active:
                terminal.print(f"a schedule of {deployment.name} is off; to switch it on:", markup=False)
                command = f"  prefect deployment schedule resume {name} {schedule.id}"
                terminal.print(command, markup=False, highlight=False, soft_wrap=True)
