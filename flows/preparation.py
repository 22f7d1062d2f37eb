"""The flow of any preparation kind.

A flow's parameters are the blend, the output folder and the settings of its kind, with their types, bounds, defaults and
descriptions.
"""

from collections.abc import Callable, Mapping
from typing import Any

from prefect.utilities.annotations import quote
from tokenmill.tasks.blend.models import ROW_KEYS, Blend, DataSource
from tokenmill.tasks.report.stage import report
from tokenmill.tasks.shards.kind import Kind
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.shards.stage import materializing, shard_workers, step_task
from tokenmill.tasks.sources.forms import with_keys
from tokenmill.tasks.strict import Place, parse, with_parameters_of

from .prefect_server import ServedFlow, flow
from .run import PUBLISH, Steps, run_steps


def prepare(kind: Kind[Any, Any], blend: Blend, settings: PreparationSettings, output_dir: str) -> dict[str, Any]:
    """Prepare a blend within a flow, each step a task, and return the artifact record."""
    whole: Any = quote  # without it, Prefect would look for futures in every receipt

    def call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - see Steps
        made = materializing(blend, output_dir) if name == PUBLISH else step_task(name)
        return made(function)(*map(whole, arguments))

    def told(manifest: Manifest, place: str, known: Mapping[str, Receipt]) -> dict[str, Any]:
        return report(whole(manifest), place, whole(known))

    return run_steps(kind, blend, settings, output_dir, Steps(call, shard_workers, told))


def preparation_flow(kind: Kind[Any, Any] | str) -> ServedFlow[..., dict[str, Any]]:
    """Return the flow of a kind, given by name or as it is."""
    kind = preparation(kind) if isinstance(kind, str) else kind
    of_rows = {name: DataSource.model_fields[name] for name in ROW_KEYS if name not in kind.settings.model_fields}

    @with_parameters_of(DataSource, without=DataSource.model_fields.keys() - of_rows.keys())
    @with_parameters_of(kind.settings, without=kind.hidden)
    def run(blend: Blend | str, output_dir: Place, **chosen: object) -> dict[str, Any]:
        """Prepare a blend.

        Args:
            blend: The blend, the path or URI of its JSON file, or a data file or Hub dataset in its place.
            output_dir: Folder or URI for blend.json, the prepared data and the manifest.
        """
        # Prefect passes every parameter, so one at its default counts as not given.
        given = {name: chosen.pop(name) for name in of_rows if name in chosen}
        keys = {
            name: value
            for name, value in given.items()
            if value != of_rows[name].get_default(call_default_factory=True)
        }
        made = with_keys(kind.read_blend(blend), blend, keys)
        return prepare(kind, made, parse(kind.settings, chosen, "settings"), output_dir)

    return flow(name=KINDS[kind.name].flow, description=KINDS[kind.name].summary)(run)
