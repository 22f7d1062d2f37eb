"""The order of rows for reinforcement learning: every batch holds each dataset's share, and pass rates fall as training goes on.

    rows ─► read each so often (weights, budget) ─► deal to batches ─► match to the curriculum ─► order

A trainer that does not shuffle reads a file in order, `batch_size` rows per step, so the order of rows is the plan of training.

**Quotas.** After each batch, the rows read of a dataset differ from its share by less than one. Quotas that are whole numbers are
met in every batch. Rows come in an order by hash; no row comes twice before all of its dataset have come once.

**Curriculum.** Rows that the model always or never solves teach nothing and are dropped. For the others, the pass rates of a batch
follow a Gaussian whose mean falls from batch to batch (Nemotron 3 Nano, section 3.2.2, arXiv 2512.20848). There rows are
sampled; here each row is read as often as without a curriculum, so that none is lost: every place in the order asks for a pass
rate drawn from its Gaussian, and the places get the rows in the order of the pass rates that they ask for. If pass rates are not
distributed like the requests, matching by rank bends the schedule. The centres of the Gaussians are therefore moved until the
means of the matched rows fall evenly. A million rows take 2 s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from tokenmill.tasks.blend.mix import Mix, rounded
from tokenmill.tasks.pack.sampling import Sampling
from tokenmill.tasks.splitmix import splitmix64

MOMENTS = 64
"""Parts of the training in which the mean of matched rows is brought to the schedule, and quantiles of each Gaussian there."""

MOST_ROUNDS, CLOSE = 200, 1e-4
"""Moves of the centres, and a difference from the schedule that ends them, as a part of the range of pass rates."""


@dataclass(frozen=True, slots=True)
class Order:
    """The rows to read, one after the other: for each the number of its dataset and of the row in it (int64 [rows])."""

    dataset: np.ndarray
    row: np.ndarray


def rows_to_read(held: np.ndarray, weights: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The rows to read of each dataset (int64 [datasets]); `none` reads each row once, and no row of a dataset of weight 0."""
    wanted = np.where(held > 0, weights, 0.0)
    if sampling == "none" or not wanted.any():
        return np.where(wanted > 0, held, 0)
    shares = wanted / wanted.sum()
    totals = held[shares > 0] / shares[shares > 0]
    total = round(float(totals.min() if sampling == "down" else totals.max()))
    return rounded(shares * total, np.full(len(held), total), total)


def rows_of_phases(mix: Mix, names: Sequence[str], size: int) -> np.ndarray:
    """The rows to read of each dataset in each phase (int64 [phases, datasets]); all phases but the last fill whole batches."""
    drawn = np.array([[phase.drawn.get(name, 0.0) for name in names] for phase in mix.phases])
    ends = np.rint(np.cumsum(drawn.sum(1)) / size).astype(np.int64) * size
    ends[-1] = round(float(drawn.sum()))
    totals = np.diff(ends, prepend=0)
    pairs = zip(drawn, totals.tolist(), strict=True)
    return np.array([rounded(each * (total / each.sum()), np.full(len(each), total), total) for each, total in pairs])


def deal(wanted: np.ndarray, size: int) -> np.ndarray:
    """The rows of each dataset in each batch (int64 [batches, datasets]), if `wanted` rows of each are read.

    The last batch has what is left, if that fills none.
    """
    total, given = int(wanted.sum()), np.zeros(len(wanted), np.int64)
    batches: list[np.ndarray] = []
    for end in [*range(size, total + 1, size), *([total] if total % size else [])]:
        due = wanted * (end / total) - given
        batches.append(rounded(due, wanted - given, end - int(given.sum())))
        given = given + batches[-1]
    return np.array(batches, np.int64).reshape(-1, len(wanted))


def in_order(counts: np.ndarray, rates: Sequence[np.ndarray], span: float, spread: float, seed: int) -> Order:
    """Put rows in order, given the rows of each dataset in each batch (`counts`, int64 [batches, datasets]).

    `rates` are the pass rates of each dataset's rows (float64 [rows]). In each dataset their mean falls by `span` from the first
    batch to the last; `spread` is the standard deviation of what is asked for in a batch. With a span of 0, rates do not matter.
    """
    batch = np.repeat(np.arange(len(counts)), counts.sum(1))
    dataset = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    row = np.empty(len(batch), np.int64)
    for number, own in enumerate(rates):
        places = np.flatnonzero(dataset == number)
        if not len(places):
            continue
        mixed = _hashes(seed, number + 1)
        chosen = shuffled(len(own), len(places), mixed)
        if span and np.ptp(own[chosen]):
            chosen = chosen[_matched(own[chosen], batch[places], span, spread, mixed)]
        row[places] = chosen
    mixed_up = np.lexsort((splitmix64(np.arange(len(batch), dtype=np.uint64) ^ _hashes(seed, 0)), batch))
    return Order(dataset[mixed_up], row[mixed_up])


