"""A night: every blend whose sources or settings changed is prepared again, as its next version.

compare ─► prepare ─► latest.json    for each blend, one after the other
prune ─► summary

Nights that overlap take turns: the later one waits for the store, then finds the work done. An object store cannot make
anybody wait: there, each makes a version of its own. A blend that fails stops no other; the run fails in the end and names
it, and `latest.json` still leads to the version before.
"""

import time
from typing import Annotated, Any, cast

from prefect import Flow
from prefect.client.schemas.objects import State
from pydantic import Field
from tokenmill.tasks.errors import PartlyFailedError
from tokenmill.tasks.nightly.blends import NightlyBlend, find_blends
from tokenmill.tasks.nightly.compare import Comparison, store_of
from tokenmill.tasks.nightly.outcome import Outcome, failures, night_record
from tokenmill.tasks.nightly.prune import GRACE_SECONDS, alone_with
from tokenmill.tasks.nightly.stage import announce, claim, compare, error_of, follow_version, prune, summarize
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.sources.discovery import require_no_overlap
from tokenmill.tasks.storage import absolute
from tokenmill.tasks.strict import Place

from .harmony import harmony_normalize
from .output_folder import publishing
from .prefect_server import flow
from .pretrain import pretrain_data_prep
from .rl import rl_data_prep
from .sft import sft_data_prep

DEFAULT = PreparationSettings()

PREPARATIONS: dict[str, Flow[..., dict[str, Any]]] = {
    "pretrain": pretrain_data_prep,
    "sft": sft_data_prep,
    "rl": rl_data_prep,
    "harmony": harmony_normalize,
}


@flow(name="reprep-changed-blends", persist_result=False)
@publishing
def reprep_changed_blends(
    blends: Place,
    output_dir: Place,
    keep: Annotated[int, Field(ge=1)] = 7,
    grace_seconds: Annotated[float, Field(ge=0)] = GRACE_SECONDS,
    also_keep: list[Place] | None = None,
    cluster: str = DEFAULT.cluster,
    workers: Annotated[int | None, Field(ge=1)] = DEFAULT.workers,
) -> dict[str, Any]:
    """Prepare the next version of every blend that changed, and remove what is out of date.

    Args:
        blends: Folder or URI with blends in folders named after their kind: pretrain, sft, rl, harmony.
        output_dir: Where `<kind>/<blend>/<version>/` and the shards that all share go.
        keep: How many versions of each blend stay.
        grace_seconds: How old a shard that no version refers to must be before it is removed.
        also_keep: Versions, names of versions (art://), and other outputs of the same store that stay with their shards.
        cluster: Where blends are prepared that do not say so themselves.
        workers: Worker processes for those.
    """
    output_dir = absolute(output_dir)
    under = {"cluster": cluster, "workers": workers}
    require_no_overlap("blends", blends, {"the output folder": output_dir})
    found = find_blends(blends)
    with alone_with(store_of(output_dir)):
        outcomes = [_brought_up_to_date(blend, output_dir, under) for blend in found]
        pruned = error_of(prune(output_dir, keep, grace_seconds, also_keep or [], return_state=True))
    summarize(outcomes)
    record = night_record(outcomes, output_dir, pruned)
    if failed := "; ".join(filter(None, [failures(outcomes), pruned and f"pruning failed: {pruned}"])):
        raise PartlyFailedError(failed, record)
    return record


def _brought_up_to_date(blend: NightlyBlend, output_dir: str, under: dict[str, Any]) -> Outcome:
    """What became of a blend; whatever goes wrong ends in the state of a task or flow run, and not here."""
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
    return _prepared(compared)


def _prepared(compared: Comparison) -> Outcome:
    blend = compared.blend
    prepare = PREPARATIONS[blend.kind].with_options(flow_run_name=f"{blend.name}-{compared.version}")
    state = cast("State[Any]", prepare(blend.path, compared.path, return_state=True, **compared.chosen))
    if error := error_of(state):
        return _failed(blend, error, compared)
    record = state.result()
    if error := error_of(follow_version(compared, record, return_state=True)):
        return _failed(blend, error, compared)
    shards = record[blend.kind]["shards"]
    announce(blend, "prepared", compared.version, compared.reasons, path=compared.path, shards=shards)
    return Outcome(blend, "prepared", compared.version, compared.reasons, shards)


def _failed(blend: NightlyBlend, error: str, compared: Comparison | None = None) -> Outcome:
    version, reasons = (compared.before, compared.reasons) if compared else (None, [])
    announce(blend, "failed", version or "-", reasons, error=error)
    return Outcome(blend, "failed", version, reasons, error=error)
