"""The whole preparation, from command to published blend, with one Dask worker and with two.

Wall time, because that is what a second worker is for. Two rows: the whole command, with interpreter, Prefect's
server, the cluster's start, planning and publication, which one worker does as slowly as two; and the stage alone,
from the beginning of the first shard to the end of the last, by the receipts. The text is four copies of the corpus,
each changed in its first words (an equal shard would be built once), because the corpus alone is a few seconds' work.
Workers share the machine with scheduler and server: on two cores they can't be twice as fast.
"""

from pathlib import Path

from bench import flow
from bench.bench import Bench
from bench.flow import Preparation
from bench.record import Measure

TARGET = 1.8
COPIES = 4
SHARDS_A_COPY = 8
OPENING = b'{"text":"'


def measure(bench: Bench) -> list[Measure]:
    """Two rows: whole command and stage."""
    flow.warm_up(bench)
    with bench.scratch() as folder:
        size = _copies(bench, folder)
        one, two = (_prepare(bench, folder, size, workers) for workers in (1, 2))
    pairs = {
        "whole command": (one.process.wall_seconds, two.process.wall_seconds),
        "tokenize stage": (one.stage_seconds, two.stage_seconds),
    }
    return [_row(f"2 workers, {part}", size, *seconds) for part, seconds in pairs.items()]


def _row(name: str, size: int, one: float, two: float) -> Measure:
    facts = {"bytes": size, "one_worker_seconds": one, "two_workers_seconds": two}
    shown = [f"{seconds:.1f} s wall, {size / seconds / 1e6:.0f} MB/s" for seconds in (two, one)]
    return Measure(name, shown[0], f"{shown[1]} (1 worker)", one / two, "x", TARGET, at_least=True, facts=facts)


def _copies(bench: Bench, folder: Path) -> int:
    """Write the copies; their size in bytes."""
    size = 0
    for number in range(COPIES):
        with Path(bench.corpus().path).open("rb") as lines, (folder / f"copy_{number}.jsonl").open("wb") as out:
            for line in lines:
                size += out.write(OPENING + b"copy %d of " % number + line.removeprefix(OPENING))
    return size


def _prepare(bench: Bench, folder: Path, size: int, workers: int) -> Preparation:
    shard_size = size // (COPIES * SHARDS_A_COPY)
    with bench.scratch() as out:
        return flow.pretrain(bench, folder / "*.jsonl", out, "--workers", workers, f"shard_size={shard_size}")
