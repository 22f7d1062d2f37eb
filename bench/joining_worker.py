"""One prefix, joined from shards of random tokens.

    python -m bench.joining_worker make|join FOLDER SHARDS SHARD_BYTES

`make` writes the shards. `join` prints the best wall seconds of three joins and of three runs of `cp` with a sync, and the peak memory after the joins, as JSON.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tokenmill.tasks.shards.plan import Finished, PlannedShard
from tokenmill.tasks.shards.publication import described
from tokenmill.tasks.shards.receipt import PartCount
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.tokenize.binidx import index
from tokenmill.tasks.tokenize.prefixes import build_prefix, plan_prefixes

DTYPE = np.dtype("<i4")
TOKENS = 1_000
"""Tokens in a document."""


def main() -> None:
    """Make the shards, or join and copy them in turn."""
    step, folder, count, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    store = Store(str(folder / "store"), "pretrain")
    shards = [_shard(number, size) for number in range(count)]
    if step == "make":
        for number, shard in enumerate(shards):
            _make(store, shard, number)
        return
    receipts = store.proven(shard.key for shard in shards)
    finished = [Finished(shard, shard.key, receipts[shard.key]) for shard in shards]
    places = [Path(store.path(item.key, "all.bin")) for item in finished]
    kept = folder / "kept"
    kept.mkdir()
    for number, place in enumerate(places):
        os.link(place, kept / f"{number}.bin")
    seconds = {"join": [], "cp": []}
    for _ in range(3):
        seconds["join"].append(_joined(store, finished))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for number, place in enumerate(places):
            os.link(kept / f"{number}.bin", place)
        shutil.rmtree(folder / "store/prefix")
        seconds["cp"].append(_copied(kept, folder / "copied"))
    print(json.dumps({**{name: min(each) for name, each in seconds.items()}, "peak_bytes": peak}))


def _shard(number: int, size: int) -> PlannedShard:
    identity = {"kind": "pretrain", "recipe": {}, "source": {"content": f"{number}"}}
    return PlannedShard(
        "synthetic", "train", Slice(SourceFile(f"/{number}", size, "jsonl"), 0, size, size=size), identity
    )


def _make(store: Store, shard: PlannedShard, number: int) -> None:
    documents = shard.part.size // DTYPE.itemsize // TOKENS
    tokens = np.random.default_rng(number).integers(0, 200_000, documents * TOKENS, DTYPE)
    lengths = np.full(documents, TOKENS, np.int32)
    folder = Path(store.folder(shard.key))
    folder.mkdir(parents=True)
    outputs = []
    for name, content in (("all.bin", tokens.tobytes()), ("all.idx", index(lengths, DTYPE))):
        (folder / name).write_bytes(content)
        outputs.append(described(name, content))
    store.issue(
        shard.identity, outputs=outputs, rows_in=documents, parts={"all": PartCount(documents, len(tokens))}, drops={},
        volatile={"seconds": 1.0},
    )  # fmt: skip


def _joined(store: Store, finished: list[Finished]) -> float:
    began = time.perf_counter()
    plan = plan_prefixes(finished, store, 10**12, DTYPE)
    (pending,) = plan.pending
    build_prefix(pending, plan.store)
    return time.perf_counter() - began


def _copied(source: Path, target: Path) -> float:
    began = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


if __name__ == "__main__":
    main()
