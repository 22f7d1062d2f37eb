"""Many runs of one deployment at once: a work pool, a worker that starts them all, and runs in folders of their own."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from tests.flows.cloning import REPOSITORY
from tests.flows.prefect_commands import PREFECT, PrefectServer, running
from tests.preparing import blend_of, write_lines

POOL = "many"


@dataclass(frozen=True)
class Deployed:
    """The deployment of pretraining on a server, with a worker that asks for runs every second."""

    server: PrefectServer
    id: UUID

    def start(self, blend: Path, folders: Sequence[Path], **settings) -> list[UUID]:
        """A run for each output folder, all at once."""
        with self.server.client() as client:
            return [
                client.create_flow_run_from_deployment(
                    self.id, parameters={"blend": str(blend), "output_dir": str(folder), **settings}
                ).id
                for folder in folders
            ]

    def states(self, runs: Sequence[UUID]) -> Counter[str]:
        """How many of the runs are in each state."""
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=list(runs)))
        with self.server.client() as client:
            return Counter(run.state.name for run in client.read_flow_runs(flow_run_filter=chosen))


@contextmanager
def deployed(server: PrefectServer, folder: Path):
    """Deploy pretraining, and start a worker that logs to `folder`."""
    with server.client() as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        flow = client.create_flow_from_name("pretrain-data-prep")
        pull = {"prefect.deployments.steps.set_working_directory": {"directory": str(REPOSITORY)}}
        place = {"entrypoint": "tokenmill.flows.pretrain.pretrain_data_prep", "pull_steps": [pull]}
        found = client.create_deployment(flow, "pretrain-data-prep", work_pool_name=POOL, **place)
    environment = server.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_PLUGINS_ENABLED": "false"}
    with running([PREFECT, "worker", "start", "--pool", POOL], environment, folder, folder / "worker.log"):
        yield Deployed(server, found)


def small_blend(folder: Path, rows: int) -> Path:
    """A blend of rows of some 250 bytes."""
    source = write_lines(folder / "rye.jsonl", [f"rye {number} " + "grain " * 40 for number in range(rows)])
    path = folder / "blend.json"
    path.write_text(json.dumps(blend_of(source)))
    return path
