"""What one worker does for RL, as a process of its own: plan, then build every shard, in order.

Prefect, Dask and publication are left out, held-out rows are not. With a table, rows that name a question of it are
resolved, and all are checked for NeMo-Gym; without one, rows pass through.

    python -m bench.rl_worker SOURCE OUT_DIR [TABLE]

Prints what came out, and the CPU seconds of its phases, as JSON.
"""

import json
import sys
import time
from collections import Counter
from typing import Any

from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.rl.kind import RL, RlPlan, build_rl_shard
from tokenmill.tasks.rl.settings import RlSettings
from tokenmill.tasks.runtime import set_up_arrow
from tokenmill.tasks.shards.receipt import Receipt

from bench.rl_corpus import TABLE


def plan(source: str, out: str, table: str | None) -> RlPlan:
    """The plan for one dataset."""
    resolve: dict[str, Any] = {"resolve_placeholders": {TABLE: {"path": table, "style": "dapo"}}}
    transforms = [resolve] if table else []
    settings = RlSettings(target="nemo_gym" if table else "none")
    return RL.plan(Blend(datasets=[DataSource(name="benchmark", path=source, transforms=transforms)]), settings, out)


def build(planned: RlPlan) -> list[Receipt]:
    """Every shard, one after the other."""
    return [
        build_rl_shard(shard, planned.plan.store, **RL.stages[0].arguments(planned)) for shard in planned.plan.pending
    ]


def main() -> None:
    """Prepare one source, with the arguments of the module's docstring."""
    source, out, *rest = sys.argv[1:]
    set_up_arrow()  # as the command does
    imported = time.process_time()
    planned = plan(source, out, rest[0] if rest else None)
    at_work = time.process_time()
    receipts = build(planned)
    built = time.process_time()
    found = {
        "rows": sum(receipt.rows_in for receipt in receipts),
        "documents": sum(receipt.documents for receipt in receipts),
        "untouched": sum(receipt.facts["untouched"] for receipt in receipts),
        "drops": dict(sum((Counter(receipt.drops) for receipt in receipts), Counter[str]())),
        "cpu_seconds": {"import": imported, "plan": at_work - imported, "build": built - at_work},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
