"""What one worker does for Harmony, as a process of its own: plan, then build every shard, in order.

    python -m tests.benchmarks.harmony_worker SOURCE OUT_DIR

Prints what came out, and the CPU seconds of its phases, as JSON.
"""

import json
import sys
import time

from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.harmony.planning import plan_harmony
from tokenmill.tasks.harmony.settings import HarmonySettings
from tokenmill.tasks.select.preparation import HARMONY, build_harmony_shard


def main() -> None:
    """Normalize one source."""
    source, out = sys.argv[1:]
    imported = time.process_time()
    blend = Blend(datasets=[DataSource(name="benchmark", path=source, converter="openai_messages")])
    planned = plan_harmony(blend, HarmonySettings(thoughts="keep_all"), out)
    at_work = time.process_time()
    receipts = [
        build_harmony_shard(shard, planned.plan.store, **HARMONY.arguments(planned)) for shard in planned.plan.pending
    ]
    built = time.process_time()
    found = {
        "rows": sum(receipt.documents for receipt in receipts),
        "dropped": sum(receipt.rows_in - receipt.documents for receipt in receipts),
        "tokens": sum(receipt.tokens for receipt in receipts),
        "cpu_seconds": {"import": imported, "plan": at_work - imported, "build": built - at_work},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
