"""The inner loops of `kernel.c` as functions of arrays, which together take 40 % of the CPU time that NumPy took for the same.

`pip` compiles the C file. A function rejects arrays of types other than documented and bounds outside of them. Other threads run
during a call.
"""

import ctypes

import numpy as np
from numpy.ctypeslib import ndpointer
from tokenmill.tasks.runtime import load

BANDS, ROWS = 32, 4
SLOTS_PER_KEY = 8


_KERNEL = load(__file__)
_BYTE, _NUMBER, _HASHED, _HALF = (
    ndpointer(kind, ndim=1, flags="C_CONTIGUOUS") for kind in (np.uint8, np.int64, np.uint64, np.uint32)
)
_COUNT = ctypes.c_int64
for _function, _result, _arguments in (
    (_KERNEL.collapse, None, (_BYTE, _NUMBER, _COUNT, _BYTE, _NUMBER)),
    (_KERNEL.units, _COUNT, (_BYTE, _NUMBER, _COUNT, _BYTE, _HASHED, _BYTE, _NUMBER, _NUMBER)),
    (_KERNEL.shingles, _COUNT, (_HASHED, _BYTE, _NUMBER, _COUNT, _NUMBER, _COUNT, _HASHED, _NUMBER)),
    (_KERNEL.band_keys, None, (_HASHED, _NUMBER, _COUNT, _HALF, _HALF, _HASHED)),
    (_KERNEL.distinct, None, (_HASHED, _NUMBER, _COUNT, _HASHED, _HASHED, _NUMBER)),
    (_KERNEL.common, None, (_HASHED, _NUMBER, _NUMBER, _COUNT, _NUMBER)),
    (_KERNEL.repeated, None, (_HASHED, _COUNT, ctypes.c_uint64, _BYTE, _BYTE)),
):
    _function.argtypes, _function.restype = _arguments, _result


def collapse(text: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Texts, uint8 [bytes] with bounds int64 [n + 1], with every run of white space as one blank and none at the ends."""
    _require_bounds(bounds, text)
    found, found_bounds = np.empty_like(text), np.empty_like(bounds)
    _KERNEL.collapse(text, bounds, len(bounds) - 1, found, found_bounds)
    return found[: found_bounds[-1]], found_bounds


def units(
    text: np.ndarray, bounds: np.ndarray, table: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the units of texts in normal form: hashes uint64, kinds uint8 and first bytes int64 [units], bounds int64 [n + 1].

    `table` uint8 [0x40000] gives code-point classes.
    """
    _require_bounds(bounds, text)
    hashes, kinds, starts = (np.empty(len(text), kind) for kind in (np.uint64, np.uint8, np.int64))
    firsts = np.empty_like(bounds)
    count = _KERNEL.units(text, bounds, len(bounds) - 1, table, hashes, kinds, starts, firsts)
    return hashes[:count], kinds[:count], starts[:count], firsts


def shingles(
    hashes: np.ndarray, kinds: np.ndarray, bounds: np.ndarray, weights: np.ndarray, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the shingles of units, uint64, with bounds int64 [n + 1]: runs that weigh `least`, given the weights of kinds, int64 [4]."""
    _require_bounds(bounds, hashes)
    found, found_bounds = np.empty_like(hashes), np.empty_like(bounds)
    count = _KERNEL.shingles(hashes, kinds, bounds, len(bounds) - 1, weights, least, found, found_bounds)
    return found[:count], found_bounds


def band_keys(hashes: np.ndarray, bounds: np.ndarray, masks: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the keys of the bands of sketches, uint64 [n, BANDS], given shingles, uint64 with bounds int64 [n + 1], and the constants of
    the random functions, uint32 [BANDS * ROWS].
    """
    _require_bounds(bounds, hashes)
    keys = np.empty((len(bounds) - 1) * BANDS, np.uint64)
    _KERNEL.band_keys(hashes, bounds, len(bounds) - 1, masks, factors, keys)
    return keys.reshape(-1, BANDS)


def distinct(values: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of each of n sets, uint64 with bounds int64 [n + 1], ascending; fastest if values are well mixed."""
    _require_bounds(bounds, values)
    found, found_bounds = np.empty_like(values), np.empty_like(bounds)
    spare = np.empty(np.diff(bounds).max(initial=0), np.uint64)
    _KERNEL.distinct(values, bounds, len(bounds) - 1, spare, found, found_bounds)
    return found[: found_bounds[-1]], found_bounds


def common(members: np.ndarray, bounds: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the number of members that both sets of each pair have, int64 [pairs]; `pairs` int64 [pairs, 2] are numbers of sets, each
    distinct and ascending, uint64 with bounds int64 [n + 1].
    """
    _require_bounds(bounds, members)
    if pairs.size and not 0 <= pairs.min() <= pairs.max() < len(bounds) - 1:
        raise IndexError(f"a pair refers to a set that is not among the {len(bounds) - 1}")
    shared = np.empty(len(pairs), np.int64)
    _KERNEL.common(members, bounds, np.ascontiguousarray(pairs).reshape(-1), len(pairs), shared)
    return shared


def repeated(keys: np.ndarray) -> np.ndarray:
    """Which keys, uint64 and well mixed, may occur again, bool: all that do, and at most an eighth of the others."""
    slots = SLOTS_PER_KEY << len(keys).bit_length()
    found = np.empty(len(keys), np.uint8)
    _KERNEL.repeated(keys, len(keys), slots - 1, np.zeros(slots // 4, np.uint8), found)
    return found.view(np.bool_)


def _require_bounds(bounds: np.ndarray, of: np.ndarray) -> None:
    if bounds[0] < 0 or bounds[-1] > len(of) or np.any(bounds[1:] < bounds[:-1]):
        raise ValueError(f"the bounds {bounds[0]} to {bounds[-1]} are not ascending or outside of {len(of)} items")
