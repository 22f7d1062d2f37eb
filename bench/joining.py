"""Joining shards into a prefix, next to `cp` of the same bytes, and its memory for ten times as many.

`cp` reads and writes every file of tokens into one folder, as the fastest way to have a second copy; joining writes them
into one file, computes its index, and syncs. Both run in turn on the same disk, three times, and the best of each counts.
"""

import json
from pathlib import Path
from typing import Any

from bench import child
from bench.bench import Bench
from bench.record import Measure

SHARDS = (4, 40)
SHARD_BYTES = 50_000_000
AT_LEAST, AT_MOST = 0.7, 1.1


def measure(bench: Bench) -> list[Measure]:
    """Speed, and memory."""
    with bench.scratch() as folder:
        few, many = (_run(folder / str(count), count) for count in SHARDS)
    facts = {"shards": SHARDS, "shard_bytes": SHARD_BYTES, "runs": [few, many]}
    size = SHARDS[1] * SHARD_BYTES / 1e6
    speeds = [size / many[name] for name in ("join", "cp")]
    memory = [run["peak_bytes"] / 1e6 for run in (many, few)]
    return [
        Measure(
            f"join {SHARDS[1]} shards", f"{speeds[0]:,.0f} MB/s", f"cp {speeds[1]:,.0f} MB/s", speeds[0] / speeds[1],
            "x", AT_LEAST, at_least=True, facts=facts,
        ),
        Measure(
            f"join {SHARDS[1]} shards: peak memory", f"{memory[0]:.0f} MB", f"{memory[1]:.0f} MB for {SHARDS[0]}",
            memory[0] / memory[1], "x", AT_MOST, at_least=False, facts=facts,
        ),
    ]  # fmt: skip


def _run(folder: Path, count: int) -> dict[str, Any]:
    _, join = (child.python("bench.joining_worker", step, folder, count, SHARD_BYTES) for step in ("make", "join"))
    return json.loads(join.stdout)
