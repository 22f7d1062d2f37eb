"""What `kernel.c` computes, in plain Python: hashes of units and runs, sketches, and the keys of their bands."""

from itertools import pairwise

import numpy as np
from tokenmill.tasks.dedup.kernel import ROWS
from tokenmill.tasks.dedup.near import FACTORS, MASKS

GOLDEN, ALL = 0x9E3779B97F4A7C15, 2**64 - 1


def splitmix64(state):
    state = (state + GOLDEN) & ALL
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & ALL
    state = (state ^ state >> 27) * 0x94D049BB133111EB & ALL
    return state ^ state >> 31


def unit_hash(unit):
    """The hash of a unit, a string."""
    data = unit.encode()
    first, *rest = (int.from_bytes(data[start : start + 8], "little") for start in range(0, max(len(data), 1), 8))
    blocks = (splitmix64(block ^ splitmix64(8 * number)) for number, block in enumerate(rest, 1))
    return splitmix64((splitmix64(first) + len(data) + sum(blocks)) & ALL)


def run_hash(hashes):
    """The hash of a run of units, given theirs."""
    return splitmix64(sum(value * pow(GOLDEN, place, 2**64) for place, value in enumerate(hashes)) & ALL)


def shingles(units, weights, least):
    """The hashes of the runs of a text, given its units (pairs of a string and a kind) and the weights of kinds."""
    hashes, sizes = [unit_hash(unit) for unit, _ in units], [weights[kind] for _, kind in units]
    found = []
    for start in range(len(units)):
        end = next((end for end in range(start, len(units) + 1) if sum(sizes[start:end]) >= least), None)
        if end is None and start > 0:
            break
        found.append(run_hash(hashes[start:end]))
    return found


def sketches(found):
    """The sketches of `Shingles`, uint32 [documents, 128]; every document has shingles."""
    values = (found.hashes.astype(np.uint32)[:, None] ^ MASKS) * FACTORS
    return np.minimum.reduceat(values, found.offsets[:-1])


def keys(sketch):
    """The keys of the bands of a sketch."""
    bands = [sketch[start:stop].tolist() for start, stop in pairwise(range(0, len(sketch) + 1, ROWS))]
    values = [[number, *band] for number, band in enumerate(bands)]
    return [splitmix64(sum(v * pow(GOLDEN, ROWS - i, 2**64) for i, v in enumerate(each)) & ALL) for each in values]
