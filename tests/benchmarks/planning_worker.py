"""Planning and publishing at scale, as a process of its own, on one core.

    python -m tests.benchmarks.planning_worker plan|prove|publish SOURCE TOKENIZER OUT_DIR

SOURCE is a folder, or a bucket of `synthetic_store`. `plan` plans it at a shard a file; `prove` also makes a tiny pair
and a receipt for every shard, as the workers of a cluster would have by then; `publish` plans and publishes. Prints the
wall and CPU seconds of both phases as JSON, and what came out.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.shards.receipt import RECEIPT, PartCount, Receipt
from tokenmill.tasks.tokenize.preparation import PretrainPlan, plan_pretrain
from tokenmill.tasks.tokenize.settings import PretrainSettings, TokenizerSettings

from tests.benchmarks import synthetic_store
from tests.building import publish_here

PAIR = (("all.bin", b"tokens"), ("all.idx", b"index"))
DOCUMENTS = 1_000


def plan(source: str, tokenizer: str, out: str) -> PretrainPlan:
    """The plan of one data set that is all training data, a shard a file."""
    settings = PretrainSettings(tokenizer=TokenizerSettings(model=tokenizer), shard_size=synthetic_store.OBJECT_BYTES)
    return plan_pretrain(Blend(train=[DataSource(name="synthetic", path=source)]), settings, out)


def prove(planned: PretrainPlan) -> dict[str, Any]:
    """A pair of files and a receipt for every shard, written without the syncs that real ones are written with."""
    store = planned.plan.store
    for shard, key in zip(planned.plan.shards, planned.plan.keys, strict=True):
        folder = Path(store.folder(key))
        folder.mkdir(parents=True)
        for name, content in PAIR:
            (folder / name).write_bytes(content)
        receipt = Receipt(
            key=key, identity=shard.identity, outputs=[Output(name, len(content), "0" * 32) for name, content in PAIR],
            rows_in=DOCUMENTS, parts={"all": PartCount(DOCUMENTS, DOCUMENTS * 500)}, drops={}, quarantined=0,
            truncated=0, volatile={"seconds": 1.0, "built_at": 0.0, "host": "worker"},
        )  # fmt: skip
        (folder / RECEIPT).write_bytes(receipt.dump())
    return {}


def publish(planned: PretrainPlan) -> dict[str, Any]:
    """Publish what is proven: how large the manifest is."""
    publish_here("pretrain", planned)
    return {"manifest_bytes": (Path(planned.output_dir) / "manifest.json").stat().st_size}


STEPS: dict[str, Callable[[PretrainPlan], dict[str, Any]]] = {"plan": lambda _: {}, "prove": prove, "publish": publish}


def main() -> None:
    """Plan, and take the step that the arguments name."""
    step, source, tokenizer, out = sys.argv[1:]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    clocks = [_clocks()]
    planned = plan(source, tokenizer, out)
    clocks.append(_clocks())
    facts = STEPS[step](planned)
    clocks.append(_clocks())
    seconds = {
        name: [later - earlier for earlier, later in zip(*pair, strict=True)]
        for name, pair in zip(["plan", "step"], itertools.pairwise(clocks), strict=True)
    }
    shown = {"shards": len(planned.plan.shards), "pending": len(planned.plan.pending), "seconds": seconds, **facts}
    print(json.dumps(shown))


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


if __name__ == "__main__":
    main()
