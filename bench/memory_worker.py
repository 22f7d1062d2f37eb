"""The peak memory of one worker: this process plans a preparation, and another builds all of its shards, in order.

So it is on a cluster, where only shards and arguments reach a worker. The default shard size is taken.

    python -m bench.memory_worker pretrain|sft SOURCE TOKENIZER_FOLDER OUT_DIR

Prints, as JSON, the largest resident set of the worker, in bytes, and the CPU seconds that it took.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tokenmill.tasks.pack.kind import SFT
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.runtime import set_up_arrow
from tokenmill.tasks.shards.kind import Stage
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.tokenize.kind import PRETRAIN

from bench import one_worker, sft_worker

SHARD_SIZE = PreparationSettings().shard_size
PLANS = {
    "pretrain": (PRETRAIN, partial(one_worker.plan, shard_size=SHARD_SIZE)),
    "sft": (SFT, partial(sft_worker.plan, pack_size=SftSettings().pack_size)),
}


def build(
    function: Callable[..., Receipt], shards: Sequence[PlannedShard], store: Store, given: Mapping[str, Any]
) -> list[Receipt]:
    """Build shards in the worker."""
    return [function(shard, store, **given) for shard in shards]


def costs() -> tuple[int, float]:
    """The largest resident set of this process, in bytes, and its CPU seconds."""
    peak = next(line for line in Path("/proc/self/status").read_text("utf-8").splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024, time.process_time()


def main() -> None:
    """Prepare one source, with the arguments of the module's docstring."""
    kind, source, tokenizer, out = sys.argv[1:]
    preparation, plan = PLANS[kind]
    with ProcessPoolExecutor(1, get_context("spawn"), set_up_arrow) as worker:

        def build_there(
            stage: Stage, pending: Sequence[PlannedShard], store: Store, arguments: Mapping[str, Any], *, rebuild: bool
        ) -> Sequence[Receipt]:
            del rebuild
            return worker.submit(build, stage.build, pending, store, arguments).result()

        preparation.build(plan(source, tokenizer, out), build_there)
        peak, seconds = worker.submit(costs).result()
    print(json.dumps({"peak_bytes": peak, "cpu_seconds": seconds}))


if __name__ == "__main__":
    main()
