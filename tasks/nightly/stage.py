"""Compare, follow and prune as Prefect tasks, and the events that a nightly run sends to Prefect.

Events can trigger other deployments: `tokenmill.blend.changed` before a blend is prepared, then `tokenmill.blend.prepared` or
`tokenmill.blend.failed`, of the resource `tokenmill.blend.<kind>.<name>`.
"""

from collections.abc import Sequence
from logging import ERROR, INFO
from typing import Any, Literal

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from tokenmill.tasks.shards.stage import artifact_key

from .blends import NightlyBlend
from .night import Outcome, claimed, compare_blend, follow_prepared, prune_night

Happened = Literal["changed", "prepared", "failed"]


compare = task(name="compare", task_run_name="compare-{blend.name}", cache_policy=NO_CACHE, persist_result=False)(
    compare_blend
)
claim = task(name="claim", task_run_name="claim-{compared.blend.name}", cache_policy=NO_CACHE, persist_result=False)(
    claimed
)
follow_version = task(
    name="follow", task_run_name="follow-{compared.blend.name}", cache_policy=NO_CACHE, persist_result=False
)(follow_prepared)


@task(name="prune", cache_policy=NO_CACHE, persist_result=False)
def prune(output_dir: str, keep: int, grace_seconds: float, also_keep: Sequence[str]) -> None:
    """Remove old versions, then unreferenced shards; requires the store's lock."""
    versions, shards = prune_night(output_dir, keep, grace_seconds, also_keep)
    get_run_logger().info(
        f"removed {len(versions)} old versions, and {len(shards.removable)} shards of {shards.size / 1e9:,.3f} GB that no "
        f"version refers to; {shards.young} younger ones are kept for the grace period"
    )


def announce(blend: NightlyBlend, happened: Happened, version: str, reasons: Sequence[str], **extra: object) -> None:
    """Emit an event about a blend."""
    emit_event(
        event=f"tokenmill.blend.{happened}",
        resource={
            "prefect.resource.id": f"tokenmill.blend.{blend.name.replace('/', '.')}",
            "prefect.resource.name": blend.name,
        },
        payload={"kind": blend.kind, "blend": blend.path, "version": version, "reasons": list(reasons), **extra},
    )


def error_of(state: State[Any]) -> str | None:
    """Return the error of a task or flow run, or None if it succeeded."""
    return None if state.is_completed() else str(state.result(raise_on_failure=False))


def summarize(outcomes: Sequence[Outcome]) -> None:
    """Attach a table of the blends to the run, and log a line per blend."""
    create_table_artifact([outcome.row for outcome in outcomes], artifact_key("blends"), "the result for each blend")
    for outcome in outcomes:
        row = outcome.row
        get_run_logger().log(
            ERROR if outcome.error else INFO, f"{row['blend']}: {row['result']}, {row['version']} {row['why']}".strip()
        )
