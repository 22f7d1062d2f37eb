"""Packing a million sequences: seconds, bins, and against the loop over all bins that preparation scripts use.

Lengths are lognormal (median 512, sigma 1.1, cut to 1..4096; 857 on average) and bins hold 4096 tokens. The peer of the
first row is a sort of the sequences by length and hash, that of the second the bins that would hold the tokens if
sequences could be cut. In the third it is first fit in a shuffled order by a plain loop (`packing_steps`), on 16,000
sequences, because it is quadratic: for four times as many, each of them costs it four times as much.
"""

import json

from tests.benchmarks import child
from tests.benchmarks.bench import Bench
from tests.benchmarks.record import Measure

SECONDS = 2.0
BINS = 1.001
RATIO = 100.0


def measure(bench: Bench) -> list[Measure]:
    """Three rows: the time, the bins, and the cost of a sequence."""
    facts = json.loads(child.python("tests.benchmarks.packing_steps").stdout)
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
    ]  # fmt: skip
