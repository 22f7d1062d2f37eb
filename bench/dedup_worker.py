"""Deduplication from JSON Lines to decisions, in two worker processes, without Prefect and Dask.

Nothing is left out that a run does for its data: hashing the source for its identity, synced and hashed files for every
round, receipts. Text is read in slices of 64 MB.

    python -m bench.dedup_worker SOURCE OUT_DIR DROPPED

Writes a line of JSON for each document that goes to DROPPED: its number, and a list with the one that stays for it.
Prints what came out and what it cost, from after the imports of this process to the decisions, the workers' imports
included, as JSON.
"""

import json
import multiprocessing
import resource
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.dedup.decisions import Decisions
from tokenmill.tasks.dedup.rounds import DocumentSlice, build_round, decide, partitions_for
from tokenmill.tasks.dedup.settings import DedupChoices
from tokenmill.tasks.shards.build import build_batch
from tokenmill.tasks.shards.kind import BuildShards, Stage
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.slices import ContentIndex, cut

WORKERS = 2
SHARD_SIZE = 64_000_000


def slices_of(source: str) -> list[DocumentSlice]:
    """The slices of a file of texts, called by the byte they begin at."""
    fields = ["text"]
    parts = cut(discover(DataSource(name="benchmark", path=source))[0], SHARD_SIZE, fields)
    options = {"text_field": "text", "id_field": None, "cap_by": None}
    return [
        DocumentSlice("text", part, options, str(part.start))
        for part in ContentIndex().identify(parts, fields, "content")
    ]


def build(shard: PlannedShard, store: Store, rebuild: bool) -> Receipt:
    """What a worker does for one shard of a round."""
    work = partial(build_round, evaluations=())
    (receipt,) = build_batch([shard], store, work, announce=lambda _: None, rebuild=rebuild)
    return receipt


def rounds_in(pool: Executor, seconds: dict[str, float]) -> BuildShards:
    """Builds the shards of a round in the processes of the pool, and notes how long that takes."""

    def run(
        stage: Stage, pending: Sequence[PlannedShard], store: Store, arguments: Mapping[str, Any], *, rebuild: bool
    ) -> Sequence[Receipt]:
        del arguments
        started = time.perf_counter()
        built = list(pool.map(partial(build, store=store, rebuild=rebuild), pending))
        seconds[stage.name.removeprefix("dedup-")] = time.perf_counter() - started
        return built

    return run


def cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def write_dropped(decisions: Decisions, source: str, place: str) -> None:
    """Write which document goes for which, by their numbers in the file."""
    with Path(source).open("rb") as lines:
        starts = [0, *accumulate(len(line) for line in lines)]
    number = _numbering(starts)
    edges = pq.read_table(f"{decisions.folder}/{decisions.edges.path}", columns=["dropped", "kept"])
    with Path(place).open("w", encoding="utf-8") as out:
        out.writelines(
            json.dumps([number(dropped), [number(kept)]]) + "\n"
            for dropped, kept in zip(*(edges[name].to_pylist() for name in edges.column_names), strict=True)
        )


def _numbering(starts: Sequence[int]) -> Callable[[str], int]:
    """The number of a document called `start of its slice#row`, given where each line of the file begins."""

    def number(name: str) -> int:
        start, row = map(int, name.split("#"))
        return bisect_left(starts, start) + row

    return number


def main() -> None:
    """Decide about one file, with the arguments of the module's docstring."""
    source, out, dropped = sys.argv[1:]
    started, cpu = time.perf_counter(), cpu_seconds()
    rounds: dict[str, float] = {}
    slices = slices_of(source)
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        decisions = decide(slices, DedupChoices(), out, rounds_in(pool, rounds), rebuild=False)
    found = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": cpu_seconds() - cpu,
        "peak_bytes": 1024
        * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)),
        "round_seconds": rounds,
        "slices": len(slices),
        "partitions": partitions_for(sum(each.part.size for each in slices)),
        "disk_bytes": sum(path.stat().st_size for path in Path(out).rglob("*") if path.is_file()),
        "tally": dict(decisions.tally),
    }
    write_dropped(decisions, source, dropped)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
