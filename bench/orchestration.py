"""What Prefect and Dask cost: tiny shards through the real flow, against the same shards in a plain loop.

100, 1,000 and 10,000 files of some 20 kB, one shard each, so that building them is next to nothing. The loop is one process
that plans, gates and builds the same shards (`one_worker`), and the flow has one worker too. The flow's wall time less the loop's is the price of
orchestration: a constant (server, cluster, artifacts, publication) and a slope, the milliseconds that one more shard
adds. Prefect's server runs, as it does for whoever operates this; a command for which no server is configured is measured
beside it, and runs without Prefect. The faster of two runs counts, since anything else on the machine only ever adds; 10,000 shards run once, for
some five minutes, and not at all with `BENCH_SHARDS=1000`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import child, flow
from bench.bench import Bench
from bench.child import Child
from bench.record import Measure

FEW, MANY, MOST = 100, 1000, 10_000
SHARD_BYTES = 20_000
RUNS = 2
MOST_SECONDS = 10.0
MOST_SECONDS_ALONE = 6.0
MOST_MILLISECONDS = 25.0
MOST_PER_SHARD = {FEW: 100.0, MANY: 25.0, MOST: 25.0}
"""Milliseconds of orchestration for each shard: the constant, shared by so many, and the slope."""


def measure(bench: Bench) -> list[Measure]:
    """The constant, with a server running and without; the slope; and for each number of shards, what one of them costs."""
    flow.warm_up(bench)
    most = [MOST] if int(os.environ.get("BENCH_SHARDS", MOST)) >= MOST else []
    flows: dict[int, list[Child]] = {count: [] for count in (FEW, MANY, *most)}
    loops: dict[int, list[Child]] = {count: [] for count in (FEW, MANY, *most)}
    with bench.scratch() as folder:
        sources = {count: _write_files(bench, folder / str(count), count) for count in flows}
        with flow.server(bench) as api:
            for count in [*(FEW, MANY) * RUNS, *most]:  # in turns, so that a busy moment of the machine meets both
                flows[count].append(_flow(bench, sources[count], api))
                loops[count].append(_loop(bench, sources[count]))
        without = [_flow(bench, sources[FEW], None) for _ in range(RUNS)]
    return _rows(flows, loops, without)


def _rows(flow_runs: dict[int, list[Child]], loop_runs: dict[int, list[Child]], alone: list[Child]) -> list[Measure]:
    flows, loops = ({count: _fastest(found) for count, found in runs.items()} for runs in (flow_runs, loop_runs))
    slope = 1000 * ((flows[MANY] - flows[FEW]) - (loops[MANY] - loops[FEW])) / (MANY - FEW)
    facts = {
        name: {count: [(run.wall_seconds, run.cpu_seconds) for run in found] for count, found in runs.items()}
        for name, runs in (("flow_wall_and_cpu", flow_runs), ("loop_wall_and_cpu", loop_runs))
    }
    plain = f"{loops[FEW]:.1f} s (plain loop)"
    return [
        _constant(f"{FEW} shards, server running", flows[FEW], plain, flows[FEW] - loops[FEW], facts),
        _constant(f"{FEW} shards, no server", _fastest(alone), plain, _fastest(alone) - loops[FEW], facts, MOST_SECONDS_ALONE),
        Measure(
            f"each shard more, {FEW} to {MANY}", f"{flows[MANY]:.1f} s for {MANY}",
            f"{loops[MANY]:.1f} s (plain loop)", slope, "ms", MOST_MILLISECONDS, at_least=False, facts=facts,
        ),
        *(_per_shard(count, flows[count], loops[count]) for count in flows),
    ]  # fmt: skip


def _per_shard(count: int, flow_seconds: float, loop_seconds: float) -> Measure:
    added = flow_seconds - loop_seconds
    return Measure(
        f"orchestration per shard, of {count:,}", f"{flow_seconds:.1f} s, {added / flow_seconds:.0%} of it orchestration",
        f"{loop_seconds:.1f} s (plain loop)", 1000 * added / count, "ms", MOST_PER_SHARD[count], at_least=False,
        facts={"shards": count, "share": added / flow_seconds},
    )  # fmt: skip


def _fastest(runs: list[Child]) -> float:
    return min(run.wall_seconds for run in runs)


def _constant(
    name: str, seconds: float, plain: str, added: float, facts: dict[str, Any], most: float = MOST_SECONDS
) -> Measure:
    return Measure(name, f"{seconds:.1f} s wall", plain, added, "s", most, at_least=False, facts=facts)


def _flow(bench: Bench, source: Path, api: str | None) -> Child:
    with bench.scratch() as out:
        return flow.pretrain(bench, source, out, "--workers", 1, api=api).process


def _loop(bench: Bench, source: Path) -> Child:
    with bench.scratch() as out:
        tokenizer = bench.vocabulary(bench.tokenizers[0]).ours
        return child.python("bench.one_worker", source, tokenizer, out)


def _write_files(bench: Bench, folder: Path, count: int) -> Path:
    folder.mkdir()
    with Path(bench.corpus().path).open("rb") as lines:
        for number in range(count):
            (folder / f"{number:05}.jsonl").write_bytes(b"".join(_some(lines)))
    return folder


def _some(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The next documents, until they are `SHARD_BYTES` or more."""
    size = 0
    for line in lines:
        yield line
        size += len(line)
        if size >= SHARD_BYTES:
            return
