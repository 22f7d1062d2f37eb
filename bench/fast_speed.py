"""Pretraining against `preprocess_data_fast.py`, the script that people run today: whole processes on all cores.

Ours is the command that users type, with one dataset and without held-out documents: it hashes the source, compares engines with
the reference, builds shards with receipts on worker processes, joins, hashes and syncs what it writes, and makes the report.
The peer (`fast_loop`) does none of that. CPU seconds are of all processes. Each side runs in turn, and the run with the fewest
CPU seconds counts, because other work on the machine only adds to them.
"""

import filecmp
from pathlib import Path

from bench import child
from bench.bench import Bench, Vocabulary
from bench.child import Child
from bench.corpus import Corpus
from bench.record import Measure

TARGETS = {"gpt2": 0.5, "qwen": 0.5, "deepseek": 0.65}
RUNS = 2


def measure(bench: Bench) -> list[Measure]:
    """One row for each vocabulary: our CPU seconds over the peer's."""
    return [_compare(bench, name) for name in bench.tokenizers]


def _compare(bench: Bench, name: str) -> Measure:
    corpus, vocabulary = bench.corpus(), bench.vocabulary(name)
    mine: list[Child] = []
    peer: list[Child] = []
    identical = False
    for _ in range(RUNS):
        with bench.scratch() as out:
            mine.append(_command(corpus, vocabulary, out / "ours"))
            peer.append(child.python("bench.fast_loop", corpus.path, vocabulary.folder, vocabulary.eod, out / "peer"))
            identical = _same_tokens(out / "ours", out / "peer.bin")
    ours, theirs = (min(runs, key=lambda run: run.cpu_seconds) for runs in (mine, peer))
    facts = {
        "bytes": corpus.size, "documents": corpus.documents, "identical_bin": identical,
        "ours_cpu_seconds": ours.cpu_seconds, "peer_cpu_seconds": theirs.cpu_seconds,
        "ours_wall_seconds": ours.wall_seconds, "peer_wall_seconds": theirs.wall_seconds,
        "ours_peak_bytes_of_a_process": ours.peak_bytes, "peer_peak_bytes": theirs.peak_bytes,
    }  # fmt: skip
    shown = [
        f"{run.cpu_seconds:.1f} s CPU, {run.wall_seconds:.1f} s, {run.peak_bytes / 1e9:.2f} GB"
        for run in (ours, theirs)
    ]
    return Measure(
        f"pretrain against preprocess_data_fast, {name}", shown[0], f"{shown[1]} (preprocess_data_fast)",
        ours.cpu_seconds / theirs.cpu_seconds, "x", TARGETS.get(name, 0.65), at_least=False, facts=facts,
    )  # fmt: skip


def _command(corpus: Corpus, vocabulary: Vocabulary, out: Path) -> Child:
    holdout = ("holdout.valid=0", "holdout.test=0")
    return child.run(
        [child.TOKENMILL, "pretrain", corpus.path, "-o", str(out), f"tokenizer.model={vocabulary.ours}", *holdout]
    )


def _same_tokens(out: Path, peer: Path) -> bool:
    """Whether the published tokens are the peer's; where a text holds a control string, they aren't."""
    found = sorted((out / "train").glob("*.bin"))
    return len(found) == 1 and filecmp.cmp(found[0], peer, shallow=False)
