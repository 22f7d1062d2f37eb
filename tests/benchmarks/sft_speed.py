"""SFT preparation: one worker of ours against the straightforward loop, per CPU second of whole processes.

Both read the same JSONL file of conversations (`chat_corpus`), with Nemotron 3 Nano's template and Qwen's vocabulary, and
write packs of the sequences they made. The peer is `tests/peers/sft_loop.py`: `apply_chat_template` for every message,
`tokenizers` for every chunk. Ours includes hashing the source, the self-check of the template, the exactness gate and
synced writes. The peer gets a leading part of the conversations, because it takes a minute for what ours does in
seconds. Four rows for each kind of conversations: whole processes, with imports, vocabulary and checks, and without
start-up, which is what a corpus of one conversation costs on either side; both on the part, and then ours on all
conversations, beside which the peer's start-up is not counted in either row.

Packs and their order are each side's own, so sequences are compared as a multiset of (ids, mask), and all must be equal:
chunks end at control tokens and where generation begins, and there ours cuts, too. The conversations hold no text of two
kinds, about which the two disagree by design (7 sequences in 10,000 of the whole corpus). Text that spells a control
token (`<|endoftext|>` in source code) is text for us and a control token for the peer. And an answer with a tag of
reasoning in it (`</think>`) is read by us as inline reasoning, or quarantined where it could be read in two ways, while
the peer's chunks slip, because the template writes such an answer without the tags that its generation prompt ended with.

Ours runs three times and the median counts; the peer runs once.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import chat_corpus, child
from tests.benchmarks.bench import Bench
from tests.benchmarks.chat_corpus import VARIANTS, Variant
from tests.benchmarks.child import ROOT, Child
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.record import Measure

TARGET = 20.0
RUNS = 3
PEER_SIZE = 25_000_000
"""Bytes of conversations for the peer, at most: with fewer, ours would be all start-up."""

PACK_SIZE = 32_768
"""Tokens; hardly a sequence is longer, so that both sides write what they encode."""

TEMPLATE = ROOT / "blends" / "templates" / "nano3.jinja"


@dataclass(frozen=True, slots=True)
class Side:
    """A process, and the CPU seconds that it costs before its first conversation."""

    process: Child
    start: float

    @property
    def whole(self) -> float:
        """CPU seconds of the whole process."""
        return self.process.cpu_seconds

    @property
    def rest(self) -> float:
        """CPU seconds without start-up."""
        return self.process.cpu_seconds - self.start


def measure(bench: Bench) -> list[Measure]:
    """Four rows for each kind of conversations."""
    return [row for variant in VARIANTS for row in _compare(bench, variant)]


def worker(conversations: Corpus, tokenizer: str, out: Path, pack_size: int) -> Child:
    """One worker of ours on some conversations."""
    return child.python("tests.benchmarks.sft_worker", conversations.path, tokenizer, out, pack_size)


def median_worker(bench: Bench, conversations: Corpus, pack_size: int) -> Child:
    """The worker in the middle of three."""
    tokenizer, runs = bench.vocabulary("qwen").ours, []
    for _ in range(RUNS):
        with bench.scratch() as out:
            runs.append(worker(conversations, tokenizer, out, pack_size))
    return child.median(runs)


def _peer(conversations: Corpus, tokenizer: str, out: Path) -> Child:
    return child.python("tests.peers.sft_loop", conversations.path, tokenizer, TEMPLATE, PACK_SIZE, out)


def _compare(bench: Bench, variant: Variant) -> list[Measure]:
    whole = chat_corpus.build(bench, variant)
    part, one = chat_corpus.leading(whole, PEER_SIZE), chat_corpus.one_conversation(whole)
    tokenizer = bench.vocabulary("qwen").folder
    mine, start, mine_whole = (median_worker(bench, each, PACK_SIZE) for each in (part, one, whole))
    ours, of_whole = Side(mine, start.cpu_seconds), Side(mine_whole, start.cpu_seconds)
    with bench.scratch() as out:
        peer_process = _peer(part, tokenizer, out / "peer.parquet")
        worker(part, tokenizer, out / "ours", PACK_SIZE)
        difference = json.loads(
            child.python("tests.benchmarks.sft_difference", out / "ours", out / "peer.parquet").stdout
        )
        peer = Side(peer_process, _peer(one, tokenizer, out / "one.parquet").cpu_seconds)
    facts = {
        "bytes": part.size, "whole_bytes": whole.size, "conversations": part.documents, "pack_size": PACK_SIZE,
        "ours_cpu_seconds": ours.whole, "peer_cpu_seconds": peer.whole, "ours_cpu_seconds_of_whole": of_whole.whole,
        "ours_start_cpu_seconds": ours.start, "peer_start_cpu_seconds": peer.start,
        "ours_peak_bytes": mine.peak_bytes, "peer_peak_bytes": peer_process.peak_bytes,
        "ours": json.loads(mine.stdout), "ours_of_whole": json.loads(mine_whole.stdout),
        "sequences": difference["sequences"], "sequences_of_one_side": difference["only"],
    }  # fmt: skip
    small, large = (f"{each.size / 1e6:.0f} MB" for each in (part, whole))
    rates = {
        f"{small}, whole process": (part.size / ours.whole, part.size / peer.whole),
        f"{small}, without start-up": (part.size / ours.rest, part.size / peer.rest),
        f"{large} (ours), whole process": (whole.size / of_whole.whole, part.size / peer.rest),
        f"{large} (ours), without start-up": (whole.size / of_whole.rest, part.size / peer.rest),
    }
    differing = max(difference["only"])
    title = f"SFT, {variant}" + (
        f" ({differing / max(difference['sequences']):.2%} OF SEQUENCES DIFFER)" if differing else ""
    )
    return [_row(f"{title}: {name}", *pair, facts) for name, pair in rates.items()]


def _row(name: str, ours: float, peer: float, facts: dict[str, Any]) -> Measure:
    """A row from two speeds in bytes per CPU second."""
    speeds = [f"{speed / 1e6:.1f} MB per CPU second" for speed in (ours, peer)]
    return Measure(name, speeds[0], f"{speeds[1]} (loop)", ours / peer, "x", TARGET, at_least=True, facts=facts)
