"""A diverse choice: rows that are spread over what there is, and no two of them nearly the same.

    vectors ─► k-means ─► quotas: as even as the sizes of the clusters allow ─► rows in seeded order, until a quota is
                                                                                full; none too like a row chosen before

Even quotas are what makes the choice diverse: a cluster of a million rows that all say the same gets no more than one of
a thousand. A row is left out as a near-duplicate only on the evidence of a chosen row whose cosine with it reaches the
threshold, and that holds across clusters: no two chosen rows are that alike. Where a cluster runs out, its share goes to
the others, as far as the most that a cluster may give allows.

k-means takes rows * clusters * dimensions multiplications a round: a million vectors of 256 in 1,000 clusters 6 s on
two cores. Near-duplicates take budget^2 * dimensions / 2, 20,000 rows 2 s. Memory is the vectors, and some 300 MB. Given the
seed the choice is the same on every run on machines of a kind; other processors round cosines otherwise in the seventh
digit, so that a row between two clusters may fall to the other one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from tokenmill.tasks.errors import InputError

from .batches import ranges

ROUNDS = 20
"""Rounds of k-means at most; it ends before when no row changes its cluster."""

SAMPLE = 32
"""Rows per cluster that the first centres are chosen among."""

CELLS = 1 << 24
"""Similarities in memory at once: 64 MB in float32."""

ROWS = 1 << 14
"""Rows that are summed at a time."""

BLOCK = 1024
"""Rows that are compared with the chosen ones at a time."""

LISTED = 50
"""Pairs of near-duplicates that the report names, the most alike first."""

Nearest = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Of `vectors` [rows, dimensions] and `centres` [clusters, dimensions], the nearest centre of each row (int64 [rows])
and the square of its distance (float32 [rows]).
"""

REMOVED = pa.schema([pa.field("removed", pa.int64()), pa.field("kept", pa.int64()), pa.field("cosine", pa.float32())])
"""A row that was left out, the chosen row most like it, and how alike they are."""


@dataclass(frozen=True, slots=True)
class Clusters:
    """`labels` int64 [rows] the cluster of each row, `centres` float32 [clusters, dimensions], and `distances` float32
    [rows] the square of each row's distance to its centre.
    """

    labels: np.ndarray
    centres: np.ndarray
    distances: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Rows per cluster, int64."""
        return np.bincount(self.labels, minlength=len(self.centres))


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen: `rows` int64, ascending; and why: the clusters, and `removed`, a table of REMOVED."""

    rows: np.ndarray
    clusters: Clusters
    removed: pa.Table
    budget: int
    threshold: float
    seed: int

    def facts(self) -> dict[str, Any]:
        """The report as plain JSON: the clusters, largest first, each with its most typical row, and removed pairs."""
        sizes, chosen = self.clusters.sizes, self._by_cluster(self.rows)
        removed, typical = self._by_cluster(self.removed["removed"].to_numpy()), self._typical()
        order = np.argsort(-sizes, kind="stable")
        pairs = self.removed.sort_by([("cosine", "descending"), ("removed", "ascending")])
        return {
            "rows": len(self.clusters.labels), "budget": self.budget, "chosen": len(self.rows), "seed": self.seed,
            "threshold": self.threshold, "near_duplicates": self.removed.num_rows,
            "clusters": [
                {
                    "cluster": cluster, "rows": int(sizes[cluster]), "chosen": int(chosen[cluster]),
                    "near_duplicates": int(removed[cluster]), "typical_row": int(typical[cluster]),
                }
                for cluster in order.tolist() if sizes[cluster]
            ],
            "removed_pairs": pairs.slice(0, LISTED).to_pylist(),
        }  # fmt: skip

    def _by_cluster(self, rows: np.ndarray) -> np.ndarray:
        return np.bincount(self.clusters.labels[rows], minlength=len(self.clusters.centres))

    def _typical(self) -> np.ndarray:
        """The row nearest to the centre of each cluster, int64; of an empty one it means nothing."""
        order = np.lexsort((self.clusters.distances, self.clusters.labels))
        starts = np.searchsorted(self.clusters.labels[order], np.arange(len(self.clusters.centres)))
        return np.append(order, 0)[starts]


