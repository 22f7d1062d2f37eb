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
from collections.abc import Callable, Mapping, Sequence
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
from tokenmill.tasks.shards.plan import Finished
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

BLOCK = 1 << 26
"""Bytes in which line breaks are looked for at once."""

WRITTEN_TOGETHER = 4096
"""Rows gathered for one write."""


@dataclass(frozen=True, slots=True)
class RowFile:
    """A part of a shard: its shard, its file in the store, and its name in the output folder."""

    item: Finished
    documents: int
    stored: str
    name: str


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
class RowOrder:
    """The rows to read, one after the other: for each the number of its dataset and of the row in it (int64 [rows])."""

    dataset: np.ndarray
    row: np.ndarray

    def of(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Put values of each dataset's rows in this order."""
        found = np.empty(len(self.row), values[0].dtype)
        for number, own in enumerate(values):
            mine = self.dataset == number
            found[mine] = own[self.row[mine]]
        return found


def write_ordered(files: Sequence[RowFile], batches: BatchPlan, target: str) -> tuple[Output, dict[str, Any]]:
    """Write the rows in training files in batch order; return the record of the file and the manifest's entries.

    Raises InputError for a budget or curriculum that the rows do not allow, RunError for a file that differs from its receipt.
    """
    with TemporaryDirectory(dir=temporary_folder()) as folder:
        # Rows are read at random, so files of an object store, or more than fit in memory, are first laid out on a local disk.
        place, memory = str(Path(folder, "rows.jsonl")), memoryview(b"")
        if join_files([file.stored for file in files], place).size:
            with Path(place).open("rb") as joined:
                memory = memoryview(mmap.mmap(joined.fileno(), 0, access=mmap.ACCESS_READ))
        ends = np.concatenate([
            np.zeros(1, np.int64),
            *(np.flatnonzero(np.frombuffer(memory[begin : begin + BLOCK], np.uint8) == ord("\n")) + begin + 1 for begin in range(0, len(memory), BLOCK)),
        ])  # fmt: skip
        expected = sum(file.documents for file in files)
        if len(ends) - 1 != expected:
            raise RunError(
                f"{len(ends) - 1:,} lines in {len(files)} files of {expected:,} rows; a file in the store is "
                "damaged: tokenmill verify names it"
            )

        def line(number: int) -> memoryview:
            return memory[int(ends[number]) : int(ends[number + 1])]

        parts: dict[str, list[np.ndarray]] = {}
        for file, end in zip(files, np.cumsum([file.documents for file in files]).tolist(), strict=True):
            parts.setdefault(file.item.shard.dataset, []).append(np.arange(end - file.documents, end))
        lines = {name: np.concatenate(own) for name, own in parts.items()}
        rates, left_out, span = {name: np.zeros(len(own)) for name, own in lines.items()}, dict[str, Any](), 0.0
        if batches.curriculum.field:
            lines, rates, left_out = _with_pass_rates(line, lines, batches.curriculum, batches.curriculum.field)
            span = batches.curriculum.pass_rate_range
        counts, mix = _rows_in_batches({name: len(own) for name, own in lines.items()}, batches)
        if span:
            _require_span(rates, counts, span)
        order = in_order(counts, list(rates.values()), span, batches.curriculum.spread, batches.seed)
        numbers = order.of(list(lines.values()))
        with publish(target) as stream:
            for begin in range(0, len(numbers), WRITTEN_TOGETHER):
                stream.write(b"".join(map(line, numbers[begin : begin + WRITTEN_TOGETHER].tolist())))
    record = _record(lines, counts, batches, left_out, order.of(list(rates.values())))
    return stream.output, {"batches": record, **mix_header(mix)}


def _with_pass_rates(
    line: Callable[[int], memoryview], lines: Mapping[str, np.ndarray], curriculum: Curriculum, field: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, dict[str, int]]]:
    """Return the lines to order of each dataset, their pass rates (float64), and how many the curriculum omits, by reason."""
    path, rates = field_path(field), dict[str, np.ndarray]()
    for name, numbers in lines.items():
        values = [value_at(orjson.loads(line(number)), path) for number in numbers.tolist()]
        known = [
            float(each) if isinstance(each, int | float) and not isinstance(each, bool) else np.nan for each in values
        ]
        rates[name] = np.array(known, np.float64)
    if all(np.isnan(own).all() for own in rates.values()):
        raise InputError(
            f"curriculum.field={field}: no training row has a number there; name a field of the rows, or remove it"
        )
    kept, left_out = dict[str, np.ndarray](), dict[str, dict[str, int]]()
    for name, own in rates.items():
        unsolved, solved = own <= curriculum.drop_unsolved_at, own >= curriculum.drop_solved_at
        left_out[name] = {"never_solved": int(unsolved.sum()), "always_solved": int(solved.sum())}
        kept[name], useful = lines[name][~(unsolved | solved)], own[~(unsolved | solved)]
        # Rows without a rate can be read at any time, so they get the mean, which fits every batch.
        present = useful[~np.isnan(useful)]
        rates[name] = np.where(np.isnan(useful), present.mean() if len(present) else 0.0, useful)
    return kept, rates, left_out


