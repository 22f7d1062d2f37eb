"""The front door of the room: find duplicates in rounds on Dask, and plan, write and publish a blend of text.

Each round is a mapped task of its own name, so that a run shows how far it is. They retry what may pass (storage,
network), and each try only builds what is still missing; a batch that another run has finished meanwhile ends as
`Cached`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.shards.manifest import Finished
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publication import collect
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.stage import BuildShards, build_and_announce, shard_task
from tokenmill.tasks.shards.store import Store

from .apply import apply_decisions
from .decisions import Decisions
from .deduplication import DocumentSlice, decide
from .evaluations import evaluations_from
from .harmony_shard import Deduplicated, document_slices, mark_shard, plan_marked
from .planning import DedupPlan, plan_dedup
from .preparation import publish_dedup
from .rounds import CONCERNS, KIND
from .settings import DedupChoices, DedupSettings
from .steps import build_shard


def deduplicate(
    slices: Sequence[DocumentSlice],
    choices: DedupChoices,
    store_place: str,
    build_shards: BuildShards,
    *,
    rebuild: bool,
) -> Decisions:
    """Decide what becomes of every document of the slices; what the store at `store_place` proves is not done again.

    Raises InputError for evaluations that cannot be read, RunError when a round failed.
    """

    def run(name: str, pending: Sequence[PlannedShard], common: Mapping[str, Any]) -> None:
        build_shards(ROUNDS[name], pending, common)

    return decide(slices, choices, store_place, run, rebuild=rebuild)


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan(blend: Blend, settings: DedupSettings, output_dir: str) -> DedupPlan:
    """Every slice of the blend, and which are signed already."""
    return plan_dedup(blend, settings, output_dir)


@shard_task(name="apply-decisions")
def write_shards(
    number: int,  # noqa: ARG001 - names the task run
    batch: Sequence[Mapping[str, Any]],
    topic: str,
    store: str,
    outcomes: str,
    on_bad_row: OnBadRow,
    rebuild: bool,
) -> State[Any]:
    """Build a batch of shards of rows; receipts, not this task, say that they are done."""
    build = partial(apply_decisions, outcomes=outcomes, on_bad_row=on_bad_row)
    return build_and_announce(batch, Store(store, KIND), build, topic, rebuild=rebuild)


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(prepared: DedupPlan, decisions: Decisions, started: float) -> dict[str, Any]:
    """Check every shard against the plan and publish; the manifest."""
    return publish_dedup(prepared, decisions, started)


def without_duplicates(
    normalized: Sequence[Finished], choices: DedupChoices, store: Store, build_shards: BuildShards, *, rebuild: bool
) -> Deduplicated:
    """Normalized Harmony shards as deduplication leaves them. A shard without rows stays as it is, and so do all where
    duplicates are left alone.
    """
    with_rows = [item for item in normalized if item.receipt.documents]
    if choices.mode == "off" or not with_rows:
        return Deduplicated(normalized)
    slices = document_slices(with_rows, store)
    decisions = deduplicate(slices, choices, store.place, build_shards, rebuild=rebuild)
    plan = plan_marked(with_rows, decisions.digests, choices.mode, store, rebuild=rebuild)
    common = {"store": store.place, "kind": store.kind, "decisions": decisions.uri, "rebuild": rebuild}
    build_shards(mark_shards, plan.pending, common)
    marked, _ = collect(plan, allow_partial=False)
    of_place = {item.shard.place: item for item in marked}
    final = [of_place.get(item.shard.place, item) for item in normalized]
    return Deduplicated(final, decisions.files, decisions.facts)


@shard_task(name="mark-shards")
def mark_shards(
    number: int,  # noqa: ARG001 - names the task run
    batch: Sequence[Mapping[str, Any]],
    topic: str,
    store: str,
    kind: str,
    decisions: str,
    rebuild: bool,
) -> State[Any]:
    """Build a batch of shards of marked rows; receipts, not this task, say that they are done."""
    build = partial(mark_shard, decisions=decisions)
    return build_and_announce(batch, Store(store, kind), build, topic, rebuild=rebuild)


def _build(
    number: int,  # noqa: ARG001 - names the task run
    batch: Sequence[Mapping[str, Any]],
    topic: str,
    store: str,
    evaluations: Sequence[Mapping[str, Any]],
    rebuild: bool,
) -> State[Any]:
    """Build a batch of the shards of a round; receipts, not this task, say that they are done."""
    build = partial(build_shard, evaluations=evaluations_from(evaluations))
    return build_and_announce(batch, Store(store, KIND), build, topic, rebuild=rebuild)


ROUNDS: Mapping[str, Task[..., State[Any]]] = {
    name: shard_task(name=f"dedup-{name}")(_build) for name in ("sign", *CONCERNS)
}
