"""Packing a million sequences: seconds, bins, against the loop over all bins that preparation scripts use, and once more.

Lengths are lognormal (median 512, sigma 1.1, cut to 1..4096; 857 on average) and bins hold 4096 tokens. The peer of the
first row is a sort of the sequences by length and hash, that of the second the bins that would hold the tokens if
sequences could be cut. In the third it is first fit in a shuffled order by a plain loop (`packing_steps`), on 16,000
sequences, because it is quadratic: for four times as many, each of them costs it four times as much.

The last row is the whole command, `tokenmill sft`, on a million short conversations that were prepared before, with another pack
size: Prefect, Dask, planning and publication included. Its peer is the first time, and no shard may be built again.
"""

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import orjson

from bench import chat_corpus, child, flow
from bench.bench import Bench
from bench.child import Child
from bench.record import Measure

SECONDS = 2.0
BINS = 1.001
RATIO = 100.0
AGAIN_SECONDS = 10.0

CONVERSATIONS = 1_000_000
QUESTION, ANSWER, SIGMA = 120, 400, 0.9
"""Medians of the lengths of messages, in characters, and how they scatter."""

TEXT_DOCUMENTS = 500
PACK_SIZES = 4096, 8192


def measure(bench: Bench) -> list[Measure]:
    """Four rows: the time, the bins, the cost of a sequence, and another pack size."""
    facts = json.loads(child.python("bench.packing_steps").stdout)
    seconds, bins, bound = facts["ours_seconds"], facts["bins"], facts["lower_bound"]
    ours = 1e6 * seconds / facts["sequences"]
    peer = 1e6 * facts["peer_seconds"] / facts["peer_sequences"]
    million, few = f"{facts['sequences']:,}", f"{facts['peer_sequences']:,}"
    return [
        Measure(
            f"packing {million} sequences: time", f"{seconds:.2f} s CPU", f"{facts['sort_seconds']:.2f} s to sort them",
            seconds, "s", SECONDS, at_least=False, facts=facts,
        ),
        Measure(
            f"packing {million} sequences: bins", f"{bins:,}", f"{bound:,} hold as many tokens",
            bins / bound, "x", BINS, at_least=False,
        ),
        Measure(
            "packing: cost of a sequence", f"{ours:.2f} µs", f"{peer:.1f} µs, plain first fit of {few}",
            peer / ours, "x", RATIO, at_least=True,
        ),
        _again(bench),
    ]  # fmt: skip


def _again(bench: Bench) -> Measure:
    """The whole command on a million conversations, with another pack size than before."""
    with bench.scratch() as folder:
        write_conversations(bench, folder / "rows.jsonl")
        blend = flow.write_blend(folder / "blend.json", folder / "rows.jsonl")
        first, again = (_prepare(bench, blend, folder / "out", size) for size in PACK_SIZES)
    shards = _record(again)["shards"]
    facts = {
        "first_cpu": first.cpu_seconds,
        "cpu": again.cpu_seconds,
        "shards": shards,
        "tokens": _record(again)["tokens"],
    }
    if shards["built"]:
        raise RuntimeError(f"{shards['built']} shards were built again")
    return Measure(
        f"sft, another pack size, {CONVERSATIONS:,} sequences",
        f"{again.wall_seconds:.1f} s wall, {again.cpu_seconds:.1f} s CPU",
        f"{first.wall_seconds:.1f} s wall, {first.cpu_seconds:.1f} s CPU the first time",
        again.wall_seconds, "s", AGAIN_SECONDS, at_least=False, facts=facts,
    )  # fmt: skip


def write_conversations(bench: Bench, place: Path) -> None:
    """Conversations of one question and one answer, cut from the corpus at random."""
    numbers = Random(0)
    with Path(bench.corpus().path).open("rb") as lines:
        text = "\n".join(orjson.loads(line)["text"] for line in islice(lines, TEXT_DOCUMENTS))
    text = chat_corpus.MARKUP.sub("", text)

    def some(median: int) -> str:
        size = max(8, int(numbers.lognormvariate(0, SIGMA) * median))
        start = numbers.randrange(len(text) - size)
        return text[start : start + size].strip() or "…"

    with place.open("wb") as file:
        for _ in range(CONVERSATIONS):
            messages = [{"role": "user", "content": some(QUESTION)}, {"role": "assistant", "content": some(ANSWER)}]
            file.write(orjson.dumps({"messages": messages}, option=orjson.OPT_APPEND_NEWLINE))


def _prepare(bench: Bench, blend: Path, out: Path, pack_size: int) -> Child:
    command = [child.TOKENMILL, "sft", str(blend), "--output-dir", str(out), f"pack_size={pack_size}"]
    return child.run(command, flow.environment(bench))


def _record(run: Child) -> dict[str, Any]:
    return json.loads(run.stdout)["sft"]
