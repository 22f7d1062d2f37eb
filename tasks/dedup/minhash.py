"""MinHash: a sketch of 128 numbers per document, of which two documents share as many as their shingles do.

Each number is the smallest of one random function over the shingles, so two sketches agree in a place with the odds of
the Jaccard similarity J. Four places make a band, and whoever shares one of the 32 bands is a candidate, with odds
1 - (1 - J^4)^32:

    J      0.3    0.4    0.5    0.6    0.7    0.8
    odds   23 %   56 %   87 %   98.8 % 99.98% 99.999995 %

More rows in a band would make candidates fewer and misses more. Candidates are verified afterwards, so that here only
misses matter. `rensa` computes a million sketches of 60 shingles in 1.2 s a core; handing them over as Python's numbers
takes another 4, a few at a time.
"""

from array import array
from itertools import pairwise

import numpy as np
from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue] - its names are added by the extension

from .shingles import Shingles, combined

BANDS, ROWS = 32, 4
PERMUTATIONS = BANDS * ROWS
SEED = 1
"""Chosen once: another one gives other candidates at random."""

AT_ONCE = 256
"""Sketches that are Python's numbers at the same time: 1 MB, which stays in the cache. All at once take twice as long."""


def signatures(shingles: Shingles) -> np.ndarray:
    """The sketch of each document, uint32 [documents, 128]; that of a document without shingles means nothing."""
    offsets = shingles.offsets.astype(np.uint64)
    bounds = [*range(0, len(offsets) - 1, AT_ONCE), len(offsets) - 1]
    rows = [row for start, stop in pairwise(bounds) for row in _sketches(shingles.hashes, offsets[start : stop + 1])]
    return np.frombuffer(b"".join(rows), np.uint32).reshape(-1, PERMUTATIONS)


def _sketches(hashes: np.ndarray, offsets: np.ndarray) -> list[bytes]:
    own = hashes[int(offsets[0]) : int(offsets[-1])]
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(own, offsets - offsets[0], PERMUTATIONS, SEED)
    return [array("I", row).tobytes() for row in matrix.to_rows()]


def band_keys(sketches: np.ndarray) -> np.ndarray:
    """The key of each band of sketches, uint64 [documents, 32]: equal where band and its four numbers are."""
    wide = sketches.astype(np.uint64).reshape(-1, BANDS, ROWS)
    bands = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), wide.shape[:2])
    return combined([bands, *(wide[:, :, row] for row in range(ROWS))])
