"""A diverse choice, held against all pairs and all centers compared one by one."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.score import choose as choosing
from tokenmill.tasks.score.choose import choose, kmeans, nearest_centers, nearest_with_torch, quotas
from tokenmill.tasks.score.embed import unit_vectors

from tests.examples import max_examples


def around(generator, sizes, dimensions=16, spread=0.1):
    """Rows in tight groups, the groups in directions of their own; and the group of each row."""
    middles = np.linalg.qr(generator.normal(size=(dimensions, len(sizes))))[0].T
    labels = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    noise = spread / np.sqrt(dimensions) * generator.normal(size=(len(labels), dimensions))
    return unit_vectors(middles[labels] + noise, dimensions), labels


def cosines(vectors, rows, others=None):
    return vectors[rows].astype(np.float64) @ vectors[rows if others is None else others].astype(np.float64).T


def same_groups(one, other):
    return len({*zip(one.tolist(), other.tolist(), strict=True)}) == len({*one.tolist()}) == len({*other.tolist()})


@pytest.mark.parametrize("seed", range(5))
def test_groups_that_lie_apart_are_found(seed):
    vectors, groups = around(np.random.default_rng(seed), [300, 40, 100, 5, 60])
    found = kmeans(vectors, 5, seed, nearest_centers)
    assert same_groups(found.labels, groups)
    assert sorted(found.sizes.tolist()) == [5, 40, 60, 100, 300]


@pytest.mark.parametrize("nearest", [nearest_centers, nearest_with_torch("cpu")])
def test_every_row_is_with_its_nearest_center_and_centers_are_means(nearest, monkeypatch):
    monkeypatch.setattr(choosing, "ROUNDS", 1000)
    monkeypatch.setattr(choosing, "ROWS", 37)
    monkeypatch.setattr(choosing, "CELLS", 100)
    vectors, _ = around(np.random.default_rng(1), [80, 70, 60], spread=2)
    found = kmeans(vectors, 7, 1, nearest)
    squares = ((vectors[:, None].astype(np.float64) - found.centers[None]) ** 2).sum(axis=2)
    chosen = squares[np.arange(len(vectors)), found.labels]
    np.testing.assert_allclose(chosen, squares.min(axis=1), atol=1e-5)
    np.testing.assert_allclose(found.distances, chosen, atol=1e-5)
    for cluster, center in enumerate(found.centers):
        np.testing.assert_allclose(vectors[found.labels == cluster].mean(axis=0), center, atol=1e-5)


def test_rows_that_are_all_the_same_make_clusters_too():
    vectors = np.tile(np.array([[0.6, 0.8]], np.float32), (50, 1))
    found = choose(vectors, 10, 4, 0.9, 0)
    assert len(found.rows) == 1
    assert found.removed.num_rows == 49
    assert len(choose(vectors, 10, 4, 1.1, 0).rows) == 10


def test_a_cluster_without_rows_keeps_its_center():
    vectors = np.repeat(np.eye(2, dtype=np.float32), 10, axis=0)
    found = kmeans(vectors, 5, 0, nearest_centers)
    assert sorted(found.sizes.tolist()) == [0, 0, 0, 10, 10]
    np.testing.assert_allclose(np.linalg.norm(found.centers, axis=1), 1)


def level(taken, left, budget):
    """One row at a time to whoever has the fewest, the first of them."""
    taken, left, given = list(taken), list(left), [0] * len(taken)
    for _ in range(max(0, min(budget, sum(taken) + sum(left)) - sum(taken))):
        place = min((number for number in range(len(taken)) if left[number]), key=lambda number: taken[number])
        taken[place], left[place], given[place] = taken[place] + 1, left[place] - 1, given[place] + 1
    return given


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=8), st.integers(0, 200))
@example([(5, 5), (0, 1), (0, 0)], 7)
def test_quotas_are_as_even_as_sizes_allow(clusters, budget):
    taken, left = (np.array(each, np.int64) for each in zip(*clusters, strict=True))
    budget = max(budget, int(taken.sum()))
    assert quotas(taken, left, budget).tolist() == level(taken, left, budget)


@given(st.integers(0, 10_000), st.sampled_from([0.5, 0.9, 0.99, 1.1]), st.integers(1, 120), st.integers(1, 6))
@max_examples(40)
def test_chosen_rows_differ_and_drops_have_a_witness(seed, threshold, budget, clusters):
    vectors, _ = around(np.random.default_rng(seed), [50, 30, 12], 8, spread=0.7)
    found = choose(vectors, budget, clusters, threshold, seed)
    assert len(found.rows) <= budget
    assert np.array_equal(found.rows, np.unique(found.rows))
    among = cosines(vectors, found.rows)
    np.fill_diagonal(among, 0)
    assert (among < threshold + 1e-6).all()
    removed, kept, cosine = (found.removed[name].to_numpy() for name in ("removed", "kept", "cosine"))
    assert {*kept.tolist()} <= {*found.rows.tolist()}
    assert {*removed.tolist()}.isdisjoint(found.rows.tolist())
    assert len({*removed.tolist()}) == len(removed)
    assert (cosine >= threshold - 1e-6).all()
    np.testing.assert_allclose(np.diag(cosines(vectors, removed, kept)), cosine, atol=1e-6)
    if len(found.rows) < budget:
        assert len(found.rows) + len(removed) == len(vectors)


@pytest.mark.parametrize("block", [1, 3, 1024])
def test_blocks_do_not_matter(monkeypatch, block):
    vectors, _ = around(np.random.default_rng(3), [90, 60, 30], 8, spread=0.6)
    whole = choose(vectors, 60, 3, 0.9, 7)
    monkeypatch.setattr(choosing, "BLOCK", block)
    monkeypatch.setattr(choosing, "CELLS", 4 * block)
    found = choose(vectors, 60, 3, 0.9, 7)
    assert whole.removed.num_rows > 20
    assert np.array_equal(found.rows, whole.rows)
    assert {*found.removed["removed"].to_pylist()} == {*whole.removed["removed"].to_pylist()}


@pytest.mark.parametrize(
    ("sizes", "twins", "asked", "threshold", "most", "expected"),
    [
        ([400, 200, 100], slice(200, 400), 60, 1.1, None, [20, 20, 20]),
        ([400, 200, 100], slice(400), 61, 0.9999, None, [1, 30, 30]),  # the others make up for near-duplicates
        ([400, 200, 100], slice(0), 500, 1.1, 120, [120, 120, 100]),
        ([60, 60], slice(40), 100, 0.9999, 15, [15, 15]),  # other rows of the cluster make up for near-duplicates
    ],
)
def test_quotas_hold_and_leftovers_move(sizes, twins, asked, threshold, most, expected):
    vectors, groups = around(np.random.default_rng(4), sizes, spread=0.3)
    same = np.argsort(groups, kind="stable")[twins]
    vectors[same] = vectors[same[:1]]
    found = choose(vectors, asked, len(sizes), threshold, 4, most=most)
    assert np.bincount(groups[found.rows]).tolist() == expected


def test_within_a_cluster_every_row_has_the_same_odds():
    vectors, _ = around(np.random.default_rng(6), [40], spread=1)
    counts = np.zeros(40)
    for seed in range(400):
        counts[choose(vectors, 10, 1, 1.1, seed).rows] += 1
    assert 60 < counts.min() <= counts.max() < 140


@pytest.mark.parametrize(("budget", "clusters", "threshold"), [(0, 2, 0.9), (5, 0, 0.9), (5, 11, 0.9), (5, 2, 0.0)])
def test_senseless_choices_are_rejected(budget, clusters, threshold):
    with pytest.raises(InputError, match=f"choose {budget} of 10 rows from {clusters} clusters"):
        choose(np.eye(10, dtype=np.float32), budget, clusters, threshold, 0)
