"""Report preparations to OpenLineage collectors if OPENLINEAGE_URL or a different client variable is set.

A START and a COMPLETE event have the input and output datasets, their sizes, and the times. The client sends them to an HTTP end
point (OPENLINEAGE_URL) or writes them to a file (OPENLINEAGE__TRANSPORT__TYPE=file and OPENLINEAGE__TRANSPORT__LOG_FILE_PATH).
Names follow OpenLineage's naming: `file` and the path, or the bucket and the key.
"""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from tokenmill.tasks.blend.models import listed_sources
from tokenmill.tasks.errors import InputError, RunError, pip_install
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.storage import absolute

NAMESPACE, PRODUCER = "tokenmill", "https://pypi.org/project/tokenmill"


def tell_if_asked(manifest: Manifest, output_dir: str, warn: Callable[[str], object]) -> None:
    """Send the events if the client is configured; failures are passed to `warn`, and never roll back a publication."""
    if not any(name.startswith("OPENLINEAGE_") for name in os.environ):
        return
    try:
        tell(manifest, output_dir)
    except (InputError, RunError) as error:
        warn(f"could not send the OpenLineage event: {error}")


def tell(manifest: Manifest, output_dir: str) -> None:
    """Send both events. Raises InputError if the client is not installed, and RunError if they cannot be sent."""
    try:
        from openlineage.client import OpenLineageClient
    except ImportError as error:
        raise InputError(
            f"an OPENLINEAGE_ variable is set, but the client isn't installed: {pip_install('openlineage')}, or unset it"
        ) from error
    try:
        client = OpenLineageClient()
        for event in events(manifest, output_dir):
            client.emit(event)
        client.close()
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise RunError(f"{error}; check the OPENLINEAGE_ variables and the end point") from error


def events(manifest: Manifest, output_dir: str) -> list[Any]:
    """Return the RunEvents of a preparation, START and COMPLETE."""
    # Imported here, because few runs report, and the client takes 0.3 s
    from openlineage.client import set_producer
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
    from openlineage.client.generated.input_statistics_input_dataset import InputStatisticsInputDatasetFacet
    from openlineage.client.generated.output_statistics_output_dataset import OutputStatisticsOutputDatasetFacet
    from openlineage.client.generated.processing_engine_run import ProcessingEngineRunFacet
    from openlineage.client.uuid import generate_new_uuid

    set_producer(PRODUCER)
    totals, end = manifest["totals"], manifest["volatile"]["created_at"]
    inputs: list[InputDataset] = []
    for split, sources in listed_sources(manifest["blend"]).items():
        for source in sources:
            counts = totals["datasets"].get(f"{split}/{source['name']}", {})
            size = InputStatisticsInputDatasetFacet(counts.get("rows"), counts.get("source_bytes"))
            inputs.append(InputDataset(*named(source["path"]), {"inputStatistics": size}))
    written = OutputStatisticsOutputDatasetFacet(totals["documents"])
    shared: dict[str, Any] = {
        "run": Run(str(generate_new_uuid()), {"processing_engine": ProcessingEngineRunFacet(version("tokenmill"), "tokenmill")}),
        "job": Job(NAMESPACE, f"{manifest['type']} {absolute(output_dir)}"),
        "inputs": inputs,
        "outputs": [OutputDataset(*named(output_dir), {"outputStatistics": written})],
    }  # fmt: skip
    # Both are sent at the end, when the sizes are known
    times = {RunState.START: end - manifest["volatile"]["seconds"], RunState.COMPLETE: end}
    return [
        RunEvent(eventType=state, eventTime=datetime.fromtimestamp(when, UTC).isoformat(), **shared)
        for state, when in times.items()
    ]


def named(place: str) -> tuple[str, str]:
    """Return the namespace and name of a path or URI."""
    scheme, separator, rest = absolute(place).partition("://")
    if not separator:
        return "file", scheme
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key or "/"
