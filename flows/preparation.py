"""The flow of any kind of preparation.

A flow's parameters are the blend, the output folder and the settings of its kind, with their types, bounds, defaults and
descriptions.
"""

from typing import Any

from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.report.stage import report
from tokenmill.tasks.shards.preparation import KINDS, Preparation, preparation
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.shards.stage import shard_workers, step_task
from tokenmill.tasks.strict import Place, parse, with_parameters_of

from .output_folder import publishing
from .prefect_server import ServedFlow, flow
from .steps import Steps, run_steps


def prepare(
    kind: Preparation[Any, Any], blend: Blend, settings: PreparationSettings, output_dir: str
) -> dict[str, Any]:
    """Prepare a blend within a flow, each step a task, and return the artifact record."""
    steps = Steps(lambda name, function, *arguments: step_task(name)(function)(*arguments), shard_workers, report)
    return run_steps(kind, blend, settings, output_dir, steps)


def preparation_flow(name: str) -> ServedFlow[..., dict[str, Any]]:
    """The flow of a kind."""
    kind = preparation(name)

    @publishing
    @with_parameters_of(kind.settings, without=kind.hidden)
    def run(blend: Blend | str, output_dir: Place, **chosen: object) -> dict[str, Any]:
        """Prepare a blend.

        Args:
            blend: The blend, or the path or URI of its JSON file.
            output_dir: Folder or URI for blend.json, the prepared data and the manifest.
        """
        return prepare(kind, kind.read_blend(blend), parse(kind.settings, chosen, "settings"), output_dir)

    return flow(name=KINDS[name].flow, description=KINDS[name].summary)(run)
