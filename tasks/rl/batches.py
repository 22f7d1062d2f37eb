"""The row order for reinforcement learning: every batch has each dataset's share, and pass rates fall during training.

    rows ─► read each so often (weights, budget) ─► deal to batches ─► match to the curriculum ─► order

A trainer that does not shuffle reads a file in order, `batch_size` rows per step, so the order of rows is the plan of training.

**Quotas.** After each batch, the rows read of a dataset differ from its share by less than one. Quotas that are whole numbers are
met in every batch. Rows are in an order by hash; a row occurs twice only after all rows of its dataset have occurred once.

**Curriculum.** Rows that the model always or never solves teach nothing and are dropped. For the others, the pass rates of a batch
follow a Gaussian whose mean falls from batch to batch (Nemotron 3 Nano, section 3.2.2, arXiv 2512.20848). There rows are
sampled; here each row is read as often as without a curriculum, so that none is lost: every place in the order asks for a pass
rate drawn from its Gaussian, and the places get the rows in the order of the pass rates that they ask for. If pass rates are not
distributed like the requests, matching by rank bends the schedule. The centers of the Gaussians are therefore moved until the
means of the matched rows fall evenly. A million rows take 2 s.
"""

import mmap
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
from tokenmill.tasks.blend.mix import Mix, rounded, solve
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.pack.sampling import Sampling
from tokenmill.tasks.shards.publication import Weights, blend_weights, mix_header
from tokenmill.tasks.shards.publish import Output, join_files, publish
from tokenmill.tasks.sources.files import field_path
from tokenmill.tasks.sources.row_filter import value_at
from tokenmill.tasks.splitmix import splitmix64
from tokenmill.tasks.storage import temporary_folder

from .settings import Curriculum, RlSettings

MOMENTS = 64
"""Parts of the training run in which the mean of matched rows is brought to the schedule, and quantiles of each Gaussian there."""

MAX_ROUNDS, CLOSE = 200, 1e-4
"""Moves of the centers, and a difference from the schedule that ends them, as a part of the range of pass rates."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The rows to read, one after the other: for each the number of its dataset and of the row in it (int64 [rows])."""

    dataset: np.ndarray
    row: np.ndarray


