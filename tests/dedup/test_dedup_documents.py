"""Ranks, held against the order of tuples; batches, against the whole."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.dedup.documents import BATCH_BYTES, LARGEST, batches, ranks_of

from tests.dedup.deduplication import documents, large

QUALITIES = st.floats(width=32)
SIZES = st.integers(-LARGEST, LARGEST)


def key(quality, size, priority):
    return (-math.inf if math.isnan(quality) else quality, size, -priority)


@given(rows=st.lists(st.tuples(QUALITIES | st.sampled_from([0.0, -0.0, 1.0]), SIZES, st.integers(0, 255)), min_size=2))
def test_ranks_order_by_quality_then_size_then_priority(rows):
    quality, size, priority = (np.array(column) for column in zip(*rows, strict=True))
    ranks = ranks_of(quality.astype(np.float64), size.astype(np.int64), priority.astype(np.int64)).tolist()
    for one, rank in zip(rows, ranks, strict=True):
        for other, other_rank in zip(rows, ranks, strict=True):
            assert (rank < other_rank) == (key(*one) < key(*other))


def test_sizes_beyond_the_largest_are_equal():
    ranks = ranks_of(np.zeros(4), np.array([LARGEST - 1, LARGEST, 2**40, -(2**40)]), np.zeros(4, np.int64))
    assert ranks[3] < ranks[0] < ranks[1] == ranks[2]


@pytest.mark.parametrize("priority", [-1, 256])
def test_a_priority_that_does_not_fit_is_named(priority):
    with pytest.raises(ValueError, match=rf"^document 1 has priority {priority}; priorities are 0 to 255$"):
        ranks_of(np.zeros(2), np.zeros(2, np.int64), np.array([0, priority]))


def test_documents_are_numbered_in_order_and_whole():
    with pytest.raises(ValueError, match="do not ascend"):
        documents(["a", "b"], numbers=[3, 3])
    with pytest.raises(ValueError, match="2 numbers, 2 texts and 1 ranks"):
        documents(["a", "b"], ranks=[1])


@given(
    sizes=st.lists(st.sampled_from([0, 1, BATCH_BYTES // 3, BATCH_BYTES - 1, BATCH_BYTES, 2 * BATCH_BYTES]), max_size=8)
)
def test_batches_cover_all_texts_once_and_are_small(sizes):
    ranges = list(batches(large(["x" * size for size in sizes])))
    assert [number for start, stop in ranges for number in range(start, stop)] == list(range(len(sizes)))
    assert all(stop - start == 1 or sum(sizes[start:stop]) <= BATCH_BYTES for start, stop in ranges)