def choose(
    vectors: np.ndarray,
    budget: int,
    clusters: int,
    threshold: float,
    seed: int,
    nearest: Nearest | None = None,
    most: int | None = None,
) -> Choice:
    """`budget` of the rows of `vectors` (float32 [rows, dimensions], of length one), spread over `clusters` clusters, no
    two with a cosine of `threshold` or more; fewer, where there are not as many, or with no more than `most` of a cluster.

    Raises InputError for choices that make no sense.
    """
    if not (1 <= clusters <= len(vectors) and budget >= 1 and threshold > 0):
        raise InputError(
            f"a choice of {budget} from {len(vectors)} rows in {clusters} clusters with a threshold of {threshold}; "
            "choose at least 1 row, from 1 to as many clusters as there are rows, and a threshold above 0 (above 1 "
            "nothing is a near-duplicate)"
        )
    found = kmeans(vectors, clusters, seed, nearest or nearest_centres)
    generator = np.random.default_rng([seed, 1])
    rows, removed = _pick(vectors, found, budget, threshold, len(vectors) if most is None else most, generator)
    return Choice(np.sort(rows), found, removed, budget, threshold, seed)


def kmeans(vectors: np.ndarray, clusters: int, seed: int, nearest: Nearest) -> Clusters:
    """Lloyd's rounds from centres chosen far apart. A cluster that loses all its rows keeps its centre."""
    generator = np.random.default_rng([seed, 0])
    sample = generator.choice(len(vectors), min(len(vectors), clusters * SAMPLE), replace=False)
    centres = _first_centres(vectors[np.sort(sample)], clusters, generator)
    labels, distances = nearest(vectors, centres)
    for _ in range(ROUNDS):
        centres = _means(vectors, labels, centres)
        before = labels
        labels, distances = nearest(vectors, centres)
        if np.array_equal(labels, before):
            break
    return Clusters(labels, centres, distances)


