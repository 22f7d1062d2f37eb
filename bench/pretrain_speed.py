"""Tokenizing for pretraining: one worker of ours against Megatron-LM's own loop, per CPU second of whole processes.

Both read the same JSONL file with the same vocabulary, both read control strings in the text as ordinary text, and
both must write byte-identical `.bin` and `.idx`, which is checked: a fast result that differs is no result. The peer
is the loop of `tests/peers/megatron_loop.py`, which favors itself over Megatron's own tool. Ours includes hashing the
source, the exactness gate against the reference library, and synced writes.

What a process costs before its first document (imports, vocabulary, gate; importing torch on the peer's side) is
measured on both sides with a corpus of one document, so that the ratio is given with and without it. Ours runs three
times and the median counts; the peer runs once, because it takes minutes.
"""

import filecmp
import json
from pathlib import Path
from typing import Any

from bench import child
from bench.bench import Bench, Vocabulary
from bench.child import Child
from bench.corpus import Corpus
from bench.record import Measure

TARGETS = {"o200k_harmony": 70.0, "deepseek": 55.0}
RUNS = 3


def measure(bench: Bench) -> list[Measure]:
    """Two rows for each vocabulary: whole processes, and without what they cost before the first document."""
    return [row for name in bench.tokenizers for row in _compare(bench, name)]


def one_worker(bench: Bench, corpus: Corpus, tokenizer: str) -> Child:
    """One worker of ours on a corpus, in one shard."""
    with bench.scratch() as out:
        return child.python("bench.one_worker", corpus.path, tokenizer, out)


def _peer(corpus: Corpus, vocabulary: Vocabulary, prefix: Path) -> Child:
    definition = Path(vocabulary.folder) / "tokenizer.json"
    return child.python("tests.peers.megatron_loop", corpus.path, definition, vocabulary.eod, prefix, "--literal")


def _compare(bench: Bench, name: str) -> list[Measure]:
    corpus, vocabulary = bench.corpus(), bench.vocabulary(name)
    mine = child.median([one_worker(bench, corpus, vocabulary.ours) for _ in range(RUNS)])
    mine_start = child.median([one_worker(bench, bench.one_document(), vocabulary.ours) for _ in range(RUNS)])
    with bench.scratch() as out:
        peer = _peer(corpus, vocabulary, out / "peer")
        child.python("bench.one_worker", corpus.path, vocabulary.ours, out / "ours")
        identical = _identical(out / "ours", out / "peer")
        peer_start = _peer(bench.one_document(), vocabulary, out / "start")
    facts = {
        "bytes": corpus.size, "documents": corpus.documents, "identical_bin_and_idx": identical,
        "ours_cpu_seconds": mine.cpu_seconds, "peer_cpu_seconds": peer.cpu_seconds,
        "ours_start_cpu_seconds": mine_start.cpu_seconds, "peer_start_cpu_seconds": peer_start.cpu_seconds,
        "ours_wall_seconds": mine.wall_seconds, "peer_wall_seconds": peer.wall_seconds, **json.loads(mine.stdout),
    }  # fmt: skip
    title = f"pretrain, {name}" + ("" if identical else " (OUTPUT DIFFERS)")
    starts = mine_start.cpu_seconds, peer_start.cpu_seconds
    whole = mine.cpu_seconds, peer.cpu_seconds
    rest = whole[0] - starts[0], whole[1] - starts[1]
    pairs = {"whole process": whole, "without start-up": rest}
    return [
        _row(f"{title}: {part}", corpus.size, *seconds, TARGETS.get(name, 55.0), facts)
        for part, seconds in pairs.items()
    ]


def _row(name: str, size: int, mine: float, peer: float, target: float, facts: dict[str, Any]) -> Measure:
    speeds = [f"{size / seconds / 1e6:.1f} MB per CPU second" for seconds in (mine, peer)]
    return Measure(
        name, speeds[0], f"{speeds[1]} (Megatron loop)", peer / mine, "x", target, at_least=True, facts=facts
    )


def _identical(folder: Path, prefix: Path) -> bool:
    """Whether the one pair under `folder` is the pair at `prefix`, byte for byte."""
    for ending in (".bin", ".idx"):
        found = [path for path in folder.rglob(f"*{ending}") if path.is_file()]
        if len(found) != 1 or not filecmp.cmp(found[0], prefix.with_suffix(ending), shallow=False):
            return False
    return True