def _rows_in_batches(held: Mapping[str, int], batches: BatchPlan) -> tuple[np.ndarray, Mix | None]:
    """Return the rows of each dataset in each batch (int64 [batches, datasets]), and the mix that a budget asks for."""
    if not any(held.values()):
        raise InputError(
            "curriculum: every training row is excluded; lower curriculum.drop_unsolved_at, or raise curriculum.drop_solved_at"
        )
    mix = solve(batches.blend, held) if batches.blend.budgeted else None
    if mix is not None and batches.blend.total:
        # A phase ends with a whole batch, so that no batch mixes two phases; the last phase takes the rest.
        drawn = np.array([[phase.drawn.get(name, 0.0) for name in held] for phase in mix.phases])
        ends = np.rint(np.cumsum(drawn.sum(1)) / batches.size).astype(np.int64) * batches.size
        ends[-1] = round(float(drawn.sum()))
        totals = np.diff(ends, prepend=0).tolist()
        phases = [
            rounded(each * (total / each.sum()), np.full(len(each), total), total)
            for each, total in zip(drawn, totals, strict=True)
        ]
        return np.concatenate([deal(each, batches.size) for each in phases]), mix
    weights: Weights = blend_weights(batches.blend, mix)
    by_name = {name: weight for (split, name), weight in weights.items() if split in ("datasets", "train")}
    rows = np.array(list(held.values()), np.int64)
    wanted = np.where(rows > 0, np.array([by_name[name] for name in held]), 0.0)
    if batches.sampling == "none" or not wanted.any():
        return deal(np.where(wanted > 0, rows, 0), batches.size), mix
    # Down: as many rows as the scarcest dataset allows without repeating one. Up: as many as leave out no row of any.
    shares = wanted / wanted.sum()
    totals = rows[shares > 0] / shares[shares > 0]
    total = round(float(totals.min() if batches.sampling == "down" else totals.max()))
    return deal(rounded(shares * total, np.full(len(rows), total), total), batches.size), mix


def deal(wanted: np.ndarray, size: int) -> np.ndarray:
    """Return the rows of each dataset in each batch (int64 [batches, datasets]), if `wanted` rows of each are read.

    The last batch has the rest, if that doesn't fill one.
    """
    total, given = int(wanted.sum()), np.zeros(len(wanted), np.int64)
    batches: list[np.ndarray] = []
    for end in [*range(size, total + 1, size), *([total] if total % size else [])]:
        # What a dataset should have given by the end of this batch, less what it has given: rounding never adds up.
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
        mixed = _seed(seed, number + 1)
        chosen = shuffled(len(own), len(places), mixed)
        # Without a difference between the rates there is nothing to order by.
        if span and np.ptp(own[chosen]):
            chosen = chosen[_matched(own[chosen], batch[places], span, spread, mixed)]
        row[places] = chosen
    mixed_up = np.lexsort((splitmix64(np.arange(len(batch), dtype=np.uint64) ^ _seed(seed, 0)), batch))
    return RowOrder(dataset[mixed_up], row[mixed_up])


