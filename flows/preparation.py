"""The flow of any kind of preparation, and its steps:

plan ─► build shards (mapped over Dask) ─► publish ─► report

A flow's parameters are the blend, the output folder and the settings of its kind, with their types, bounds, defaults and
descriptions.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, cast

import orjson
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.stage import report
from tokenmill.tasks.shards.input_checks import check_inputs
from tokenmill.tasks.shards.preparation import KINDS, Preparation, preparation
from tokenmill.tasks.shards.publication import failure_recorded
from tokenmill.tasks.shards.publish import publish
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.shards.stage import shard_workers, step_task
from tokenmill.tasks.storage import absolute
from tokenmill.tasks.strict import Place, parse, with_parameters_of

from .output_folder import publishing
from .prefect_server import ServedFlow, flow


def prepare(
    kind: Preparation[Any, Any], blend: Blend, settings: PreparationSettings, output_dir: str
) -> dict[str, Any]:
    """Prepare a blend within a flow, and return the artifact record."""
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


def function_of(name: str) -> Callable[..., dict[str, Any]]:
    """The function that prepares a blend or rows from Python. Raises InputError and RunError as the command does."""

    def prepare_data(
        data: Blend | dict[str, Any] | str | Iterable[Mapping[str, Any]], output_dir: str, **settings: object
    ) -> dict[str, Any]:
        named = data if isinstance(data, (str, Blend, dict)) else blend_of_rows(data, output_dir)
        blend = preparation(name).read_blend(cast("Blend | Mapping[str, Any] | str", named))
        check_inputs(blend, cast("str | None", settings.get("store")), output_dir)
        return preparation_flow(name)(blend, output_dir, **settings)

    prepare_data.__name__, prepare_data.__doc__ = name, KINDS[name].summary
    return prepare_data


def blend_of_rows(rows: Iterable[object], output_dir: str) -> dict[str, Any]:
    """A blend of one data set, `rows`, which are written beside the output folder: OUT.rows.jsonl.

    Raises InputError for a row that is not a JSON object.
    """
    place = f"{absolute(output_dir)}.rows.jsonl"
    with publish(place) as file:
        for number, row in enumerate(rows, 1):
            file.write(_line(row, number))
    return {"datasets": [{"name": "rows", "path": place}]}


def _line(row: object, number: int) -> bytes:
    try:
        if isinstance(row, Mapping):
            return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InputError(f"row {number}: {error}; rows must hold JSON values") from error
    raise InputError(f"row {number}: {type(row).__name__}, not a dict; give rows as dicts, such as {{'text': '…'}}")


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
