"""RL preparation: the speed of one worker, as a share of that of orjson's parsing and serializing alone in the same run.

Ours reads from a file, parses, decides which rows are held out, writes synced and hashed files and a receipt; with
placeholders it also resolves one row in four and checks all of them for NeMo-Gym. Imports and the plan, which hashes
the source, are not counted; the facts have them. Rows that nobody changes are written as they were read, so ours can be
faster than orjson both ways. The median of three runs on either side.
"""

import json
from pathlib import Path
from typing import Any

from bench import child, rl_corpus
from bench.bench import Bench
from bench.corpus import Corpus
from bench.record import Measure
from bench.rl_corpus import VARIANTS, Variant

TARGETS: dict[Variant, float] = {"plain": 65.0, "placeholders": 50.0}
"""Per cent of the speed of orjson."""

RUNS = 3


def measure(bench: Bench) -> list[Measure]:
    """One row for each kind of rows."""
    return [_compare(bench, variant) for variant in VARIANTS]


def _compare(bench: Bench, variant: Variant) -> Measure:
    rows = rl_corpus.build(bench, variant)
    table = rl_corpus.build_table(bench) if variant == "placeholders" else None
    found = sorted((_worker(bench, rows, table) for _ in range(RUNS)), key=lambda each: each["cpu_seconds"]["build"])
    least = sorted(_roofline(rows) for _ in range(RUNS))
    ours, roofline = rows.size / found[RUNS // 2]["cpu_seconds"]["build"], rows.size / least[RUNS // 2]
    lost = found[0]["rows"] - found[0]["documents"]
    title = f"RL, {variant}, {rows.size / 1e6:.0f} MB" + (f" ({lost} ROWS DROPPED)" if lost else "")
    facts: dict[str, Any] = {"bytes": rows.size, "rows": rows.documents, "ours": found, "roofline_cpu_seconds": least}
    speeds = [f"{speed / 1e6:.0f} MB per CPU second" for speed in (ours, roofline)]
    share = 100 * ours / roofline
    return Measure(title, speeds[0], f"{speeds[1]} (orjson)", share, "%", TARGETS[variant], at_least=True, facts=facts)


def _worker(bench: Bench, rows: Corpus, table: Path | None) -> dict[str, Any]:
    with bench.scratch() as out:
        arguments = [rows.path, out, *([table] if table else [])]
        return json.loads(child.python("bench.rl_worker", *arguments).stdout)


def _roofline(rows: Corpus) -> float:
    return json.loads(child.python("bench.rl_roofline", rows.path).stdout)["cpu_seconds"]
