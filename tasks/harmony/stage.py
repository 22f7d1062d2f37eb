"""The front door of the room: plan, normalize and publish as Prefect tasks. Between the last two, other rooms look for
duplicates, and choose what is worth scoring.

`normalize-shards` is mapped over batches of shards. It retries what may pass (storage, network), and each try only
builds what is still missing; a batch that another run has finished meanwhile ends as `Cached`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.shards.manifest import Finished
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.stage import build_and_announce, shard_task
from tokenmill.tasks.shards.store import Store

from .planning import KIND, HarmonyPlan, plan_harmony
from .preparation import build_harmony_shard, publish_harmony
from .publication import Beside
from .settings import HarmonySettings


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan(blend: Blend, settings: HarmonySettings, output_dir: str) -> HarmonyPlan:
    """Every shard of the normalization, and which are proven already."""
    return plan_harmony(blend, settings, output_dir)


@shard_task(name="normalize-shards")
def normalize_shards(
    number: int,  # noqa: ARG001 - names the task run
    batch: Sequence[Mapping[str, Any]],
    topic: str,
    store: str,
    on_bad_row: OnBadRow,
    rebuild: bool,
) -> State[Any]:
    """Build a batch of shards; receipts, not this task, say that they are done."""
    build = partial(build_harmony_shard, on_bad_row=on_bad_row)
    return build_and_announce(batch, Store(store, KIND), build, topic, rebuild=rebuild)


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(
    prepared: HarmonyPlan, final: Sequence[Finished], missing: Sequence[str], beside: Beside, started: float
) -> dict[str, Any]:
    """Publish the final shards and what was made from them; the manifest."""
    return publish_harmony(prepared, final, missing, beside, started)
