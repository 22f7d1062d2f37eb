"""The front door of the room: plan, transform and publish as Prefect tasks.

`transform-shards` is mapped over batches of shards. It retries what may pass (storage, network), and each try only
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
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .planning import KIND, RlPlan, plan_rl
from .preparation import build_rl_shard, publish_rl
from .settings import RlSettings


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan(blend: Blend, settings: RlSettings, output_dir: str) -> RlPlan:
    """Every shard of the preparation, and which are proven already."""
    return plan_rl(blend, settings, output_dir)


@shard_task(name="transform-shards")
def transform_shards(
    number: int,  # noqa: ARG001 - names the task run
    batch: Sequence[Mapping[str, Any]],
    topic: str,
    store: str,
    chains: Mapping[str, Mapping[str, Any]],
    tokenizer: Mapping[str, Any],
    on_bad_row: OnBadRow,
    rebuild: bool,
) -> State[Any]:
    """Build a batch of shards; receipts, not this task, say that they are done."""
    source = TokenizerSource.model_validate(tokenizer)
    build = partial(build_rl_shard, chains=chains, tokenizer=source, on_bad_row=on_bad_row)
    return build_and_announce(batch, Store(store, KIND), build, topic, rebuild=rebuild)


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(prepared: RlPlan, started: float) -> dict[str, Any]:
    """Check every shard against the plan and publish; the manifest."""
    return publish_rl(prepared, started)
