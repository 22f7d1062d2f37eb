"""Batches of sequences, and what needs no torch."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.score.batches import batches, padded, ranges

LENGTHS = st.lists(st.integers(0, 50), max_size=40).map(lambda lengths: np.array(lengths, np.int64))


@given(LENGTHS, st.integers(1, 300))
def test_every_sequence_is_in_one_batch_within_the_budget(lengths, budget):
    found = batches(lengths, budget)
    assert sorted(row for batch in found for row in batch.tolist()) == np.flatnonzero(lengths).tolist()
    assert all(len(batch) == 1 or len(batch) * lengths[batch].max() <= budget for batch in found)
    order = np.concatenate([np.empty(0, np.int64), *found])
    assert (np.diff(lengths[order]) <= 0).all()


@given(LENGTHS, st.integers(1, 300))
def test_batches_are_as_large_as_the_budget_allows(lengths, budget):
    found = batches(lengths, budget)
    for batch in found[:-1]:
        assert (len(batch) + 1) * lengths[batch].max() > budget


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9)), min_size=1, max_size=12))
def test_sequences_become_rows(spans):
    starts, lengths = (np.array(each, np.int64) for each in zip(*spans, strict=True))
    rows = padded(np.arange(100, 200), starts, lengths)
    assert rows.shape == (len(spans), lengths.max())
    for row, start, length in zip(rows, starts, lengths, strict=True):
        assert row[:length].tolist() == list(range(100 + start, 100 + start + length))
        assert not row[length:].any()


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9)), max_size=12))
def test_ranges_are_those_of_python(spans):
    starts, counts = np.array(spans, np.int64).reshape(-1, 2).T
    assert ranges(starts, counts).tolist() == [each for start, count in spans for each in range(start, start + count)]


@pytest.mark.slow
def test_what_plans_and_chooses_imports_no_torch():
    names = ["batches", "choose", "embed", "engines", "nll", "ranking", "server", "weights"]
    code = f"import sys, {', '.join(f'tokenmill.tasks.score.{name}' for name in names)}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
