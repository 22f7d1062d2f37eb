"""Batches of sequences, and what needs no torch."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.score.models import TokenBatches, padded
from tokenmill.tasks.score.nll import ranges


def batches(lengths, budget):
    found = []
    TokenBatches(budget).run(lengths, found.append)
    return found


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


@given(LENGTHS, st.integers(1, 300), st.integers(50, 300))
def test_the_budget_is_halved_when_memory_runs_out(lengths, budget, memory):
    """On a device with memory for so many padded tokens, every sequence is computed once, and later calls fit at once."""
    found, failed, sized = [], [], TokenBatches(budget)

    def compute(rows):
        if len(rows) * lengths[rows].max() > memory:
            failed.append(rows)
            raise torch.OutOfMemoryError
        found.append(rows)

    sized.run(lengths, compute)
    assert sorted(row for batch in found for row in batch.tolist()) == np.flatnonzero(lengths).tolist()
    assert len(failed) <= max(1, budget).bit_length()
    failed.clear()
    sized.run(lengths, compute)
    assert not failed


def test_one_sequence_that_does_not_fit_is_an_error():
    def compute(_rows):
        raise torch.OutOfMemoryError

    with pytest.raises(RunError, match="memory ran out on one sequence of 7 tokens; lower max_length or max_tokens"):
        TokenBatches(100).run(np.array([7, 3]), compute)


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9)), min_size=1, max_size=12))
def test_sequences_become_rows(spans):
    starts, lengths = (np.array(each, np.int64) for each in zip(*spans, strict=True))
    rows = padded(np.arange(100, 200), starts, lengths)
    assert rows.shape == (len(spans), lengths.max())
    for row, start, length in zip(rows, starts, lengths, strict=True):
        assert row[:length].tolist() == list(range(100 + start, 100 + start + length))
        assert not row[length:].any()


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9)), max_size=12))
def test_ranges_match_python(spans):
    starts, counts = np.array(spans, np.int64).reshape(-1, 2).T
    assert ranges(starts, counts).tolist() == [each for start, count in spans for each in range(start, start + count)]


@pytest.mark.slow
def test_what_plans_and_chooses_imports_no_torch():
    names = ["choose", "embed", "engines", "nll", "ranking", "server", "weights"]
    code = f"import sys, {', '.join(f'tokenmill.tasks.score.{name}' for name in names)}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
