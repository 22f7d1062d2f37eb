"""Near-duplicates among a million short documents, from JSON Lines to decisions, beside `datasketch`.

Two worker processes find exact and near duplicates on disk (`dedup_worker`) among documents with planted copies
(`dedup_corpus`). The peer (`bench/datasketch_loop.py`) looks for near-duplicates in one process, in memory, among the
first quarter of a million of the same documents, which takes it about a minute. Both are judged by what was planted and
by comparing what was dropped with that for which it went, as sets of strings: the peer drops what its index finds, ours
what is verified. Speed is documents a CPU second, so two processes are no advantage.
"""

import json
from pathlib import Path
from typing import Any

from bench import child, dedup_corpus
from bench.bench import Bench
from bench.dedup_corpus import Planted
from bench.record import Measure

PEER_DOCUMENTS = 250_000

SECONDS = 180e-6
"""A document, of wall time: three minutes a million."""

FASTER = 8.0
"""Times the peer."""

RECALL, PRECISION = 95.0, 100.0
"""Per cent, of planted near copies and of drops."""

MEGABYTES = 1_000.0
"""Of memory, for any one process."""


def measure(bench: Bench) -> list[Measure]:
    """Wall time, documents a CPU second, recall, precision and memory."""
    planted = dedup_corpus.build(bench)
    few = min(PEER_DOCUMENTS, planted.documents)
    with bench.scratch() as out:
        dropped = out / "ours"
        ours = json.loads(child.python("bench.dedup_worker", planted.path, out / "store", dropped).stdout)
        ours |= {"documents": planted.documents, "judged": _judged(planted, dropped, planted.documents)}
        dropped = out / "theirs"
        theirs = json.loads(child.python("bench.datasketch_loop", planted.path, few, dropped).stdout)
        theirs |= {"documents": few, "judged": _judged(planted, dropped, few)}
    return list(_rows(planted, ours, theirs))


def _judged(planted: Planted, dropped: Path, count: int) -> dict[str, Any]:
    judge = child.python("bench.dedup_judge", planted.path, planted.pairs, dropped, count)
    return json.loads(judge.stdout)


def _rows(planted: Planted, ours: dict[str, Any], theirs: dict[str, Any]) -> list[Measure]:
    """One row for each question; the facts are with the first."""
    title = f"near-dedup, {planted.documents:,} documents"
    facts = {"bytes": planted.size, "ours": ours, "datasketch": theirs}
    wall = f"{ours['seconds']:.1f} s wall, {ours['documents'] / ours['seconds']:,.0f} documents/s in 2 processes"
    other = f"{theirs['documents'] / theirs['seconds']:,.0f} documents/s (datasketch, {theirs['documents']:,})"
    most = SECONDS * planted.documents
    speeds = [each["documents"] / each["cpu_seconds"] for each in (ours, theirs)]
    shown = [f"{speed:,.0f} documents per CPU second" for speed in speeds]
    recalls, precisions = ([share(each["judged"]) for each in (ours, theirs)] for share in (_recall, _precision))
    found = [f"{each['judged']['near']['found']:,} of {each['judged']['near']['pairs']:,}" for each in (ours, theirs)]
    right = [f"{each['judged']['right']:,} of {each['judged']['dropped']:,}" for each in (ours, theirs)]
    peaks = [each["peak_bytes"] / 1e6 for each in (ours, theirs)]
    held = [f"{peak:,.0f} MB" for peak in peaks]
    return [
        Measure(title, wall, other, ours["seconds"], "s", most, at_least=False, facts=facts),
        Measure(f"{title}, speed", shown[0], shown[1], speeds[0] / speeds[1], "x", FASTER, at_least=True),
        Measure(
            f"{title}, near copies found",
            found[0],
            f"{found[1]}, {recalls[1]:.1f} %",
            recalls[0],
            "%",
            RECALL,
            at_least=True,
        ),
        Measure(
            f"{title}, drops that were right",
            right[0],
            f"{right[1]}, {precisions[1]:.1f} %",
            precisions[0],
            "%",
            PRECISION,
            at_least=True,
        ),
        Measure(
            f"{title}, peak memory of a process",
            held[0],
            f"{held[1]} for {theirs['documents']:,}",
            peaks[0],
            "MB",
            MEGABYTES,
            at_least=False,
        ),
    ]


def _recall(judged: dict[str, Any]) -> float:
    return 100 * judged["near"]["found"] / max(judged["near"]["pairs"], 1)


def _precision(judged: dict[str, Any]) -> float:
    return 100 * judged["right"] / max(judged["dropped"], 1)
