"""The front door of the room: pools and candidates as a mapped Prefect task, and the publication of all of it.

`select-rows` is mapped over batches of final shards, and each try only builds what is still missing.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prefect.client.schemas.objects import State
from tokenmill.tasks.shards.manifest import Finished
from tokenmill.tasks.shards.publication import collect
from tokenmill.tasks.shards.stage import BuildShards, build_and_announce, shard_task
from tokenmill.tasks.shards.store import Store

from .planning import plan_selection, require_selectable
from .preparation import build_selection_shard
from .scores import find_scores
from .settings import SelectionChoices


def select(
    final: Sequence[Finished], choices: SelectionChoices, store: Store, build_shards: BuildShards, *, rebuild: bool
) -> list[Finished]:
    """The shards of pools and candidates, one for each final shard that has rows, every one proven.

    Raises InputError for choices that do not fit the columns, and for scores that are of other rows.
    """
    require_selectable(choices)
    with_rows = [item for item in final if item.receipt.documents]
    scores = find_scores(choices.scores, with_rows, store)
    plan = plan_selection(with_rows, choices, scores, store, rebuild=rebuild)
    common = {"store": store.place, "kind": store.kind, "scores": dict(scores.places), "rebuild": rebuild}
    build_shards(select_rows, plan.pending, common)
    finished, _ = collect(plan, allow_partial=False)
    return finished


@shard_task(name="select-rows")
def select_rows(
    number: int,  # noqa: ARG001 - names the task run
    batch: Sequence[Mapping[str, Any]],
    topic: str,
    store: str,
    kind: str,
    scores: Mapping[str, str],
    rebuild: bool,
) -> State[Any]:
    """Build a batch of shards; receipts, not this task, say that they are done."""
    build = partial(build_selection_shard, scores=scores)
    return build_and_announce(batch, Store(store, kind), build, topic, rebuild=rebuild)
