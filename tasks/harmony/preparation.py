"""A Harmony normalization from its plan to its published folder, in plain functions: `stage.py` wraps them for Prefect."""

from collections.abc import Sequence
from typing import Any

from tokenmill.tasks.shards.circumstances import circumstances
from tokenmill.tasks.shards.manifest import Finished
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publication import check_bad_rows, collect, publish_preparation
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import WHERE_NOT_WHAT, OnBadRow
from tokenmill.tasks.shards.store import Store

from .message import TEMPLATE_VERSION
from .planning import KIND, HarmonyPlan
from .publication import Beside, DataLayout, published_split
from .settings import HarmonyRecipe
from .shard import normalize_shard

LIBRARIES = ("tokenmill", "openai-harmony", "orjson", "pyarrow")


def build_harmony_shard(shard: PlannedShard, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build one planned shard in this process."""
    return normalize_shard(shard, HarmonyRecipe(**shard.identity["recipe"]), store, on_bad_row)


def normalized_shards(plan: HarmonyPlan) -> tuple[list[Finished], list[str]]:
    """Every planned shard with its receipt, and the places of those that have none.

    Raises RunError when any is missing, unless a partial output was asked for, and for too many bad rows.
    """
    settings = plan.settings
    finished, missing = collect(plan.plan, allow_partial=settings.allow_partial)
    check_bad_rows(finished, plan.plan.store, settings.bad_row_ceiling, tolerate=settings.on_bad_row == "quarantine")
    return finished, missing


def publish_harmony(
    plan: HarmonyPlan, final: Sequence[Finished], missing: Sequence[str], beside: Beside, started: float
) -> dict[str, Any]:
    """Publish the `final` shards, which are the normalized ones or were made from them, and return the manifest.

    `started` is a Unix time.
    """
    settings = plan.settings
    header = {
        "type": KIND,
        "blend": plan.blend.model_dump(exclude_none=True),
        "settings": settings.model_dump(exclude=WHERE_NOT_WHAT),
        "skipped_files": plan.plan.skipped,
        "template_version": TEMPLATE_VERSION,
        "missing": list(missing),
    }
    layout = DataLayout([published_split(shard.identity["recipe"]) for shard in plan.plan.shards], beside)
    volatile = circumstances(plan.plan, settings, started, LIBRARIES)
    return publish_preparation(plan.output_dir, plan.plan.store, final, layout, settings, header, volatile)