def shuffled(held: int, count: int, seed: np.uint64) -> np.ndarray:
    """Return `count` numbers below `held` (int64): all of them in an order by hash, then all again in a different one."""
    numbers = np.arange(-(-count // held) * held, dtype=np.uint64)
    return (np.lexsort((splitmix64(numbers ^ seed), numbers // np.uint64(held)))[:count] % held).astype(np.int64)


def _seed(seed: int, number: int) -> np.uint64:
    return splitmix64(splitmix64(np.array([seed], np.uint64)) + np.uint64(number))[0]


def _times(batch: np.ndarray) -> np.ndarray:
    """When each batch is read: from 0, the first, to 1, the last."""
    return (batch - batch[0]) / max(1, int(batch[-1] - batch[0]))


def _gaussian(count: int) -> np.ndarray:
    """The middles of so many equal parts of the standard normal distribution."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((number + 0.5) / count) for number in range(count)])


def _matched(rates: np.ndarray, batch: np.ndarray, span: float, spread: float, seed: np.uint64) -> np.ndarray:
    """The number of the row (int64) in each place, whose batches ascend."""
    # A schedule that rises is one that falls for negated rates.
    up = np.sign(span)
    centers = _centers(np.sort(rates * up), batch, abs(span), spread)
    parts = (np.arange(len(batch)) + 0.5) / len(batch)
    # One draw from each of as many equal parts of the Gaussian as the batch has rows: small batches spread as far as large ones.
    first = np.searchsorted(batch, batch)
    place, count = np.arange(len(batch)) - first, np.searchsorted(batch, batch, side="right") - first
    fraction = splitmix64(np.arange(len(batch), dtype=np.uint64) ^ seed) / 2.0**64
    noise = np.interp((place + fraction) / count, (np.arange(4096) + 0.5) / 4096, _gaussian(4096))
    asked = np.interp(parts, (np.arange(MOMENTS) + 0.5) / MOMENTS, centers) + spread * noise
    found = np.empty(len(batch), np.int64)
    found[np.argsort(asked, kind="stable")] = np.argsort(rates * up, kind="stable")
    return found


def _centers(rates: np.ndarray, batch: np.ndarray, span: float, spread: float) -> np.ndarray:
    """Where to center the Gaussian of each moment (float64 [MOMENTS]) so that the mean of matched rows falls evenly.

    The mean of the matched rates is the gradient of a concave function of the centers, so following the error finds them.
    """
    times = _times(batch)[(len(batch) * (2 * np.arange(MOMENTS) + 1)) // (2 * MOMENTS)]
    # On quantiles instead of all rows, so that the time doesn't depend on their number.
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


def _require_span(rates: Mapping[str, np.ndarray], counts: np.ndarray, span: float) -> None:
    """Raises InputError if the pass rates of a dataset in several batches do not reach as far as the curriculum."""
    for (name, own), count in zip(rates.items(), counts.T, strict=True):
        if np.count_nonzero(count) < 2 or not np.ptp(own):  # noqa: PLR2004 - one batch has no schedule
            continue
        batch = np.repeat(np.arange(len(count)), count)
        up = np.sort(np.resize(own, len(batch)) * np.sign(span))
        # No order moves the mean further than sorted rows do. Compare how far both have moved at the end of each batch.
        times, ends = _times(batch), np.flatnonzero(np.diff(batch))
        reached, schedule = np.cumsum(up[::-1] - up.mean()), np.cumsum(times.mean() - times)
        most = float((reached[ends] / schedule[ends]).min())
        if abs(span) > most:
            raise InputError(
                f"curriculum.pass_rate_range={span:g}: sorted rows of the dataset {name!r} reach {most:.2f} from first batch to last; "
                "set a smaller range"
            )


def _record(
    lines: Mapping[str, np.ndarray], counts: np.ndarray, batches: BatchPlan, left_out: Mapping[str, Mapping[str, int]],
    rates: np.ndarray,
) -> dict[str, Any]:  # fmt: skip
    """Return the manifest's entry about the order: for each dataset the available and read rows, and the most and fewest in a batch."""
    sizes = counts.sum(1)
    # The last batch may hold fewer rows; the quotas are those of whole ones.
    whole = counts[sizes == batches.size] if (sizes == batches.size).any() else counts
    datasets: dict[str, Any] = {}
    for (name, own), count, per_batch in zip(lines.items(), counts.sum(0).tolist(), whole.T, strict=True):
        datasets[name] = {
            "rows": len(own), "read": count, "unread": max(0, len(own) - count),
            "left_out": {reason: number for reason, number in left_out.get(name, {}).items() if number},
            "fewest": int(per_batch.min()), "most": int(per_batch.max()),
        }  # fmt: skip
    record: dict[str, Any] = {"size": batches.size, "count": len(counts), "datasets": datasets}
    if not batches.curriculum.field:
        return record
    means = np.add.reduceat(rates, np.cumsum(sizes) - sizes) / sizes
    return {**record, "curriculum": {"first": float(means[0]), "last": float(means[-1])}}
