"""Percentiles, held against counting."""

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.score.ranking import percentile_within_split


def percentiles(values, *split):
    columns = [pa.chunked_array([pa.array(column, pa.string())]) for column in split]
    return percentile_within_split(pa.chunked_array([pa.array(values, pa.float64())]), columns).to_pylist()


def counted(values, keys):
    """The share below, and half of those that are equal, one row at a time."""
    found = []
    for value, key in zip(values, keys, strict=True):
        if value is None or math.isnan(value):
            found.append(None)
            continue
        others = [
            each
            for each, of in zip(values, keys, strict=True)
            if of == key and each is not None and not math.isnan(each)
        ]
        below, equal = sum(each < value for each in others), sum(each == value for each in others)
        found.append(100 * (below + equal / 2) / len(others))
    return found


VALUE = st.none() | st.just(math.nan) | st.sampled_from([0.0, 0.5, 1.0, -1.0]) | st.floats(allow_nan=False)
ROWS = st.lists(st.tuples(VALUE, st.sampled_from("ab") | st.none(), st.sampled_from(["x", "y"])), max_size=30)


@given(ROWS)
def test_it_is_the_share_below_and_half_of_the_equal(rows):
    values, data_sets, splits = zip(*rows, strict=True) if rows else ((), (), ())
    expected = counted(values, list(zip(data_sets, splits, strict=True)))
    assert percentiles(values, data_sets, splits) == pytest.approx(expected, nan_ok=False) or expected == []


def test_columns_are_not_confused():
    assert percentiles([1, 2], ["a", "ab"], ["bc", "c"]) == [50, 50]


def test_chunks_do_not_matter():
    values, split = pa.chunked_array([[3.0, 1.0], [], [2.0]]), pa.chunked_array([["a"], ["a", "a"]])
    assert percentile_within_split(values, [split]).to_pylist() == pytest.approx([500 / 6, 100 / 6, 50])
