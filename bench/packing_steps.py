"""What `packing` compares, each timed alone on one thread: our packing, a sort, and a plain first fit.

    ours   `pack` with best_fit_decreasing on `SEQUENCES` sequences, checks, ordering and shuffling of bins included
    sort   NumPy's sort of the same sequences by length and hash, which no packing that is decreasing and repeatable
           can leave out
    peer   shuffle with Python's `random`, then look at every bin from the first on, on `PEER_SEQUENCES` of them

    python -m bench.packing_steps

Prints the CPU seconds of each (the median of `RUNS`) and the numbers of bins as JSON.
"""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenmill.tasks.pack.algorithms import Packs, pack

SEQUENCES = 1_000_000
PEER_SEQUENCES = 16_000
CAPACITY = 4096
MEDIAN, SIGMA = 512, 1.1
RUNS = 3


def lower_bound(lengths: np.ndarray, capacity: int) -> int:
    """The fewest bins that hold so many tokens if sequences could be cut: no packing needs fewer."""
    return -(-int(lengths.sum()) // capacity)


def sequences() -> tuple[np.ndarray, np.ndarray]:
    """Lengths, lognormal and cut to 1..CAPACITY, and hashes."""
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(MEDIAN), SIGMA, SEQUENCES).clip(1, CAPACITY).astype(np.int64)
    return lengths, generator.integers(0, 2**64, SEQUENCES, dtype=np.uint64)


def first_fit_shuffle(lengths: list[int], capacity: int, seed: int) -> list[list[int]]:
    """First fit as a list of gaps and a loop: quadratic, since every sequence looks at every bin before its own."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    bins: list[list[int]] = []
    gaps: list[int] = []
    for number in order:
        length = lengths[number]
        for place, gap in enumerate(gaps):
            if gap >= length:
                bins[place].append(number)
                gaps[place] = gap - length
                break
        else:
            bins.append([number])
            gaps.append(capacity - length)
    return bins


def median_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of the run in the middle."""
    costs: list[float] = []
    for _ in range(RUNS):
        started = time.process_time()
        work()
        costs.append(time.process_time() - started)
    return sorted(costs)[RUNS // 2]


def check(packs: Packs, lengths: np.ndarray) -> None:
    """Raises RuntimeError unless every sequence is in one bin and none is too full: a wrong result is no result."""
    once = np.array_equal(np.sort(packs.sequences), np.arange(len(lengths)))
    fullest = int(np.add.reduceat(lengths[packs.sequences], packs.offsets[:-1]).max())
    if not once or fullest > CAPACITY:
        raise RuntimeError(f"the packing is wrong: every sequence once: {once}, fullest bin: {fullest} of {CAPACITY}")


def main() -> None:
    """Time the three and count the bins."""
    lengths, content = sequences()
    few = lengths[:PEER_SEQUENCES].tolist()
    packs = pack(lengths, content, CAPACITY, "best_fit_decreasing", 0)
    check(packs, lengths)
    found: dict[str, Any] = {
        "ours_seconds": median_seconds(lambda: pack(lengths, content, CAPACITY, "best_fit_decreasing", 0)),
        "sort_seconds": median_seconds(lambda: np.lexsort((content, -lengths))),
        "peer_seconds": median_seconds(lambda: first_fit_shuffle(few, CAPACITY, 0)),
        "bins": len(packs.offsets) - 1,
        "lower_bound": lower_bound(lengths, CAPACITY),
        "peer_bins": len(first_fit_shuffle(few, CAPACITY, 0)),
        "peer_lower_bound": lower_bound(lengths[:PEER_SEQUENCES], CAPACITY),
        "sequences": SEQUENCES, "peer_sequences": PEER_SEQUENCES, "capacity": CAPACITY, "median": MEDIAN, "sigma": SIGMA,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
