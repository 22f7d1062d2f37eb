"""The steps of any preparation:

plan ─► the stages of its kind (each mapped over Dask) ─► publish ─► report

A Prefect flow runs them as tasks (`preparation`). A command runs them directly if no Prefect server could show them (`direct`).
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.shards.kind import BuildShards, Kind, Needs
from tokenmill.tasks.shards.progress import say
from tokenmill.tasks.shards.publication import failure_recorded
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.settings import ClusterSettings, PreparationSettings

PUBLISH = "publish"
"""The step that publishes."""


@dataclass(frozen=True, slots=True)
class Steps:
    """How to run the steps: `call` plans and publishes (it gets a name, a function and its arguments), `workers` builds on a cluster,
    `report` makes the artifact record.
    """

    call: Callable[..., Any]
    workers: Callable[[ClusterSettings, Needs], AbstractContextManager[BuildShards]]
    report: Callable[[Manifest, str, Mapping[str, Receipt]], dict[str, Any]]


def run_steps(
    kind: Kind[Any, Any], blend: Blend, settings: PreparationSettings, output_dir: str, steps: Steps
) -> dict[str, Any]:
    """Prepare a blend, and return the artifact record."""
    started = time.time()
    planned = steps.call("plan", kind.plan, blend, settings, output_dir)
    record_failure = failure_recorded(planned.output_dir, kind.header(planned), planned.plan.store.place)
    with record_failure if kind.records_failure else nullcontext():
        with steps.workers(settings, replace(kind.needs(planned), libraries=tuple(kind.libraries))) as build_shards:
            planned = kind.build(planned, build_shards)
        say("publish: linking shards into the output folder, writing the manifest and the report")
        manifest = steps.call(PUBLISH, kind.publish, planned, started)
    # Published data stays if its report fails or a limit rejects it: both come last.
    record = steps.report(manifest, planned.output_dir, planned.receipts)
    kind.accept(manifest, planned.output_dir)
    return record