def rows_to_read(held: np.ndarray, weights: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the rows to read of each dataset (int64 [datasets]); `none` reads each row once, and no row of a dataset of weight 0."""
    wanted = np.where(held > 0, weights, 0.0)
    if sampling == "none" or not wanted.any():
        return np.where(wanted > 0, held, 0)
    shares = wanted / wanted.sum()
    totals = held[shares > 0] / shares[shares > 0]
    total = round(float(totals.min() if sampling == "down" else totals.max()))
    return rounded(shares * total, np.full(len(held), total), total)


def rows_of_phases(mix: Mix, names: Sequence[str], size: int) -> np.ndarray:
    """Return the rows to read of each dataset in each phase (int64 [phases, datasets]); all phases but the last fill whole batches."""
    drawn = np.array([[phase.drawn.get(name, 0.0) for name in names] for phase in mix.phases])
    ends = np.rint(np.cumsum(drawn.sum(1)) / size).astype(np.int64) * size
    ends[-1] = round(float(drawn.sum()))
    totals = np.diff(ends, prepend=0)
    pairs = zip(drawn, totals.tolist(), strict=True)
    return np.array([rounded(each * (total / each.sum()), np.full(len(each), total), total) for each, total in pairs])


def deal(wanted: np.ndarray, size: int) -> np.ndarray:
    """Return the rows of each dataset in each batch (int64 [batches, datasets]), if `wanted` rows of each are read.

    The last batch has the rest, if that doesn't fill one.
    """
    total, given = int(wanted.sum()), np.zeros(len(wanted), np.int64)
    batches: list[np.ndarray] = []
    for end in [*range(size, total + 1, size), *([total] if total % size else [])]:
        due = wanted * (end / total) - given
        batches.append(rounded(due, wanted - given, end - int(given.sum())))
        given = given + batches[-1]
    return np.array(batches, np.int64).reshape(-1, len(wanted))


def in_order(counts: np.ndarray, rates: Sequence[np.ndarray], span: float, spread: float, seed: int) -> RowOrder:
    """Put rows in order, given the rows of each dataset in each batch (`counts`, int64 [batches, datasets]).

    `rates` are the pass rates of each dataset's rows (float64 [rows]). In each dataset their mean falls by `span` from the first
    batch to the last; `spread` is the requested standard deviation within a batch. With a span of 0, rates don't matter.
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
    return RowOrder(dataset[mixed_up], row[mixed_up])


def most_span(rates: np.ndarray, batch: np.ndarray) -> float:
    """Return the largest span that these pass rates allow in these batches (int64 [rows], ascending): the span of the sorted rows."""
    times = _times(batch)
    sorted_rows = np.cumsum(np.sort(rates)[::-1] - rates.mean())
    schedule = np.cumsum(times.mean() - times)
    ends = np.flatnonzero(np.diff(batch))
    return float((sorted_rows[ends] / schedule[ends]).min()) if len(ends) else 0.0


def shuffled(held: int, count: int, seed: np.uint64) -> np.ndarray:
    """Return `count` numbers below `held` (int64): all of them in an order by hash, then all again in a different one."""
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
    centers = _centres(np.sort(rates * up), batch, abs(span), spread)
    parts = (np.arange(len(batch)) + 0.5) / len(batch)
    asked = np.interp(parts, (np.arange(MOMENTS) + 0.5) / MOMENTS, centers) + spread * _noise(batch, seed)
    found = np.empty(len(batch), np.int64)
    found[np.argsort(asked, kind="stable")] = np.argsort(rates * up, kind="stable")
    return found


def _centres(rates: np.ndarray, batch: np.ndarray, span: float, spread: float) -> np.ndarray:
    """Where to center the Gaussian of each moment (float64 [MOMENTS]) so that the mean of matched rows falls evenly.

    The mean of the matched rates is the gradient of a concave function of the centers, so following the error finds them.
    """
    times = _times(batch)[(len(batch) * (2 * np.arange(MOMENTS) + 1)) // (2 * MOMENTS)]
    points = MOMENTS * MOMENTS
    quantiles = rates[(len(rates) * (2 * np.arange(points) + 1)) // (2 * points)]
    wanted = quantiles.mean() + span * (times.mean() - times)
    centers, noise = wanted.copy(), spread * _gaussian(MOMENTS)
    for _ in range(MAX_ROUNDS):
        found = np.empty(points)
        found[np.argsort((centers[:, None] + noise).ravel(), kind="stable")] = quantiles
        error = wanted - found.reshape(MOMENTS, -1).mean(1)
        if np.abs(error).max() < CLOSE * np.ptp(rates):
            break
        centers += error / 2
    return centers


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


BLOCK = 1 << 26
"""Bytes in which line breaks are looked for at once."""

WRITTEN_TOGETHER = 4096
"""Rows gathered for one write."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How to order the training rows of a blend; see the settings of the same names."""

    blend: Blend
    size: int
    sampling: Sampling
    curriculum: Curriculum
    seed: int

    @classmethod
    def of(cls, blend: Blend, settings: RlSettings) -> "BatchPlan | None":
        """Return the order that the settings ask for, None if they ask for none."""
        if settings.batch_size is None:
            return None
        return cls(blend, settings.batch_size, settings.sampling, settings.curriculum, settings.seed)

    def identity(self) -> dict[str, Any]:
        """Everything but the rows that the order depends on."""
        asked = {"size": self.size, "sampling": self.sampling, "seed": self.seed}
        return {**asked, "curriculum": self.curriculum.model_dump(), "blend": self.blend.model_dump(mode="json")}


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows in the store, with the dataset that they are of."""

    dataset: str
    documents: int
    stored: str


@dataclass(frozen=True, slots=True)
class _JoinedRows:
    """The lines of the joined file: `ends` (int64 [lines]), and of each dataset the numbers of its lines (int64) and their
    pass rates (float64; the mean where a row has none).
    """

    memory: memoryview
    ends: np.ndarray
    lines: Mapping[str, np.ndarray]
    rates: Mapping[str, np.ndarray]

    def line(self, number: int) -> memoryview:
        """Return a line with its break."""
        return self.memory[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])]


def write_ordered(files: Sequence[RowFile], batches: BatchPlan, target: str) -> tuple[Output, dict[str, Any]]:
    """Write the rows in training files in batch order; return the record of the file and the manifest's entries.

    Raises InputError for a budget or curriculum that the rows do not allow, RunError for a file that differs from its receipt.
    """
    with _joined(files) as memory:
        ends = _line_ends(memory)
        if len(ends) != sum(file.documents for file in files):
            raise RunError(
                f"{len(ends):,} lines in {len(files)} files of {sum(file.documents for file in files):,} rows; a file in the store is "
                "damaged: tokenmill verify names it"
            )
        rows, dropped = _chosen(memory, ends, files, batches.curriculum)
        counts, header = _counts(rows, batches)
        order = _order(rows, counts, batches)
        numbers, rates = (_in_order(order, list(each.values())) for each in (rows.lines, rows.rates))
        with publish(target) as stream:
            for begin in range(0, len(numbers), WRITTEN_TOGETHER):
                stream.write(b"".join(map(rows.line, numbers[begin : begin + WRITTEN_TOGETHER].tolist())))
    return stream.output, {"batches": _record(rows, counts, batches, dropped, rates), **header}


def _order(rows: _JoinedRows, counts: np.ndarray, batches: BatchPlan) -> RowOrder:
    """The order of the rows. Raises InputError if pass rates do not reach as far as the curriculum."""
    curriculum, rates = batches.curriculum, list(rows.rates.values())
    span = curriculum.pass_rate_range if curriculum.field else 0.0
    _require_span(rows, counts, span)
    return in_order(counts, rates, span, curriculum.spread, batches.seed)


def _in_order(order: RowOrder, values: Sequence[np.ndarray]) -> np.ndarray:
    """The values of each dataset's rows, in order."""
    found = np.empty(len(order.row), values[0].dtype)
    for number, own in enumerate(values):
        mine = order.dataset == number
        found[mine] = own[order.row[mine]]
    return found


@contextmanager
def _joined(files: Sequence[RowFile]) -> Generator[memoryview]:
    """The bytes of the files, one after the other."""
    with TemporaryDirectory(dir=temporary_folder()) as folder:
        place = str(Path(folder, "rows.jsonl"))
        if not join_files([file.stored for file in files], place).size:
            yield memoryview(b"")
            return
        with Path(place).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # closed when its last line is forgotten
        yield memoryview(mapped)


def _line_ends(memory: memoryview) -> np.ndarray:
    """Where each line ends, behind its break (int64 [lines])."""
    found = [
        np.flatnonzero(np.frombuffer(memory[begin : begin + BLOCK], np.uint8) == ord("\n")) + begin + 1
        for begin in range(0, len(memory), BLOCK)
    ]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _chosen(
    memory: memoryview, ends: np.ndarray, files: Sequence[RowFile], curriculum: Curriculum
) -> tuple[_JoinedRows, dict[str, Counter[str]]]:
    """The rows to order, and how many of each dataset the curriculum omits, by reason."""
    every = _JoinedRows(memory, ends, _lines_by_dataset(files), {})
    if curriculum.field is None:
        return _JoinedRows(
            memory, ends, every.lines, {name: np.zeros(len(own)) for name, own in every.lines.items()}
        ), {}
    rates = {name: _rates(every, own, curriculum.field) for name, own in every.lines.items()}
    if all(np.isnan(own).all() for own in rates.values()):
        raise InputError(
            f"curriculum.field={curriculum.field}: no training row has a number there; name a field of the rows, or remove it"
        )
    dropped = {
        name: Counter({"never_solved": int((own <= curriculum.drop_unsolved_at).sum()), "always_solved": int((own >= curriculum.drop_solved_at).sum())})
        for name, own in rates.items()
    }  # fmt: skip
    kept = {
        name: ~((own <= curriculum.drop_unsolved_at) | (own >= curriculum.drop_solved_at))
        for name, own in rates.items()
    }
    lines = {name: own[kept[name]] for name, own in every.lines.items()}
    return _JoinedRows(memory, ends, lines, {name: _filled(own[kept[name]]) for name, own in rates.items()}), dropped


def _lines_by_dataset(files: Sequence[RowFile]) -> dict[str, np.ndarray]:
    """The numbers of the lines in each dataset (int64)."""
    found: dict[str, list[np.ndarray]] = {}
    begin = 0
    for file in files:
        found.setdefault(file.dataset, []).append(np.arange(begin, begin + file.documents))
        begin += file.documents
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _rates(rows: _JoinedRows, numbers: np.ndarray, field: str) -> np.ndarray:
    """The number in a field of each row (float64), NaN where there is none."""
    path = field_path(field)
    return np.array(
        [_number(value_at(orjson.loads(rows.line(number)), path)) for number in numbers.tolist()], np.float64
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else np.nan


def _filled(rates: np.ndarray) -> np.ndarray:
    """Return pass rates with their mean for missing ones, so that such rows are placed anywhere."""
    known = rates[~np.isnan(rates)]
    return np.where(np.isnan(rates), known.mean() if len(known) else 0.0, rates)


def _counts(rows: _JoinedRows, batches: BatchPlan) -> tuple[np.ndarray, dict[str, Any]]:
    """The rows of each dataset in each batch (int64 [batches, datasets]), and the manifest's entry of a budget."""
    names, held = list(rows.lines), np.array([len(own) for own in rows.lines.values()], np.int64)
    if not held.any():
        raise InputError(
            "curriculum: every training row is excluded; lower curriculum.drop_unsolved_at, or raise curriculum.drop_solved_at"
        )
    weights, mix = _wanted(names, held, batches)
    if mix is not None and batches.blend.total:
        phases = rows_of_phases(mix, names, batches.size)
    else:
        phases = rows_to_read(held, np.array([weights[name] for name in names]), batches.sampling)[None]
    return np.concatenate([deal(each, batches.size) for each in phases]), mix_header(mix)


def _wanted(names: Sequence[str], held: np.ndarray, batches: BatchPlan) -> tuple[dict[str, float], Mix | None]:
    mix = solve(batches.blend, dict(zip(names, held.tolist(), strict=True))) if batches.blend.budgeted else None
    weights: Weights = blend_weights(batches.blend, mix)
    return {name: weight for (split, name), weight in weights.items() if split in ("datasets", "train")}, mix


def _require_span(rows: _JoinedRows, counts: np.ndarray, span: float) -> None:
    """Raises InputError if the pass rates of a dataset in several batches do not reach as far as the curriculum."""
    for (name, own), count in zip(rows.rates.items(), counts.T, strict=True):
        if not span or np.count_nonzero(count) < 2 or not np.ptp(own):  # noqa: PLR2004 - one batch has no schedule
            continue
        batch = np.repeat(np.arange(len(count)), count)
        most = most_span(np.resize(own, len(batch)) * np.sign(span), batch)
        if abs(span) > most:
            raise InputError(
                f"curriculum.pass_rate_range={span:g}: sorted rows of the dataset {name!r} reach {most:.2f} from first batch to last; "
                "set a smaller range"
            )


def _record(
    rows: _JoinedRows, counts: np.ndarray, batches: BatchPlan, dropped: Mapping[str, Counter[str]], rates: np.ndarray
) -> dict[str, Any]:
    """Return the manifest's entry about the order: for each dataset the available and read rows, and the most and fewest in a batch."""
    sizes = counts.sum(1)
    whole = counts[sizes == batches.size] if (sizes == batches.size).any() else counts
    datasets: dict[str, Any] = {}
    for (name, own), count, per_batch in zip(rows.lines.items(), counts.sum(0).tolist(), whole.T, strict=True):
        left_out = {reason: number for reason, number in dropped.get(name, Counter()).items() if number}
        datasets[name] = {
            "rows": len(own), "read": count, "unread": max(0, len(own) - count), "left_out": left_out,
            "fewest": int(per_batch.min()), "most": int(per_batch.max()),
        }  # fmt: skip
    record: dict[str, Any] = {"size": batches.size, "count": len(counts), "datasets": datasets}
    if not batches.curriculum.field:
        return record
    means = np.add.reduceat(rates, np.cumsum(sizes) - sizes) / sizes
    return {**record, "curriculum": {"first": float(means[0]), "last": float(means[-1])}}
