"""How near one worker comes to the sum of the steps that nobody can leave out, each run alone on one thread.

The steps are those of `roofline_steps`: parse the lines into Arrow text, load an engine and encode with it, write
the ids; the engine is the one whose sum is smaller. Their sum is what a perfect program made of the same parts would need: no identity, no checks, no end-of-document
ids, no index, no hash, no sync. The share is that sum over the time of our whole process (where small corpora are
mostly start-up), and over our time without what a corpus of one document costs.
"""

import json

from bench import child
from bench.bench import Bench
from bench.child import Child
from bench.corpus import Corpus
from bench.pretrain_speed import RUNS, one_worker
from bench.record import Measure

ENGINES = ("gigatoken", "fastokens")
TARGET = 88.0


def measure(bench: Bench) -> list[Measure]:
    """Two rows for each vocabulary: our whole process, and our process without what one document costs."""
    return [row for name in bench.tokenizers for row in _compare(bench, name)]


def _compare(bench: Bench, name: str) -> list[Measure]:
    corpus, tokenizer = bench.corpus(), bench.vocabulary(name).ours
    alone: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    mine: list[Child] = []
    for _ in range(RUNS):  # taken in turns, so that a busy moment of the machine meets all
        for engine, runs in alone.items():
            runs.append(_steps(bench, corpus, tokenizer, engine))
        mine.append(one_worker(bench, corpus, tokenizer))
    start = child.median([one_worker(bench, bench.one_document(), tokenizer) for _ in range(RUNS)]).cpu_seconds
    whole = child.median(mine).cpu_seconds
    middle = {engine: sorted(runs, key=_total)[RUNS // 2] for engine, runs in alone.items()}
    engine = min(middle, key=lambda name: _total(middle[name]))
    steps = middle[engine]
    return [
        _row(f"roofline, {name} ({engine}): whole process", corpus, steps, whole),
        _row(f"roofline, {name} ({engine}): without start-up", corpus, steps, whole - start),
    ]


def _total(steps: dict[str, float]) -> float:
    return sum(steps.values())


def _steps(bench: Bench, corpus: Corpus, tokenizer: str, engine: str) -> dict[str, float]:
    with bench.scratch() as out:
        program = "bench.roofline_steps"
        return json.loads(child.python(program, corpus.path, tokenizer, engine, out / "ids").stdout)


def _row(name: str, corpus: Corpus, steps: dict[str, float], seconds: float) -> Measure:
    total = _total(steps)
    other = f"{total:.2f} s: " + ", ".join(f"{step} {cost:.2f}" for step, cost in steps.items())
    facts = {"bytes": corpus.size, "steps_cpu_seconds": steps, "ours_cpu_seconds": seconds}
    share = 100 * total / seconds
    return Measure(name, f"{seconds:.2f} s CPU", other, share, "%", TARGET, at_least=True, facts=facts)