def nearest_centres(vectors: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """See Nearest; by NumPy, some thousand rows at a time."""
    labels, distances = np.empty(len(vectors), np.int64), np.empty(len(vectors), np.float32)
    lengths = np.einsum("ij,ij->i", centres, centres)
    size = max(1, CELLS // len(centres))
    for start in range(0, len(vectors), size):
        part = vectors[start : start + size]
        found = lengths - 2 * (part @ centres.T)
        labels[start : start + size] = nearest = found.argmin(axis=1)
        squares = found[np.arange(len(part)), nearest] + np.einsum("ij,ij->i", part, part)
        distances[start : start + size] = np.maximum(squares, 0)
    return labels, distances


def _first_centres(vectors: np.ndarray, clusters: int, generator: np.random.Generator) -> np.ndarray:
    """k-means++: each next centre is a row, the likelier the farther it is from those before."""
    chosen = [int(generator.integers(len(vectors)))]
    distances, squares = np.full(len(vectors), np.inf, np.float32), np.einsum("ij,ij->i", vectors, vectors)
    for _ in range(clusters - 1):
        last = chosen[-1]
        distances = np.minimum(distances, np.maximum(squares + squares[last] - 2 * (vectors @ vectors[last]), 0))
        odds = np.cumsum(distances, dtype=np.float64)
        place = np.searchsorted(odds, generator.random() * odds[-1], side="right")
        chosen.append(int(min(place, len(vectors) - 1)))
    return vectors[chosen]


def _means(vectors: np.ndarray, labels: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The mean of the rows of each cluster, summed in float64 in the order of the rows, some thousand at a time."""
    counts = np.bincount(labels, minlength=len(centres))
    sums = np.zeros(centres.shape)
    for start in range(0, len(vectors), ROWS):
        part = labels[start : start + ROWS]
        order = np.argsort(part, kind="stable")
        present, begins = np.unique(part[order], return_index=True)
        sums[present] += np.add.reduceat(vectors[start : start + ROWS][order], begins, axis=0, dtype=np.float64)
    means = (sums / np.maximum(counts, 1)[:, None]).astype(np.float32)
    return np.where(counts[:, None] > 0, means, centres)


def quotas(taken: np.ndarray, left: np.ndarray, budget: int) -> np.ndarray:
    """How many rows more each cluster gives, int64 [clusters], so that all together have `budget`, or all there are.

    `taken` are the rows that each has given, `left` those it still has. Whoever has given least gives first, so that in
    the end all have given as evenly as they can; what cannot be divided goes to the first of them.
    """
    budget = min(budget, int((taken + left).sum()))
    low, high = 0, budget
    while low < high:  # the highest level to which all can be filled
        level = (low + high + 1) // 2
        if taken.sum() + _filled(taken, left, level).sum() <= budget:
            low = level
        else:
            high = level - 1
    found = _filled(taken, left, low)
    able = np.flatnonzero((taken + found <= low) & (found < left))
    found[able[: max(0, budget - int(taken.sum() + found.sum()))]] += 1
    return found


def _filled(taken: np.ndarray, left: np.ndarray, level: int) -> np.ndarray:
    return np.clip(level - taken, 0, left)


def _pick(
    vectors: np.ndarray, clusters: Clusters, budget: int, threshold: float, most: int, generator: np.random.Generator
) -> tuple[np.ndarray, pa.Table]:
    """The rows chosen, and those removed on the way."""
    order = generator.permutation(len(vectors))
    order = order[np.argsort(clusters.labels[order], kind="stable")]
    begins = np.cumsum(clusters.sizes) - clusters.sizes
    seen, taken = np.zeros_like(begins), np.zeros_like(begins)
    chosen, removed = np.empty(0, np.int64), [REMOVED.empty_table()]
    while True:
        wanted = quotas(taken, np.minimum(clusters.sizes - seen, most - taken), budget)
        if not wanted.any():
            return chosen, pa.concat_tables(removed)
        places = ranges(begins + seen, wanted)
        kept, table = _apart(vectors, order[places], chosen, threshold)
        chosen, seen = np.concatenate([chosen, kept]), seen + wanted
        taken = np.bincount(clusters.labels[chosen], minlength=len(taken))
        removed.append(table)


def _apart(
    vectors: np.ndarray, candidates: np.ndarray, chosen: np.ndarray, threshold: float
) -> tuple[np.ndarray, pa.Table]:
    """Of the rows `candidates`, in their order, those that are near none of `chosen` and none before them; the others
    with the one that is most like them.
    """
    before = len(chosen)
    removed = [REMOVED.empty_table()]
    for start in range(0, len(candidates), BLOCK):
        block = candidates[start : start + BLOCK]
        witness, cosine = _most_alike(vectors, block, chosen)
        among = vectors[block] @ vectors[block].T
        stays = cosine < threshold
        for row in range(1, len(block)):  # one by one, because a row that goes is no witness
            stays[row] &= not (stays[:row] & (among[row, :row] >= threshold)).any()
        kept = block[stays]
        near, nearby = _most_alike(vectors, block[~stays], kept)
        inside = nearby > cosine[~stays]
        columns = [block[~stays], np.where(inside, near, witness[~stays]), np.maximum(nearby, cosine[~stays])]
        removed.append(pa.Table.from_arrays([pa.array(column) for column in columns], schema=REMOVED))
        chosen = np.concatenate([chosen, kept])
    return chosen[before:], pa.concat_tables(removed)


def _most_alike(vectors: np.ndarray, rows: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each of `rows` the one of `others` that is most like it (-1 for none) and their cosine (float32)."""
    best, cosine = np.full(len(rows), -1), np.full(len(rows), -np.inf, np.float32)
    for start in range(0, len(others), CELLS // BLOCK):
        part = others[start : start + CELLS // BLOCK]
        found = vectors[rows] @ vectors[part].T
        place = found.argmax(axis=1)
        likeness = found[np.arange(len(rows)), place]
        better = likeness > cosine
        best[better], cosine[better] = part[place[better]], likeness[better]
    return best, cosine
