"""Run the benchmarks: `python -m bench [NAME …]`, all of them by default (some 30 minutes); `python -m bench gpu` is apart.

Prints a table, replaces the rows measured in that of `bench/RESULTS.md`, and adds one JSON record to
`build/bench/results.jsonl`. A target that is missed is shown and is no error; a
benchmark that could not run is shown, recorded, and makes the exit code 1.
"""

import os
import sys
from types import ModuleType

from rich.console import Console
from rich.markup import escape

from bench import (
    dedup_speed,
    fast_speed,
    filter_speed,
    gpu,
    harmony_speed,
    joining,
    long_conversations,
    memory,
    nll_speed,
    orchestration,
    packing,
    planning_scale,
    pretrain_speed,
    record,
    rl_speed,
    roofline,
    scaling,
    server_load,
    sft_speed,
    startup,
)
from bench.bench import Bench
from bench.child import ROOT, ChildFailedError

BENCHMARKS: dict[str, ModuleType] = {
    "startup": startup,
    "roofline": roofline,
    "memory": memory,
    "orchestration": orchestration,
    "server_load": server_load,
    "scaling": scaling,
    "planning_scale": planning_scale,
    "joining": joining,
    "fast_speed": fast_speed,
    "pretrain_speed": pretrain_speed,
    "packing": packing,
    "sft_speed": sft_speed,
    "long_conversations": long_conversations,
    "rl_speed": rl_speed,
    "harmony_speed": harmony_speed,
    "dedup_speed": dedup_speed,
    "filter_speed": filter_speed,
    "nll_speed": nll_speed,
}


def main(names: list[str]) -> int:
    """Run the named benchmarks, show and record what they measured; the exit code."""
    if names[:1] == ["gpu"]:
        return gpu.main(names[1:])
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        print(f"unknown benchmark: {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    bench, console = Bench.from_environment(), Console(stderr=True)
    load = os.getloadavg()[0]
    measures: list[record.Measure] = []
    failures: dict[str, str] = {}
    corpus = bench.corpus()
    console.print(f"{corpus.documents:,} documents, {corpus.size / 1e6:.0f} MB of text")
    for name in names or BENCHMARKS:
        console.print(f"{name} …")
        try:
            measures += BENCHMARKS[name].measure(bench)
        except ChildFailedError as error:
            failures[name] = str(error)
            console.print(f"[red]{name} could not run:[/] {escape(str(error))}")
    record.show(measures, load)
    record.document(ROOT / "bench" / "RESULTS.md", measures, load)
    settings = {
        "bytes": corpus.size, "documents": corpus.documents, "tokenizers": bench.tokenizers, "load_before": load
    }  # fmt: skip
    record.append(bench.folder / "results.jsonl", measures, failures, settings)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
