"""The flow of any kind of preparation, and what it does:

plan ─► build shards (mapped over Dask) ─► publish ─► report

A flow's parameters are the blend, the output folder and the settings of its kind, with their types, bounds, defaults and
descriptions.
"""

import time
from contextlib import nullcontext
from typing import Any

from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.report.stage import report
from tokenmill.tasks.shards.preparation import KINDS, Preparation, preparation
from tokenmill.tasks.shards.publication import failure_recorded
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.shards.stage import shard_workers, step_task
from tokenmill.tasks.strict import Place, parse, with_parameters_of

from .output_folder import publishing
from .prefect_server import ServedFlow, flow


def prepare(
    kind: Preparation[Any, Any], blend: Blend, settings: PreparationSettings, output_dir: str
) -> dict[str, Any]:
    """Prepare a blend, within a flow; the artifact record."""
    started = time.time()
    planned = step_task("plan")(kind.plan)(blend, settings, output_dir)
    record_failure = failure_recorded(planned.output_dir, kind.header(planned), planned.plan.store.place)
    with record_failure if kind.records_failure else nullcontext():
        with shard_workers(settings.cluster, kind.needs(planned)) as build_shards:
            planned = kind.build(planned, build_shards)
        manifest = step_task("publish")(kind.publish)(planned, started)
    record = report(manifest, planned.output_dir)
    kind.accept(manifest, planned.output_dir)
    return record


def preparation_flow(name: str) -> ServedFlow[..., dict[str, Any]]:
    """The flow of a kind."""
    kind = preparation(name)

    @publishing
    @with_parameters_of(kind.settings, without=kind.hidden)
    def run(blend: Blend | str, output_dir: Place, **chosen: object) -> dict[str, Any]:  # noqa: D417 - settings describe themselves
        """Prepare a blend.

        Args:
            blend: The blend, or the path or URI of its JSON file.
            output_dir: Where blend.json, what is prepared, and the manifest go.
        """
        return prepare(kind, kind.read_blend(blend), parse(kind.settings, chosen, "settings"), output_dir)

    return flow(name=KINDS[name].flow, description=KINDS[name].summary)(run)
