"""Harmony: rows a CPU second of one worker, beside a loop over rows with `json` and string searches.

Both read the same conversations with reasoning (`chat_corpus`) and write Parquet. The loop (`bench/harmony_loop.py`)
renders by formatting and checks by searching, and counts no tokens. Normalization composes, renders, checks strictly, counts
tokens, asks the official parser of a sample, and writes synced and hashed files with three times the columns. A whole run
also looks for near-duplicates, marks them, assigns pools and writes candidates; the loop does none of this. Imports, the
plan and loading vocabularies are not counted. The median of three runs each.
"""

import json

from bench import chat_corpus, child
from bench.bench import Bench
from bench.chat_corpus import VARIANTS, Variant
from bench.record import Measure

TARGETS = {"normalize": 0.8, "whole": 0.5}
TITLES = {"normalize": "normalization", "whole": "whole run"}
RUNS = 3
SIZE = 25_000_000


def measure(bench: Bench) -> list[Measure]:
    """Two rows for each kind of conversations."""
    return [each for variant in VARIANTS for each in _compare(bench, variant)]


def _compare(bench: Bench, variant: Variant) -> list[Measure]:
    part = chat_corpus.leading(chat_corpus.build(bench, variant), SIZE)
    ours, loops = [], []
    for _ in range(RUNS):
        with bench.scratch() as out:
            ours.append(json.loads(child.python("bench.harmony_worker", part.path, out / "ours").stdout))
            loops.append(json.loads(child.python("bench.harmony_loop", part.path, out / "loop.parquet").stdout))
    theirs = sorted(found["cpu_seconds"] for found in loops)[RUNS // 2]
    lost = ours[0]["dropped"]
    facts = {"bytes": part.size, "rows": part.documents, "ours": ours, "loop": loops}
    measures: list[Measure] = []
    for phase, target in TARGETS.items():
        seconds = sorted(found["cpu_seconds"][phase] for found in ours)[RUNS // 2]
        title = f"Harmony, {TITLES[phase]}, {variant}, {part.size / 1e6:.0f} MB"
        shown = [
            f"{part.documents / each:,.0f} rows, {part.size / each / 1e6:.1f} MB per CPU second"
            for each in (seconds, theirs)
        ]
        title += f" ({lost} ROWS DROPPED)" if lost else ""
        measures.append(
            Measure(title, shown[0], f"{shown[1]} (loop)", theirs / seconds, "x", target, at_least=True, facts=facts)
        )
    return measures
