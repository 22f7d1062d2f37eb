"""A diverse choice of rows: spread over all vectors, without near-duplicates.

    vectors ─► k-means ─► quotas, as even as cluster sizes allow ─► rows in seeded order until the quota is full,
                                                                    skipping near-duplicates of chosen rows

Even quotas make the choice diverse: a cluster of a million similar rows gets no more than one of a thousand. A row is a
near-duplicate if its cosine with a chosen row, its witness, reaches the threshold. This holds across clusters: no two chosen
rows are so similar. If a cluster runs out of rows, its share is given to the others, up to the quota of each.

k-means takes rows * clusters * dimensions multiplications per round: 6 s on two cores for a million vectors of 256 in 1,000
clusters. Near-duplicates take budget^2 * dimensions / 2: 2 s for 20,000 rows. Memory is the vectors and about 300 MB. A seed
gives the same choice on every run on machines of the same type; other processors round the seventh digit of a cosine
differently, which can move a row between two clusters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from tokenmill.tasks.errors import InputError

from .engines import required
from .nll import ranges

ROUNDS = 20  # maximum rounds of k-means, which ends earlier if no row changes its cluster
SAMPLE = 32  # rows per cluster among which the initial centers are chosen
CELLS = 1 << 24  # similarities in memory at once: 64 MB in float32
ROWS = 1 << 14  # rows summed at a time
BLOCK = 1024  # rows compared with the chosen ones at a time

# A function of `vectors` [rows, dimensions] and `centers` [clusters, dimensions]: the nearest center of each row (int64
# [rows]) and its squared distance (float32 [rows]).
Nearest = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]

# A near-duplicate, the chosen row most similar to it, and their cosine.
REMOVED = pa.schema([pa.field("removed", pa.int64()), pa.field("kept", pa.int64()), pa.field("cosine", pa.float32())])


@dataclass(frozen=True, slots=True)
class Clusters:
    """Rows in clusters."""

    labels: np.ndarray  # int64 [rows], the cluster of each row
    centers: np.ndarray  # float32 [clusters, dimensions]
    distances: np.ndarray  # float32 [rows], squared, of rows to their centers

    @property
    def sizes(self) -> np.ndarray:
        """Rows per cluster, int64."""
        return np.bincount(self.labels, minlength=len(self.centers))


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen rows and the removed ones."""

    rows: np.ndarray  # int64, ascending
    clusters: Clusters
    removed: pa.Table  # near-duplicates, with the columns of REMOVED
    budget: int
    threshold: float
    seed: int


def choose(
    vectors: np.ndarray,
    budget: int,
    clusters: int,
    threshold: float,
    seed: int,
    nearest: Nearest | None = None,
    most: int | None = None,
) -> Choice:
    """Choose `budget` rows of `vectors` (float32 [rows, dimensions], of length one) from `clusters` clusters, no two with a
    cosine of `threshold` or more, at most `most` per cluster; fewer if there are not enough.

    Raises InputError for arguments out of range.
    """
    if not (1 <= clusters <= len(vectors) and budget >= 1 and threshold > 0):
        raise InputError(
            f"cannot choose {budget} of {len(vectors)} rows from {clusters} clusters with threshold={threshold}; choose "
            f"at least 1 row, from 1 to {len(vectors)} clusters, with a threshold above 0 (above 1 all rows are distinct)"
        )
    found = kmeans(vectors, clusters, seed, nearest or nearest_centers)
    generator = np.random.default_rng([seed, 1])
    rows, removed = _pick(vectors, found, budget, threshold, len(vectors) if most is None else most, generator)
    return Choice(np.sort(rows), found, removed, budget, threshold, seed)


def kmeans(vectors: np.ndarray, clusters: int, seed: int, nearest: Nearest) -> Clusters:
    """Lloyd's algorithm from centers chosen far apart. A cluster that loses all its rows keeps its center."""
    generator = np.random.default_rng([seed, 0])
    sample = generator.choice(len(vectors), min(len(vectors), clusters * SAMPLE), replace=False)
    some = vectors[np.sort(sample)]
    # k-means++: each center is a row, chosen with odds that grow with its distance to the earlier centers.
    chosen = [int(generator.integers(len(some)))]
    far, squares = np.full(len(some), np.inf, np.float32), np.einsum("ij,ij->i", some, some)
    for _ in range(clusters - 1):
        last = chosen[-1]
        far = np.minimum(far, np.maximum(squares + squares[last] - 2 * (some @ some[last]), 0))
        odds = np.cumsum(far, dtype=np.float64)
        place = np.searchsorted(odds, generator.random() * odds[-1], side="right")
        chosen.append(int(min(place, len(some) - 1)))
    centers = some[chosen]
    labels, distances = nearest(vectors, centers)
    for _ in range(ROUNDS):
        # The sums are in float64 and in row order, so that they don't depend on how many rows are summed at a time.
        counts = np.bincount(labels, minlength=len(centers))
        sums = np.zeros(centers.shape)
        for start in range(0, len(vectors), ROWS):
            part = labels[start : start + ROWS]
            order = np.argsort(part, kind="stable")
            present, begins = np.unique(part[order], return_index=True)
            sums[present] += np.add.reduceat(vectors[start : start + ROWS][order], begins, axis=0, dtype=np.float64)
        means = (sums / np.maximum(counts, 1)[:, None]).astype(np.float32)
        centers = np.where(counts[:, None] > 0, means, centers)
        before = labels
        labels, distances = nearest(vectors, centers)
        if np.array_equal(labels, before):
            break
    return Clusters(labels, centers, distances)


