"""The front door of the room: plan, pack and publish as Prefect tasks.

`pack-shards` is mapped over batches of shards. It retries what may pass (storage, network), and each try only builds
what is still missing; a batch that another run has finished meanwhile ends as `Cached`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.stage import build_and_announce, shard_task
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .planning import KIND, SftPlan, plan_sft
from .preparation import build_sft_shard, publish_sft
from .settings import SftSettings


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan(blend: Blend, settings: SftSettings, output_dir: str) -> SftPlan:
    """Every shard of the preparation, and which are proven already."""
    return plan_sft(blend, settings, output_dir)


@shard_task(name="pack-shards")
def pack_shards(
    number: int,  # noqa: ARG001 - names the task run
    batch: Sequence[Mapping[str, Any]],
    topic: str,
    store: str,
    tokenizer: Mapping[str, Any],
    template: Mapping[str, Any],
    on_bad_row: OnBadRow,
    rebuild: bool,
) -> State[Any]:
    """Build a batch of shards; receipts, not this task, say that they are done."""
    source = TokenizerSource.model_validate(tokenizer)
    build = partial(build_sft_shard, tokenizer=source, template=template, on_bad_row=on_bad_row)
    return build_and_announce(batch, Store(store, KIND), build, topic, rebuild=rebuild)


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(prepared: SftPlan, started: float) -> dict[str, Any]:
    """Check every shard against the plan and publish; the manifest."""
    return publish_sft(prepared, started)
