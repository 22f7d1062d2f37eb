"""The front door of the room: plan, tokenize and publish as Prefect tasks.

`tokenize-shards` is mapped over batches of shards. It retries what may pass (storage, network), and each try only
builds what is still missing; a batch that another run has finished meanwhile ends as `Cached`.
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

from .planning import KIND, PretrainPlan, plan_pretrain
from .preparation import build_pretrain_shard, publish_pretrain
from .settings import PretrainSettings, TokenizerSettings


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan(blend: Blend, settings: PretrainSettings, output_dir: str) -> PretrainPlan:
    """Every shard of the preparation, and which are proven already."""
    return plan_pretrain(blend, settings, output_dir)


@shard_task(name="tokenize-shards")
def tokenize_shards(
    number: int,  # noqa: ARG001 - names the task run
    batch: Sequence[Mapping[str, Any]],
    topic: str,
    store: str,
    tokenizer: Mapping[str, Any],
    on_bad_row: OnBadRow,
    rebuild: bool,
) -> State[Any]:
    """Build a batch of shards; receipts, not this task, say that they are done."""
    settings = TokenizerSettings.model_validate(tokenizer)
    build = partial(build_pretrain_shard, tokenizer=settings, on_bad_row=on_bad_row)
    return build_and_announce(batch, Store(store, KIND), build, topic, rebuild=rebuild)


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(prepared: PretrainPlan, started: float) -> dict[str, Any]:
    """Check every shard against the plan and publish; the manifest."""
    return publish_pretrain(prepared, started)
