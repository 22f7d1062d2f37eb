"""The deduplication of a blend of text from decisions to its published folder, in plain functions: `stage.py` wraps them
for Prefect.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.circumstances import circumstances
from tokenmill.tasks.shards.manifest import Finished
from tokenmill.tasks.shards.publication import check_bad_rows, collect, publish_preparation
from tokenmill.tasks.shards.settings import WHERE_NOT_WHAT

from .decisions import KEPT, Decisions
from .planning import DedupPlan
from .publication import RowsLayout
from .rounds import KIND

LIBRARIES = ("tokenmill", "rensa", "orjson", "pyarrow")


def publish_dedup(plan: DedupPlan, decisions: Decisions, started: float) -> dict[str, Any]:
    """Check that every decided shard is proven, publish, and return the manifest. `started` is a Unix time."""
    settings = plan.settings
    finished, missing = collect(plan.plan, allow_partial=settings.allow_partial)
    check_bad_rows(finished, plan.plan.store, settings.bad_row_ceiling, tolerate=settings.on_bad_row == "quarantine")
    if not missing:
        _require_all_decided(finished, decisions)
    header = {
        "type": KIND,
        "blend": plan.blend.model_dump(exclude_none=True),
        "settings": settings.model_dump(exclude=WHERE_NOT_WHAT),
        "skipped_files": plan.plan.skipped,
        "duplicates": dict(decisions.facts),
        "missing": missing,
    }
    volatile = circumstances(plan.plan, settings, started, LIBRARIES)
    layout = RowsLayout(plan.blend, decisions)
    return publish_preparation(plan.output_dir, plan.plan.store, finished, layout, settings, header, volatile)


def _require_all_decided(finished: Sequence[Finished], decisions: Decisions) -> None:
    """Raises RunError unless the shards together dropped or marked what was decided."""
    found = sum((Counter(item.receipt.facts["outcomes"]) for item in finished), Counter[str]())
    wanted = {reason: count for reason, count in decisions.tally.items() if reason != KEPT}
    if found != Counter(wanted):
        raise RunError(
            f"the shards account for {dict(found)}, but {wanted} was decided; run the same command with force=true"
        )
