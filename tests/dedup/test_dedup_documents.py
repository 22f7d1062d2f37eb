"""Ranks, held against the order of tuples; batches, against the whole."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.dedup.documents import BATCH_BYTES, LARGEST, batches, ranks_of

from tests.dedup.deduplication import large

QUALITIES = st.floats(width=32)
SIZES = st.integers(-LARGEST, LARGEST)


def key(quality, size):
    return (-math.inf if math.isnan(quality) else quality, size)


@given(rows=st.lists(st.tuples(QUALITIES | st.sampled_from([0.0, -0.0, 1.0]), SIZES), min_size=2))
def test_ranks_order_by_quality_then_size(rows):
    quality, size = (np.array(column) for column in zip(*rows, strict=True))
    ranks = ranks_of(quality.astype(np.float64), size.astype(np.int64)).tolist()
    for one, rank in zip(rows, ranks, strict=True):
        for other, other_rank in zip(rows, ranks, strict=True):
            assert (rank < other_rank) == (key(*one) < key(*other))


def test_sizes_beyond_the_largest_are_equal():
    ranks = ranks_of(np.zeros(4), np.array([LARGEST - 1, LARGEST, 2**40, -(2**40)]))
    assert ranks[3] < ranks[0] < ranks[1] == ranks[2]


@given(
    sizes=st.lists(st.sampled_from([0, 1, BATCH_BYTES // 3, BATCH_BYTES - 1, BATCH_BYTES, 2 * BATCH_BYTES]), max_size=8)
)
def test_batches_cover_all_texts_once_and_are_small(sizes):
    ranges = list(batches(large(["x" * size for size in sizes])))
    assert [number for start, stop in ranges for number in range(start, stop)] == list(range(len(sizes)))
    assert all(stop - start == 1 or sum(sizes[start:stop]) <= BATCH_BYTES for start, stop in ranges)
