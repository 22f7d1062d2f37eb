"""Peak memory of one worker on a file, and on a file ten times as large.

Rows stream in batches, so the larger file may need no more than the smaller one: at most a tenth more, for the index
(4 bytes a document) and for what the encoder remembers. Both run with the default shard size, as a worker would, and
the peak is the largest resident set that the kernel saw.
"""

from tests.benchmarks import child
from tests.benchmarks.bench import Bench
from tests.benchmarks.child import Child
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.record import Measure

TARGET = 1.1
SHARD_SIZE = 256_000_000


def measure(bench: Bench) -> list[Measure]:
    """One row for each vocabulary."""
    return [_compare(bench, name) for name in bench.tokenizers]


def _compare(bench: Bench, name: str) -> Measure:
    small, large = bench.corpus(0.1), bench.corpus()
    low, high = (_prepare(bench, corpus, name) for corpus in (small, large))
    shown = [
        f"{run.peak_bytes / 1e6:.0f} MB for {corpus.size / 1e6:.0f} MB" for run, corpus in ((high, large), (low, small))
    ]
    facts = {
        "bytes": [small.size, large.size],
        "peak_bytes": [low.peak_bytes, high.peak_bytes],
        "shard_size": SHARD_SIZE,
    }
    ratio = high.peak_bytes / low.peak_bytes
    return Measure(f"peak memory, {name}", shown[0], shown[1], ratio, "x", TARGET, at_least=False, facts=facts)


def _prepare(bench: Bench, corpus: Corpus, name: str) -> Child:
    with bench.scratch() as out:
        return child.python("tests.benchmarks.one_worker", corpus.path, bench.vocabulary(name).ours, out, SHARD_SIZE)
