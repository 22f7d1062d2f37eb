"""Large buckets of texts that fill one form, held against every pair compared as sets of Python strings."""

import random
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.dedup import near
from tokenmill.tasks.dedup.near import VERIFIED

from tests.dedup.deduplication import Wiring, documents, edges
from tests.dedup.scripts import jaccard
from tests.dedup.test_near import VOCABULARY, from_the_best_down, pairs_of
from tests.dedup.test_shingles import shingled

FORM = [f"form{number}" for number in range(90)]


def forms(vocabulary, count):
    """Shuffled texts of 90 words that all share and 12 of their own, of which each second one begins its own words as the
    one before: two are alike at 0.83 then, else at 0.78.
    """
    generator, texts = random.Random(0), []
    for _ in range(count // 2):
        first = generator.choices(vocabulary, k=3)
        texts += [" ".join([*FORM, *first, *generator.choices(vocabulary, k=9)]) for _ in range(2)]
    generator.shuffle(texts)
    return texts


def compared(texts):
    """Every pair of a similarity of 0.8 or more."""
    sets = [{*shingled(text, 5)} for text in texts]
    similar = ((pair, jaccard(sets[pair[0]], sets[pair[1]])) for pair in combinations(range(len(sets)), 2))
    return {pair: similarity for pair, similarity in similar if similarity >= 0.8}


@pytest.fixture(scope="module")
def filled():
    """Forms, and which of them are alike."""
    texts = forms(VOCABULARY, 300)
    return texts, compared(texts)


def test_who_fills_one_form_is_compared_with_all_who_do(tmp_path, filled):
    texts, alike = filled
    wiring = Wiring(tmp_path)
    every = wiring.verified(documents(texts))
    assert len(alike) == 150
    assert pairs_of(every) == alike
    assert len(pairs_of(every[: wiring.partitions])) < len(alike)  # leaders alone miss some
    assert all(each.unseen.size == 0 for each in wiring.crowds)


def test_versions_that_go_for_a_leader_are_not_compared_with_each_other(tmp_path):
    generator, words = random.Random(0), VOCABULARY[:200]
    texts = [" ".join([*words, f"own{number}"]) for number in range(100)]
    generator.shuffle(texts)
    wiring = Wiring(tmp_path)
    assert wiring.near(documents(texts)).num_rows == 99
    assert sum(each.verified.num_rows for each in wiring.crowds) == 0


@pytest.mark.parametrize(("bound", "value"), [("SHINGLES_AT_ONCE", 2000), ("COMPARED", 3)])
def test_who_meets_a_bound_is_named(tmp_path, monkeypatch, filled, bound, value):
    texts, alike = filled
    monkeypatch.setattr(f"tokenmill.tasks.dedup.near.{bound}", value)
    wiring = Wiring(tmp_path)
    found, unseen = (
        pairs_of(wiring.verified(documents(texts))),
        {*np.concatenate([each.unseen for each in wiring.crowds])},
    )
    missed = alike.keys() - found.keys()
    assert found.items() <= alike.items()
    assert missed
    assert all({*pair} & unseen for pair in missed)
    assert 0 < len(unseen) < len(texts)


def test_buckets_that_are_compared_in_portions_are_compared_the_same(tmp_path, monkeypatch, filled):
    texts, alike = filled
    monkeypatch.setattr("tokenmill.tasks.dedup.near.SHINGLES_AT_ONCE", 60_000)  # half a dozen portions
    wiring = Wiring(tmp_path, partitions=1)
    assert pairs_of(wiring.verified(documents(texts))) == alike
    assert wiring.crowds[0].unseen.tolist() == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [40, 3000])
@pytest.mark.parametrize("links", [1, 16])
def test_small_buckets_and_large_ones_are_compared_the_same(tmp_path, monkeypatch, words, links):
    monkeypatch.setattr("tokenmill.tasks.dedup.near.MAX_LINKS", links)
    texts = [*forms(VOCABULARY[:words], 200), "five words and no more", "", *forms(VOCABULARY, 40)]
    found = []
    for size in (0, 20, 10_000):
        monkeypatch.setattr("tokenmill.tasks.dedup.near.SMALL_BUCKET", size)
        monkeypatch.setattr("tokenmill.tasks.dedup.near.PAIRS_AT_ONCE", 1000)
        wiring = Wiring(tmp_path / str(size))
        wiring.verified(documents(texts))
        found.append([(each.verified.to_pylist(), each.unseen.tolist()) for each in wiring.crowds])
    assert found[0] == found[1] == found[2]
    assert any(rows for rows, _ in found[0])


@given(
    graph=st.integers(2, 12).flatmap(
        lambda count: st.tuples(
            st.lists(st.integers(0, 3), min_size=count, max_size=count),
            st.sets(
                st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda pair: pair[0] < pair[1])
            ),
            st.sets(st.integers(0, count - 1)),
        )
    )
)
def test_certain_drops_do_not_depend_on_crowds(graph):
    ranks, alike, crowded = graph
    rows = [
        {"better": one, "worse": other, "jaccard": 0.9}
        for pair in alike
        for one, other in [sorted(pair, key=lambda number: (-ranks[number], number))]
    ]
    known = [row for row in rows if not {row["better"], row["worse"]} <= crowded]
    gone = {
        *near.certain_drops([pa.Table.from_pylist(known, schema=VERIFIED)], np.array([*crowded], np.int64)).tolist()
    }
    expected = from_the_best_down(len(ranks), ranks, dict.fromkeys(alike, 0.9))
    assert gone <= expected.keys()
    rest = [row for row in rows if row not in known and not {row["better"], row["worse"]} & gone]
    assert edges(near.resolve([pa.Table.from_pylist([*known, *rest], schema=VERIFIED)])).keys() == expected.keys()
