"""Speed of NLL under a causal model, compared with a plain loop of `transformers`, on a GPU or with a small model on the CPU.

The loop (`bench/nll_loop.py`) pads batches in file order and computes the logits of all positions, as scripts do.
Both score the same sequences in the same process, and their sums are compared. The title names the device: the speed of a
small model on a CPU says nothing about a GPU.
"""

import json
from typing import Any

from bench import child
from bench.bench import Bench
from bench.record import Measure

FASTER = 2.0
"""Times the loop."""


def measure(bench: Bench) -> list[Measure]:
    """Tokens a second."""
    return [row(json.loads(child.python("bench.nll_worker").stdout))]


def row(facts: dict[str, Any]) -> Measure:
    """The measure in the facts of `bench/nll_worker.py`."""
    speeds = [facts["tokens"] / facts[side]["seconds"] for side in ("ours", "loop")]
    share = f", {facts['share_of_peak']:.0%} of the peak" if facts["share_of_peak"] else ""
    peaks = [
        f", {facts[side]['peak_bytes'] / 1e9:.1f} GB" if facts[side]["peak_bytes"] else "" for side in ("ours", "loop")
    ]
    title = f"NLL on {facts['device']}, {facts['sequences']:,} sequences, {facts['parameters'] / 1e6:,.0f} M parameters"
    ours = f"{speeds[0]:,.0f} tokens/s{share}{peaks[0]}"
    loop = f"{speeds[1]:,.0f} tokens/s (loop){peaks[1]}"
    return Measure(title, ours, loop, speeds[0] / speeds[1], "x", FASTER, at_least=True, facts=facts)
