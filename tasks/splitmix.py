"""Random numbers by hashing: the same in every version and process, unlike a generator's."""

import numpy as np

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""The step from one state to the next."""


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Return the next draw of SplitMix64 in each of these states (uint64): a bijective mixing function.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, with the constants of Java's
    SplittableRandom.
    """
    mixed = values + GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