def nearest_centers(vectors: np.ndarray, centers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """See Nearest; with NumPy, some thousand rows at a time."""
    labels, distances = np.empty(len(vectors), np.int64), np.empty(len(vectors), np.float32)
    lengths = np.einsum("ij,ij->i", centers, centers)
    size = max(1, CELLS // len(centers))
    for start in range(0, len(vectors), size):
        part = vectors[start : start + size]
        found = lengths - 2 * (part @ centers.T)
        labels[start : start + size] = nearest = found.argmin(axis=1)
        squares = found[np.arange(len(part)), nearest] + np.einsum("ij,ij->i", part, part)
        distances[start : start + size] = np.maximum(squares, 0)
    return labels, distances


def nearest_with_torch(device: str = "cuda") -> Nearest:
    """`nearest_centers` with torch, in float32, some thousand rows at a time. Ties go to the first center in both.

    Raises InputError if torch isn't installed, or this machine lacks a GPU.
    """
    torch: Any = required("torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device={device}: no GPU is visible on this machine; set device=cpu")

    def nearest(vectors: np.ndarray, centers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        points = torch.from_numpy(centers).to(device)
        lengths = points.square().sum(dim=1)
        labels, distances = np.empty(len(vectors), np.int64), np.empty(len(vectors), np.float32)
        size = max(1, CELLS // len(centers))
        for start in range(0, len(vectors), size):
            part = torch.from_numpy(vectors[start : start + size]).to(device)
            least, places = (lengths - 2 * part @ points.T).min(dim=1)
            labels[start : start + size] = places.cpu().numpy()
            distances[start : start + size] = (least + part.square().sum(dim=1)).clamp(min=0).cpu().numpy()
        return labels, distances

    return nearest


def quotas(taken: np.ndarray, left: np.ndarray, budget: int) -> np.ndarray:
    """Return the number of rows to add from each cluster, int64 [clusters], for `budget` rows in total, or all there are.

    `taken` are the rows already taken from each, `left` its remaining rows. The quotas make the totals as even as possible; a
    remainder is given to the first clusters.
    """
    budget = min(budget, int((taken + left).sum()))
    low, high = 0, budget
    while low < high:  # the highest total that all can reach
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
    """The chosen rows, and the near-duplicates found meanwhile."""
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
    """Of the rows `candidates`, in order, those that are near-duplicates neither of `chosen` nor of an earlier candidate; and
    the near-duplicates, each with its most similar row.
    """
    before = len(chosen)
    removed = [REMOVED.empty_table()]
    for start in range(0, len(candidates), BLOCK):
        block = candidates[start : start + BLOCK]
        witness, cosine = _most_similar(vectors, block, chosen)
        among = vectors[block] @ vectors[block].T
        distinct = cosine < threshold
        for row in range(1, len(block)):  # one by one, because a removed row is not a witness
            distinct[row] &= not (distinct[:row] & (among[row, :row] >= threshold)).any()
        kept = block[distinct]
        near, nearby = _most_similar(vectors, block[~distinct], kept)
        inside = nearby > cosine[~distinct]
        columns = [block[~distinct], np.where(inside, near, witness[~distinct]), np.maximum(nearby, cosine[~distinct])]
        removed.append(pa.Table.from_arrays([pa.array(column) for column in columns], schema=REMOVED))
        chosen = np.concatenate([chosen, kept])
    return chosen[before:], pa.concat_tables(removed)


def _most_similar(vectors: np.ndarray, rows: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The most similar of `others` to each of `rows` (-1 for none), and their cosine (float32)."""
    best, cosine = np.full(len(rows), -1), np.full(len(rows), -np.inf, np.float32)
    for start in range(0, len(others), CELLS // BLOCK):
        part = others[start : start + CELLS // BLOCK]
        found = vectors[rows] @ vectors[part].T
        place = found.argmax(axis=1)
        highest = found[np.arange(len(rows)), place]
        better = highest > cosine
        best[better], cosine[better] = part[place[better]], highest[better]
    return best, cosine
