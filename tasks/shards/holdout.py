"""Assign documents to train, valid and test by a hash of their content, never by position.

So every source contributes the chosen share, equal documents are kept together, and added data doesn't move documents between splits.
A hash is read as a fraction of 2**64: the lowest go to test, the next to valid.
"""

import numpy as np

PARTS = ("train", "valid", "test")
"""The parts of a shard with held-out documents."""


def part_of(digest: int, valid: float, test: float) -> str:
    """The part of one document, as in `parts_of`."""
    return "test" if digest < int(test * 2**64) else "valid" if digest < int((valid + test) * 2**64) else "train"


def parts_of(digests: np.ndarray, valid: float, test: float) -> np.ndarray:
    """The part of each document, as an index into PARTS (uint8), from its 64-bit hash (uint64) and the shares."""
    in_test, held_out = (np.uint64(int(share * 2**64)) for share in (test, valid + test))
    return np.where(digests < in_test, 2, np.where(digests < held_out, 1, 0)).astype(np.uint8)
