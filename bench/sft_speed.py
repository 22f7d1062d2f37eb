"""SFT preparation: one worker of ours against the straightforward loop, per CPU second of whole processes.

Both read the same JSONL file of conversations (`chat_corpus`), with Nemotron 3 Nano's template and Qwen's vocabulary, and
write packs of the sequences they made. The peer is `bench/sft_loop.py`: `apply_chat_template` for every message,
`tokenizers` for every chunk. Ours includes hashing the source, the self-check of the template, the exactness gate and
synced writes. The peer gets a leading part of the conversations, because it takes a minute for what ours does in
seconds. Two rows for each kind of conversations: whole processes, with imports, vocabulary and checks, and without
start-up, which is what a corpus of one conversation costs on either side. Where there are more conversations than the
peer gets, two more rows set ours, on all of them, beside the peer on its part without its start-up.

Packs and their order are each side's own, so sequences are compared as a multiset of (ids, mask), and all must be equal:
chunks end at control tokens and where generation begins, and there ours cuts, too. The conversations hold no text of two
kinds, about which the two disagree by design (7 sequences in 10,000 of the whole corpus). Text that spells a control
token (`<|endoftext|>` in source code) is text for us and a control token for the peer. And an answer with a tag of
reasoning in it (`</think>`) is read by us as inline reasoning, or quarantined where it could be read in two ways, while
the peer's chunks slip, because the template writes such an answer without the tags that its generation prompt ended with.

Ours runs three times and the median counts; the peer runs once.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from bench import chat_corpus, child
from bench.bench import Bench
from bench.chat_corpus import VARIANTS, Variant
from bench.child import ROOT, Child
from bench.corpus import Corpus
from bench.record import Measure

WHOLE_PROCESS = 20.0
WITHOUT_START_UP: dict[Variant, float] = {"plain": 35.0, "reasoning": 30.0}
"""Times the peer."""

RUNS = 3
PEER_SIZE = 25_000_000
"""Bytes of conversations for the peer, at most: with fewer, ours would be all start-up."""

PACK_SIZE = 32_768
"""Tokens; hardly a sequence is longer, so that both sides write what they encode."""

TEMPLATE = ROOT / "blends" / "templates" / "nano3.jinja"


def measure(bench: Bench) -> list[Measure]:
    """Two or four rows for each kind of conversations."""
    return [row for variant in VARIANTS for row in _compare(bench, variant)]


def worker(bench: Bench, conversations: Corpus, out: Path, pack_size: int) -> Child:
    """One worker of ours on some conversations."""
    folder = bench.vocabulary("qwen").folder
    return child.python("bench.sft_worker", conversations.path, folder, out, pack_size)


def median_worker(bench: Bench, conversations: Corpus, pack_size: int) -> Child:
    """The worker in the middle of three."""
    runs: list[Child] = []
    for _ in range(RUNS):
        with bench.scratch() as out:
            runs.append(worker(bench, conversations, out, pack_size))
    return child.median(runs)


@cache
def start_up(bench: Bench) -> float:
    """CPU seconds that ours costs before its work, measured once."""
    one = chat_corpus.one_conversation(chat_corpus.build(bench, "plain"))
    return median_worker(bench, one, PACK_SIZE).cpu_seconds


def _peer(bench: Bench, conversations: Corpus, out: Path) -> Child:
    folder = bench.vocabulary("qwen").folder
    return child.python("bench.sft_loop", conversations.path, folder, TEMPLATE, PACK_SIZE, out)


def _compare(bench: Bench, variant: Variant) -> list[Measure]:
    """The rows of one kind of conversations, all with the same facts."""
    everything = chat_corpus.build(bench, variant)
    part, one = chat_corpus.leading(everything, PEER_SIZE), chat_corpus.one_conversation(everything)
    ours, start = median_worker(bench, part, PACK_SIZE), start_up(bench)
    with bench.scratch() as out:
        peer, peer_start = _peer(bench, part, out / "peer.parquet"), _peer(bench, one, out / "one.parquet").cpu_seconds
        worker(bench, part, out / "ours", PACK_SIZE)
        compared = child.python("bench.sft_difference", out / "ours", out / "peer.parquet")
    difference = json.loads(compared.stdout)
    facts = {
        "bytes": part.size, "conversations": part.documents, "pack_size": PACK_SIZE,
        "ours_cpu_seconds": ours.cpu_seconds, "ours_start_cpu_seconds": start, "ours_peak_bytes": ours.peak_bytes,
        "peer_cpu_seconds": peer.cpu_seconds, "peer_start_cpu_seconds": peer_start, "peer_peak_bytes": peer.peak_bytes,
        "sequences": difference["sequences"], "only_ours_only_peers": difference["only"], **json.loads(ours.stdout),
    }  # fmt: skip
    share = max(difference["only"]) / max(difference["sequences"])
    title = f"SFT, {variant}" + (f" ({share:.2%} OF SEQUENCES DIFFER)" if share else "")
    peer_rest = part.size / (peer.cpu_seconds - peer_start)
    whole, rest = part.size / ours.cpu_seconds, part.size / (ours.cpu_seconds - start)
    rows = [
        _row(f"{title}: whole process", whole, part.size / peer.cpu_seconds, WHOLE_PROCESS, facts),
        _row(f"{title}: without start-up", rest, peer_rest, WITHOUT_START_UP[variant], facts),
    ]
    if everything.size > part.size:
        rows += _of_everything(bench, variant, title, peer_rest)
    return rows


def _of_everything(bench: Bench, variant: Variant, title: str, peer: float) -> list[Measure]:
    """Two rows for ours on all conversations, beside the peer's speed without start-up."""
    everything = chat_corpus.build(bench, variant)
    ours, start = median_worker(bench, everything, PACK_SIZE), start_up(bench)
    facts = {
        "bytes": everything.size, "ours_cpu_seconds": ours.cpu_seconds, "ours_start_cpu_seconds": start,
        "ours_peak_bytes": ours.peak_bytes, **json.loads(ours.stdout),
    }  # fmt: skip
    title = f"{title}, {everything.size / 1e6:.0f} MB"
    whole, rest = everything.size / ours.cpu_seconds, everything.size / (ours.cpu_seconds - start)
    return [
        _row(f"{title}: whole process", whole, peer, WHOLE_PROCESS, facts),
        _row(f"{title}: without start-up", rest, peer, WITHOUT_START_UP[variant], facts),
    ]


def _row(name: str, ours: float, peer: float, target: float, facts: dict[str, Any]) -> Measure:
    """A row from two speeds in bytes per CPU second."""
    speeds = [f"{speed / 1e6:.1f} MB per CPU second" for speed in (ours, peer)]
    return Measure(name, speeds[0], f"{speeds[1]} (loop)", ours / peer, "x", target, at_least=True, facts=facts)
