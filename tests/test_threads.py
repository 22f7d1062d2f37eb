"""A function over many items in threads: as a loop would, only sooner."""

from threading import Barrier, get_ident

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.runtime import in_threads

PATIENCE = 30


@given(st.integers(0, 2000), st.integers(1, 5))
def test_results_match_a_loop_in_order(count, threads):
    assert list(in_threads(lambda item: item * item, range(count), threads)) == [item * item for item in range(count)]


def test_few_items_wait_side_by_side():
    """Each waits for all the others to have begun."""
    together = Barrier(4, timeout=PATIENCE)
    assert sorted(in_threads(lambda _: together.wait(), range(4), 4)) == [0, 1, 2, 3]


def test_no_more_threads_than_asked_for():
    assert len(set(in_threads(lambda _: get_ident(), range(5000), 3))) <= 3


def test_what_one_item_raises_is_raised():
    def divided(item):
        return 100 // (item - 700)

    with pytest.raises(ZeroDivisionError):
        list(in_threads(divided, range(1000), 4))
