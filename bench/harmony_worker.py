"""What one worker does for Harmony, as a process of its own: plan, normalize, mark duplicates, select, publish.

    python -m bench.harmony_worker SOURCE OUT_DIR

Prints what came out, and the CPU seconds of its phases, as JSON. `load` makes the encoder and the reference's vocabulary, which a
worker does once for all of its shards; `steps` are the later phases.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.harmony.vocabulary import encoding, harmony_encoder
from tokenmill.tasks.runtime import set_up_arrow
from tokenmill.tasks.select.kind import HARMONY
from tokenmill.tasks.select.settings import NormalizationSettings
from tokenmill.tasks.shards.kind import Stage
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store

UNSWEPT = "\U000e1000"
"""A character that encoders were not compared on, which loads the reference as well."""


def main() -> None:
    """Normalize one source."""
    source, out = sys.argv[1:]
    set_up_arrow()  # as the command does
    imported = time.process_time()
    blend = Blend(datasets=[DataSource(name="benchmark", path=source, converter="openai_messages")])
    planned = HARMONY.plan(blend, NormalizationSettings(keep_reasoning="keep_all"), out)
    at_loading = time.process_time()
    harmony_encoder().encode(pa.array([UNSWEPT], pa.large_string()))
    encoding()
    at_work = time.process_time()
    steps = Counter[str]()

    def build(
        stage: Stage, pending: Sequence[PlannedShard], store: Store, arguments: Mapping[str, Any], *, rebuild: bool
    ) -> Sequence[Receipt]:
        started = time.process_time()
        built = [stage.build(shard, store, **arguments) for shard in pending]
        steps[stage.name] += time.process_time() - started
        return built

    totals = HARMONY.publish(HARMONY.build(planned, build), time.time())["totals"]
    done = time.process_time()
    found = {
        "rows": totals["documents"],
        "dropped": sum(totals["dropped"].values()),
        "tokens": totals["tokens"],
        "cpu_seconds": {
            "import": imported, "plan": at_loading - imported, "load": at_work - at_loading,
            "normalize": steps["normalize-shards"], "whole": done - at_work,
        },
        "steps": steps,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
