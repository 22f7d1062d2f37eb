"""How far one machine plans and publishes: a million files of 10 PB, 50,000 local files, 20,000 and 100,000 shards.

No cluster has to run for that, and no petabyte to be stored. A listing is made up (`synthetic_store`) and planned at a
shard for each object of 10 GB, through everything that planning does, gate included. Receipts are written as workers
would leave them, with pairs of a few bytes, and then all of them are planned again, collected and published. One core;
seconds are CPU seconds, because other work on the machine only ever adds to wall time, which stands in the facts.

What grows is memory: kilobytes for each shard, told as such, so that one can say where a machine ends. 40 million
shards, 10 PB at 256 MB each, would be forty times what a million take. All costs are straight lines: twice the shards,
twice the seconds.
"""

import json
import os
from pathlib import Path
from typing import Any

from bench import child
from bench.bench import Bench
from bench.child import Child
from bench.record import Measure

FEW_FILES, MANY_FILES = 100_000, 1_000_000
LOCAL_FILES = 50_000
FEW_SHARDS, MANY_SHARDS = 20_000, 100_000
MOST_SECONDS = 60.0
MOST_MEGABYTES = 2_000.0
MOST_KILOBYTES = 2.0
MOST_MILLISECONDS = 1.0
LONG_AGO = 1_000_000_000


def measure(bench: Bench) -> list[Measure]:
    """Listings, local files, receipts."""
    return [*_listings(bench), *_local(bench), *_receipts(bench)]


def _listings(bench: Bench) -> list[Measure]:
    with bench.scratch() as folder:
        few, many = (_run(bench, "plan", _bucket(count), folder) for count in (FEW_FILES, MANY_FILES))
    name, other = f"plan {MANY_FILES:,} objects, 10 PB", f"for {FEW_FILES:,}"
    seconds = [_seconds(run, "plan") for run in (few, many)]
    each = (many.peak_bytes - few.peak_bytes) / (MANY_FILES - FEW_FILES) / 1e3
    facts = {"objects": [FEW_FILES, MANY_FILES], "runs": [_facts(few), _facts(many)]}
    megabytes = [run.peak_bytes / 1e6 for run in (few, many)]
    return [
        _at_most(name, f"{seconds[1]:.1f} s", f"{seconds[0]:.1f} s {other}", seconds[1], "s", MOST_SECONDS, facts),
        _at_most(
            f"{name}: peak memory", f"{megabytes[1]:.0f} MB", f"{megabytes[0]:.0f} MB {other}", megabytes[1], "MB",
            MOST_MEGABYTES, facts,
        ),
        _at_most("each object and shard more", f"{each:.2f} kB", "one more listed", each, "kB", MOST_KILOBYTES, facts),
    ]  # fmt: skip


def _local(bench: Bench) -> list[Measure]:
    """The first plan reads and hashes every file, the second one asks for its size and time."""
    with bench.scratch() as folder:
        source = _write_files(folder / "source", LOCAL_FILES)
        first, again = (_run(bench, "plan", source, folder / "out") for _ in range(2))
    seconds = [_seconds(run, "plan") for run in (first, again)]
    facts = {"files": LOCAL_FILES, "runs": [_facts(first), _facts(again)]}
    return [
        _at_most(
            f"plan {LOCAL_FILES:,} local files", f"{seconds[0]:.1f} s, hashing them", f"{seconds[1]:.1f} s, when hashed",
            1000 * seconds[0] / LOCAL_FILES, "ms", MOST_MILLISECONDS, facts,
        )
    ]  # fmt: skip


def _receipts(bench: Bench) -> list[Measure]:
    few, many = (_published(bench, count) for count in (FEW_SHARDS, MANY_SHARDS))
    found = [json.loads(run.stdout) for run in (few, many)]
    facts = {"shards": [FEW_SHARDS, MANY_SHARDS], "runs": [_facts(few), _facts(many)]}
    size = f"{many.peak_bytes / 1e6:.0f} MB at most, manifest {found[1]['manifest_bytes'] / 1e6:.0f} MB"
    return [
        _at_most(
            f"{name} {MANY_SHARDS:,} proven shards", f"{_seconds(many, step):.1f} s, {size}",
            f"{_seconds(few, step):.1f} s for {FEW_SHARDS:,}", 1000 * _seconds(many, step) / MANY_SHARDS, "ms",
            MOST_MILLISECONDS, facts,
        )
        for name, step in (("plan", "plan"), ("publish", "step"))
    ]  # fmt: skip


def _published(bench: Bench, count: int) -> Child:
    with bench.scratch() as folder:
        _run(bench, "prove", _bucket(count), folder)
        return _run(bench, "publish", _bucket(count), folder)


def _bucket(count: int) -> str:
    return f"synthetic://bucket-{count}"


def _run(bench: Bench, step: str, source: Path | str, out: Path) -> Child:
    tokenizer = bench.vocabulary(bench.tokenizers[0]).ours
    return child.python("bench.planning_worker", step, source, tokenizer, out)


def _seconds(run: Child, phase: str) -> float:
    """CPU seconds of a phase."""
    return json.loads(run.stdout)["seconds"][phase][1]


def _facts(run: Child) -> dict[str, Any]:
    return {**json.loads(run.stdout), "peak_bytes": run.peak_bytes, "wall_seconds": run.wall_seconds}


def _at_most(
    name: str, ours: str, other: str, result: float, unit: str, target: float, facts: dict[str, Any]
) -> Measure:
    return Measure(name, ours, other, result, unit, target, at_least=False, facts=facts)


def _write_files(folder: Path, count: int) -> Path:
    """Files of one row each, no two alike, in folders of 1,000; modified long ago, so that their hashes are kept."""
    for number in range(count):
        path = folder / f"{number // 1000:03}" / f"{number:06}.jsonl"
        if number % 1000 == 0:
            path.parent.mkdir(parents=True)
        path.write_text(f'{{"text": "document {number} has a few words of its own"}}\n')
        os.utime(path, (LONG_AGO, LONG_AGO))
    return folder
