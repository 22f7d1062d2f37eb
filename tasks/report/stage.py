"""A preparation's summary as Prefect artifacts."""

from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.stage import artifact_key

from .openlineage import tell_if_asked
from .page import leave_report
from .summary import artifact_record, dataset_rows, markdown, report_link, warnings
from .weights_and_biases import log_if_asked


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report(manifest: Manifest, output_dir: str, known: Mapping[str, Receipt]) -> dict[str, Any]:
    """Write the page and the cards, attach a table, a summary and a link to the page to the run, log warnings; returns the artifact record."""
    create_table_artifact(dataset_rows(manifest), artifact_key("datasets"), "rows, documents and tokens per dataset")
    create_markdown_artifact(markdown(manifest, output_dir), artifact_key("summary"), "summary of the preparation")
    for warning in warnings(manifest):
        get_run_logger().warning(warning)
    leave_report(output_dir, get_run_logger().warning, known)
    create_markdown_artifact(report_link(output_dir), artifact_key("report"), "inputs and outputs on one page")
    log_if_asked(manifest, output_dir, get_run_logger().warning)
    tell_if_asked(manifest, output_dir, get_run_logger().warning)
    return artifact_record(manifest, output_dir)
