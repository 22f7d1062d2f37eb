"""The cap per prompt, held against a sort."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.dedup.documents import ranks_of

from tests.dedup.deduplication import Wiring, documents, large
from tests.examples import max_examples


def by_sorting(prompts, ranks, most):
    """The numbers of the documents beyond the best `most` of each prompt."""
    groups = {}
    for number in sorted(range(len(prompts)), key=lambda number: (-ranks[number], number)):
        groups.setdefault(prompts[number], []).append(number)
    return {number for prompt, group in groups.items() if prompt is not None for number in group[most:]}


@max_examples(40)
@given(
    rows=st.lists(st.tuples(st.sampled_from([None, "", "p", "q", "p "]), st.integers(0, 3)), min_size=1, max_size=30),
    most=st.integers(1, 4),
    partitions=st.integers(1, 4),
    slice_size=st.integers(1, 30),
    seed=st.integers(0, 9),
)
def test_best_of_each_prompt_are_kept_for_any_cut(rows, most, partitions, slice_size, seed):
    prompts, ranks = [prompt for prompt, _ in rows], [rank for _, rank in rows]
    with TemporaryDirectory() as folder:
        wiring = Wiring(Path(folder), partitions, slice_size, seed)
        dropped = wiring.cap(documents([""] * len(rows), ranks), large(prompts), most)["dropped"].to_pylist()
    assert len(dropped) == len({*dropped})
    assert {*dropped} == by_sorting(prompts, ranks, most)


@pytest.mark.parametrize(("most", "dropped"), [(1, [0, 1, 3]), (2, [0, 1]), (4, [])])
def test_correct_and_short_answers_are_kept(tmp_path, most, dropped):
    lengths = np.array([900, 100, 300, 400])
    ranks = ranks_of(np.array([1.0, 0.0, 1.0, 1.0]), -lengths)
    table = Wiring(tmp_path, partitions=1).cap(documents([""] * 4, ranks), large(["p"] * 4), most)
    assert table["dropped"].to_pylist() == dropped