def most_span(rates: np.ndarray, batch: np.ndarray) -> float:
    """The largest span that these pass rates allow in these batches (int64 [rows], ascending): that of the rows sorted."""
    times = _times(batch)
    sorted_rows = np.cumsum(np.sort(rates)[::-1] - rates.mean())
    schedule = np.cumsum(times.mean() - times)
    ends = np.flatnonzero(np.diff(batch))
    return float((sorted_rows[ends] / schedule[ends]).min()) if len(ends) else 0.0


def shuffled(held: int, count: int, seed: np.uint64) -> np.ndarray:
    """`count` numbers below `held` (int64): all of them in an order by hash, then all again in another."""
    numbers = np.arange(-(-count // held) * held, dtype=np.uint64)
    return (np.lexsort((splitmix64(numbers ^ seed), numbers // np.uint64(held)))[:count] % held).astype(np.int64)


def _hashes(seed: int, number: int) -> np.uint64:
    return splitmix64(splitmix64(np.array([seed], np.uint64)) + np.uint64(number))[0]


def _times(batch: np.ndarray) -> np.ndarray:
    """When each batch is read: from 0, the first, to 1, the last."""
    return (batch - batch[0]) / max(1, int(batch[-1] - batch[0]))


def _matched(rates: np.ndarray, batch: np.ndarray, span: float, spread: float, seed: np.uint64) -> np.ndarray:
    """The number of the row (int64) in each place, whose batches ascend."""
    up = np.sign(span)
    centres = _centres(np.sort(rates * up), batch, abs(span), spread)
    parts = (np.arange(len(batch)) + 0.5) / len(batch)
    asked = np.interp(parts, (np.arange(MOMENTS) + 0.5) / MOMENTS, centres) + spread * _noise(batch, seed)
    found = np.empty(len(batch), np.int64)
    found[np.argsort(asked, kind="stable")] = np.argsort(rates * up, kind="stable")
    return found


def _centres(rates: np.ndarray, batch: np.ndarray, span: float, spread: float) -> np.ndarray:
    """Where to centre the Gaussian of each moment (float64 [MOMENTS]) so that the mean of matched rows falls evenly.

    The mean of what is matched is the gradient of a concave function of the centres, so following the error finds them.
    """
    times = _times(batch)[(len(batch) * (2 * np.arange(MOMENTS) + 1)) // (2 * MOMENTS)]
    points = MOMENTS * MOMENTS
    quantiles = rates[(len(rates) * (2 * np.arange(points) + 1)) // (2 * points)]
    wanted = quantiles.mean() + span * (times.mean() - times)
    centres, noise = wanted.copy(), spread * _gaussian(MOMENTS)
    for _ in range(MOST_ROUNDS):
        found = np.empty(points)
        found[np.argsort((centres[:, None] + noise).ravel(), kind="stable")] = quantiles
        error = wanted - found.reshape(MOMENTS, -1).mean(1)
        if np.abs(error).max() < CLOSE * np.ptp(rates):
            break
        centres += error / 2
    return centres


def _noise(batch: np.ndarray, seed: np.uint64) -> np.ndarray:
    """A draw from the Gaussian for each place: one from each of as many equal parts of it as the batch has rows."""
    first = np.searchsorted(batch, batch)
    place, count = np.arange(len(batch)) - first, np.searchsorted(batch, batch, side="right") - first
    fraction = splitmix64(np.arange(len(batch), dtype=np.uint64) ^ seed) / 2.0**64
    quantiles = _gaussian(4096)
    return np.interp((place + fraction) / count, (np.arange(4096) + 0.5) / 4096, quantiles)


def _gaussian(count: int) -> np.ndarray:
    """The middles of so many equal parts of the standard normal distribution."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((number + 0.5) / count) for number in range(count)])
