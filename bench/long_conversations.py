"""Conversations of 256 turns against conversations of 8: CPU time for a token that comes out.

A preparation that renders the conversation up to every message pays the square of its length. Ours renders each
message a fixed number of times, so a token of a long conversation may cost at most twice as much as one of a short
one. Messages are short (median 120 characters), and packs so large that no sequence is too long for one.

With reasoning every turn is a sequence of its own and repeats the history before it, so 256 turns make 24 times as many
tokens as the same text in conversations of 8. Numbers of conversations are such that both sides make about equally many
tokens; the facts also say what a byte of the source costs. Without start-up, which is what a corpus of one conversation
costs; the median of three runs each.
"""

import json
from dataclasses import dataclass
from typing import Any

from bench import chat_corpus
from bench.bench import Bench
from bench.chat_corpus import VARIANTS, Variant
from bench.record import Measure
from bench.sft_speed import median_worker, start_up

TARGET = 2.0
LONG, SHORT = 256, 8
PACK_SIZE = 131_072
"""Tokens; conversations of 256 turns have some 30,000, and twice as many where the text is dense."""

PER_MEGABYTE: dict[Variant, float] = {"plain": 1, "reasoning": 0.02}
"""Long conversations for each megabyte of the benchmark; those with reasoning make 4 million tokens each."""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds without start-up, for bytes of source and tokens of output."""

    seconds: float
    size: int
    produced: dict[str, Any]
    peak_bytes: int

    @property
    def per_token(self) -> float:
        """Nanoseconds."""
        return 1e9 * self.seconds / self.produced["tokens"]

    @property
    def per_byte(self) -> float:
        """Nanoseconds."""
        return 1e9 * self.seconds / self.size


def measure(bench: Bench) -> list[Measure]:
    """One row for each kind of conversations."""
    return [_compare(bench, variant) for variant in VARIANTS]


def messages_written(variant: Variant, turns: int) -> int:
    """How many messages' worth of tokens a conversation makes; reasoning is as long as two messages."""
    if variant == "plain":
        return 2 * turns
    return sum(2 * before + 4 for before in range(turns))


def _compare(bench: Bench, variant: Variant) -> Measure:
    start = start_up(bench)
    number = max(1, round(PER_MEGABYTE[variant] * bench.megabytes))
    equal = number * messages_written(variant, LONG) // messages_written(variant, SHORT)
    long, short = (_cost(bench, variant, *each, start) for each in ((LONG, number), (SHORT, equal)))
    facts = {
        "start_cpu_seconds": start, "pack_size": PACK_SIZE, "conversations": [number, equal],
        "bytes": [long.size, short.size], "cpu_seconds": [long.seconds, short.seconds],
        "nanoseconds_per_byte": [long.per_byte, short.per_byte], "peak_bytes": [long.peak_bytes, short.peak_bytes],
        "produced": [long.produced, short.produced],
    }  # fmt: skip
    lost = long.produced["oversize_sequences"] + short.produced["oversize_sequences"]
    title = f"{LONG} turns, {variant}" + (f" ({lost} SEQUENCES TOO LONG)" if lost else "")
    shown = [f"{cost.per_token:.0f} ns CPU a token" for cost in (long, short)]
    other = f"{shown[1]}, {SHORT} turns"
    return Measure(title, shown[0], other, long.per_token / short.per_token, "x", TARGET, at_least=False, facts=facts)


def _cost(bench: Bench, variant: Variant, turns: int, number: int, start: float) -> Cost:
    with bench.scratch() as folder:
        conversations = chat_corpus.of_turns(bench, folder / "conversations.jsonl", variant, turns, number)
        process = median_worker(bench, conversations, PACK_SIZE)
    return Cost(process.cpu_seconds - start, conversations.size, json.loads(process.stdout), process.peak_bytes)
