"""Planning and publishing at scale, as a process of its own, on one core.

    python -m bench.planning_worker plan|prove|publish SOURCE TOKENIZER OUT_DIR

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

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.shards.publication import described
from tokenmill.tasks.shards.receipt import RECEIPT, PartCount, Receipt
from tokenmill.tasks.tokenize.binidx import index, token_dtype
from tokenmill.tasks.tokenize.kind import PRETRAIN, PretrainPlan
from tokenmill.tasks.tokenize.settings import PretrainSettings, TokenizerSettings

from bench import synthetic_store
from tests.building import publish_here

LENGTHS = np.array([4, 5, 6], np.int32)
"""The documents of every shard."""


def plan(source: str, tokenizer: str, out: str) -> PretrainPlan:
    """The plan of one dataset that is all training data, a shard a file."""
    settings = PretrainSettings(tokenizer=TokenizerSettings(model=tokenizer), shard_size=synthetic_store.OBJECT_BYTES)
    return PRETRAIN.plan(Blend(train=[DataSource(name="synthetic", path=source)]), settings, out)


def prove(planned: PretrainPlan) -> dict[str, Any]:
    """A pair of files and a receipt for every shard, written without the syncs that real ones are written with."""
    store, dtype = planned.plan.store, token_dtype(planned.found.vocabulary.size)
    tokens = int(LENGTHS.sum())
    pair = {"all.bin": bytes(tokens * dtype.itemsize), "all.idx": index(LENGTHS, dtype)}
    outputs = [described(name, content) for name, content in pair.items()]
    for shard, key in zip(planned.plan.shards, planned.plan.keys, strict=True):
        folder = Path(store.folder(key))
        folder.mkdir(parents=True)
        for name, content in pair.items():
            (folder / name).write_bytes(content)
        receipt = Receipt(
            key=key, identity=shard.identity, outputs=outputs, rows_in=len(LENGTHS),
            parts={"all": PartCount(len(LENGTHS), tokens)}, drops={}, quarantined=0, truncated=0, volatile={"seconds": 1.0, "built_at": 0.0, "host": "worker"},
        )  # fmt: skip
        (folder / RECEIPT).write_bytes(receipt.dump())
    return {}


def publish(planned: PretrainPlan) -> dict[str, Any]:
    """Join and publish what is proven: how large the manifest is, and how long Megatron takes to open the blend."""
    publish_here("pretrain", planned)
    opened = time.perf_counter()
    prefixes = json.loads((Path(planned.output_dir) / "blend.json").read_bytes())["train"][1::2]
    documents = sum(len(IndexedDataset(prefix)) for prefix in prefixes)
    facts = {"prefixes": len(prefixes), "documents": documents, "open_seconds": time.perf_counter() - opened}
    return {"manifest_bytes": (Path(planned.output_dir) / "manifest.json").stat().st_size, **facts}


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
