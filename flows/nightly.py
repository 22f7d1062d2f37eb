"""A nightly run: prepare a new version of every blend whose sources or settings changed.

compare ─► prepare ─► latest.json    for each blend, one after the other
prune ─► summary

Overlapping runs take turns: the later one waits for the store, then finds the work done. Object stores lack locks, so
there each makes its own version. A failed blend doesn't stop others; the run fails at the end and names it, and `latest.json`
still points to the previous version.
"""

import time
from typing import Annotated, Any, cast

from prefect.client.schemas.objects import State
from pydantic import Field
from tokenmill.tasks.errors import PartlyFailedError
from tokenmill.tasks.nightly.blends import NightlyBlend, find_blends
from tokenmill.tasks.nightly.night import Comparison, Outcome, failures, night_record, store_of
from tokenmill.tasks.nightly.prune import GRACE_SECONDS, alone_with
from tokenmill.tasks.nightly.stage import announce, claim, compare, error_of, follow_version, prune, summarize
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.sources.discovery import require_no_overlap
from tokenmill.tasks.storage import absolute
from tokenmill.tasks.strict import Place

from .prefect_server import flow
from .preparation import preparation_flow

DEFAULT = PreparationSettings()


@flow(name="reprep-changed-blends")
def reprep_changed_blends(
    blends: Place,
    output_dir: Place,
    keep_versions: Annotated[int, Field(ge=1)] = 7,
    grace_seconds: Annotated[float, Field(ge=0)] = GRACE_SECONDS,
    also_keep: list[Place] | None = None,
    cluster: str = DEFAULT.cluster,
    workers: Annotated[int | None, Field(ge=1)] = DEFAULT.workers,
) -> dict[str, Any]:
    """Prepare a new version of every blend that changed, and remove outdated versions.

    Args:
        blends: Folder or URI with blends in folders named after their kind: pretrain, sft, rl, harmony.
        output_dir: Where `<kind>/<blend>/<version>/` and the shared shards go.
        keep_versions: Versions to keep of each blend.
        grace_seconds: Keep unused shards that are younger than this.
        also_keep: Other versions, names (art://) and outputs of the same store to keep with their shards.
        cluster: The cluster for blends that name none.
        workers: Worker processes for blends that set no number.
    """
    output_dir = absolute(output_dir)
    under = {"cluster": cluster, "workers": workers}
    require_no_overlap("blends", blends, {"the output folder": output_dir})
    found = find_blends(blends)
    with alone_with(store_of(output_dir)):
        outcomes = [_update(blend, output_dir, under) for blend in found]
        # A removal that fails leaves the new versions as they are.
        pruned = error_of(prune(output_dir, keep_versions, grace_seconds, also_keep or [], return_state=True))
    summarize(outcomes)
    record = night_record(outcomes, output_dir, pruned)
    if failed := "; ".join(filter(None, [failures(outcomes), pruned and f"pruning failed: {pruned}"])):
        raise PartlyFailedError(failed, record)
    return record


def _update(blend: NightlyBlend, output_dir: str, under: dict[str, Any]) -> Outcome:
    """The outcome for a blend; failures end in the state of a task or flow run."""
    # States instead of exceptions: a blend that fails must not end the night.
    state = compare(blend, output_dir, under, time.time(), return_state=True)
    if error := error_of(state):
        return _failed(blend, error)
    compared: Comparison = state.result()
    if not compared.reasons:
        return Outcome(blend, "unchanged", compared.before)
    state = claim(compared, time.time(), return_state=True)
    if error := error_of(state):
        return _failed(blend, error, compared)
    compared = state.result()
    announce(blend, "changed", compared.version, compared.reasons)
    prepare = preparation_flow(blend.kind).with_options(flow_run_name=f"{blend.name}-{compared.version}")
    state = cast("State[Any]", prepare(blend.path, compared.path, return_state=True, **compared.chosen))
    if error := error_of(state):
        return _failed(blend, error, compared)
    record = state.result()
    if error := error_of(follow_version(compared, record, return_state=True)):
        return _failed(blend, error, compared)
    shards = record[blend.kind]["shards"]
    announce(
        blend, "prepared", compared.version, compared.reasons, path=compared.path, shards=shards, diff=compared.diff
    )
    return Outcome(blend, "prepared", compared.version, compared.reasons, shards, diff=compared.diff)


def _failed(blend: NightlyBlend, error: str, compared: Comparison | None = None) -> Outcome:
    version, reasons = (compared.before, compared.reasons) if compared else (None, [])
    announce(blend, "failed", version or "-", reasons, error=error)
    return Outcome(blend, "failed", version, reasons, error=error)
