"""Solve a budget: how many tokens of each dataset a training run reads, in each phase.

    weights (x tokens^temperature) ─► limits: tokens, shares, epochs, phases ─► the closest mix within all of them

Closest means least Kullback-Leibler divergence from the weights: a dataset at its cap leaves its tokens to the others, in
proportion to their weights. Each limit bounds a sum of tokens, or makes one sum a share of a second one, so the closest mix that
keeps a single limit is a multiplication. Going round the limits until nothing changes finds the closest mix that keeps all
(L. M. Bregman, 1967; with only equalities this is iterative proportional fitting, Deming and Stephan, 1940). Thirty datasets in
three phases take about 10 ms. Limits that exclude each other never settle: then the factors of one round are a certificate (Farkas)
that names the limits in conflict and, if the total is at fault, the nearest total that fits.

A ramp is a staircase between the phases around it, whose steps are averages of their mixes; it counts half to either.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tokenmill.tasks.errors import InputError

from .models import ROUNDING, Blend, DataSource, Phase

SETTLED = 1e-9
"""The largest change of a factor in a round of a finished solution."""

MAX_ROUNDS, ROUNDS_PER_CHECK = 50_000, 200
STALLED = 0.98
"""Changes that shrink less than this in ROUNDS_PER_CHECK rounds will not end."""

FARTHEST = 1e6
"""Totals that many times larger or smaller aren't suggested."""

NEGLIGIBLE = 1e-5
"""Changes below this count as settled when they shrink too slowly; budgets are kept within 0.1 %."""


@dataclass(frozen=True, slots=True)
class PhaseMix:
    """The tokens to read of each dataset in a phase; datasets with 0 tokens are omitted."""

    name: str
    drawn: Mapping[str, float]

    @property
    def tokens(self) -> float:
        return math.fsum(self.drawn.values())


@dataclass(frozen=True, slots=True)
class Mix:
    """A solved budget. `held` are the tokens that there are, `binding` the limits that hold a dataset back or up."""

    phases: Sequence[PhaseMix]
    held: Mapping[str, int]
    binding: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])

    @property
    def tokens(self) -> float:
        return math.fsum(phase.tokens for phase in self.phases)

    def drawn(self, name: str) -> float:
        return math.fsum(phase.drawn.get(name, 0.0) for phase in self.phases)


@dataclass(frozen=True, slots=True)
class _Limit:
    """Bounds on the sum of some tokens (`inside`, places in the flat array), or with `share` its share of itself and `rest`.

    Bounds that are a part of the total scale with it. `names` are the datasets that it is about.
    """

    reason: str
    inside: np.ndarray
    low: float = 0.0
    high: float = math.inf
    scales: bool = False
    rest: np.ndarray | None = None
    share: float = 0.0
    names: Sequence[str] = ()

    def at(self, part: float) -> "_Limit":
        """Return the limit for such a part of the total."""
        return replace(self, low=self.low * part, high=self.high * part) if self.scales else self


def solve(blend: Blend, held: Mapping[str, int], tokens: int | None = None) -> Mix:
    """Return the mix of the training data of a blend, given the tokens that each dataset holds.

    `tokens` replaces the blend's own total; without any, the total is the tokens of the datasets. Raises InputError for a budget that
    cannot be kept: it names the limits in conflict and the nearest total that fits.
    """
    sources = [
        source
        for source in blend.training()
        if held.get(source.name) or source.share or source.tokens or source.min_epochs
    ]
    for source in sources:
        if not held.get(source.name):
            raise InputError(
                f"dataset {source.name!r}: doesn't have tokens; remove its share, tokens and min_epochs, or give it data"
            )
    if not sources:
        return Mix([], held)
    # Without a total, as many tokens as the datasets with a weight hold.
    total = tokens or blend.total or sum(held[source.name] for source in sources if source.weight)
    phases = [*_lengths(blend.phases or [Phase(name="all")], total)]
    names = [source.name for source in sources]
    steady = [number for number, (phase, _) in enumerate(phases) if phase.ramp is None]
    # The tokens that follow the mix of a phase: its own, and half of each ramp beside it.
    halves = [length / 2 if phase.ramp is not None else 0.0 for phase, length in phases]
    lengths = np.array([phases[n][1] + sum([*halves[max(0, n - 1) : n], *halves[n + 1 : n + 2]]) for n in steady])
    weights = _weights(blend, sources, held, [phases[number][0] for number in steady])
    limits = [*_limits(blend, sources, held, [phases[number][0] for number in steady], lengths)]
    flat = weights.ravel()
    for limit in limits:
        if (limit.low or limit.rest is not None) and not flat[limit.inside].any():
            raise InputError(f"{limit.reason}: every weight there is 0; give a dataset a weight above 0")
    found, factors, steps = _settle(limits, flat, total)
    if steps is not None:
        raise _conflict(limits, flat, total, steps)
    rows = dict(zip(steady, found.reshape(weights.shape) / lengths[:, None], strict=True))
    solved = [
        PhaseMix(name, {each: value for each, value in zip(names, (mix * length).tolist(), strict=True) if value > 0})
        for number in range(len(phases)) for name, length, mix in _stairs(phases, number, rows)
    ]  # fmt: skip
    binding: dict[str, dict[str, None]] = {}
    for limit, factor in zip(limits, factors.tolist(), strict=True):
        if len(limit.names) == 1 and abs(factor) > NEGLIGIBLE:
            binding.setdefault(limit.names[0], {})[limit.reason.partition(": ")[2] or limit.reason] = None
    return Mix(solved, held, {name: list(reasons) for name, reasons in binding.items()})


def rounded(exact: np.ndarray, most: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers (int64) from 0 to `most` that add up to `total`, as close to `exact` as they can be.

    `exact` adds up to `total` and `most` to no less.
    """
    found = np.clip(np.floor(exact).astype(np.int64), 0, most)
    while left := total - int(found.sum()):
        step = 1 if left > 0 else -1
        free = np.flatnonzero(found < most if left > 0 else found > 0)
        nearest_first = np.argsort(step * (found[free] - exact[free]), kind="stable")
        found[free[nearest_first[: abs(left)]]] += step
    return found


def _lengths(phases: Sequence[Phase], total: float) -> Iterator[tuple[Phase, float]]:
    """Return each phase with its tokens; one without a size takes the rest."""
    sizes = [total * phase.share if phase.share is not None else phase.tokens for phase in phases]
    left = total - sum(size for size in sizes if size is not None)
    for phase, size in zip(phases, sizes, strict=True):
        if size is None and left <= 0:
            raise InputError(f"phase {phase.name!r}: the other phases use up the tokens; lower theirs, or raise tokens")
        yield phase, left if size is None else size


def _stairs(
    phases: Sequence[tuple[Phase, float]], number: int, rows: Mapping[int, np.ndarray]
) -> Iterator[tuple[str, float, np.ndarray]]:
    """The name, tokens and mix of a phase, or of each step of a ramp."""
    phase, length = phases[number]
    if phase.ramp is None:
        yield phase.name, length, rows[number]
        return
    for step in range(1, phase.ramp + 1):
        part = step / (phase.ramp + 1)
        yield f"{phase.name}-{step}", length / phase.ramp, (1 - part) * rows[number - 1] + part * rows[number + 1]


def _weights(
    blend: Blend, sources: Sequence[DataSource], held: Mapping[str, int], phases: Sequence[Phase]
) -> np.ndarray:
    """Return the weights that the mix is close to ([phases, datasets]); 0 for datasets whose share is used up."""
    power = blend.temperature or 0.0
    plain = [source.weight * held[source.name] ** power for source in sources]
    rows = np.tile(plain, (len(phases), 1))
    for row, phase in zip(rows, phases, strict=True):
        shares = _shares(blend, sources, phase)
        for name in shares:
            inside = _inside(sources, name)
            if not row[inside].any():
                row[inside] = 1.0
        for parent in {parent for _, parent in shares.values()}:
            _exclude(row, sources, shares, parent)
    return rows


def _exclude(
    row: np.ndarray, sources: Sequence[DataSource], shares: Mapping[str, tuple[float, str]], parent: str
) -> None:
    """Set the weights in a group to 0 that its shares leave nothing. Raises InputError if the shares leave something to nobody."""
    own = [name for name, (_, of) in shares.items() if of == parent]
    named = np.zeros(len(sources), bool)
    for name in own:
        named[_inside(sources, name)] = True
    whole = np.zeros(len(sources), bool)
    whole[_inside(sources, parent)] = True
    given = math.fsum(shares[name][0] for name in own)
    where = f"in group {parent!r}" if parent else "of the blend"
    if given > 1 + ROUNDING:
        raise InputError(f"shares {where}: {', '.join(own)} add up to {given:.4g}, more than 1; lower one of them")
    if given >= 1 - ROUNDING:
        row[whole & ~named] = 0.0
    elif not row[whole & ~named].any():
        raise InputError(
            f"shares {where}: {', '.join(own)} add up to {given:.4g}, and no other dataset with a weight is there for the rest; "
            "make them add up to 1"
        )


def _shares(blend: Blend, sources: Sequence[DataSource], phase: Phase) -> dict[str, tuple[float, str]]:
    """The shares of datasets and groups in a phase, each with the group that it is a share of, empty for the whole phase.

    A mix replaces the shares of the whole.
    """
    plain = {source.name: source.share for source in sources if source.share is not None} | (blend.groups or {})
    shares = {name: (share, _parent(sources, name)) for name, share in plain.items()}
    if phase.mix is not None:
        nested = {name: each for name, each in shares.items() if each[1]}
        shares = {**nested, **{name: (share, "") for name, share in phase.mix.items()}}
    return {name: each for name, each in shares.items() if each[0] and len(_inside(sources, name))}


def _parent(sources: Sequence[DataSource], name: str) -> str:
    """The group that a dataset or group is in; empty for the whole."""
    if any(f"{source.group}/".startswith(f"{name}/") for source in sources if source.group):
        return name.rpartition("/")[0]
    return next((source.group or "" for source in sources if source.name == name), "")


def _inside(sources: Sequence[DataSource], name: str) -> np.ndarray:
    """The numbers of the datasets in a group, or of the dataset with this name; of all for an empty name."""
    return np.array(
        [
            number for number, source in enumerate(sources)
            if not name or source.name == name or f"{source.group or ''}/".startswith(f"{name}/")
        ],
        np.int64,
    )  # fmt: skip


def _limits(
    blend: Blend, sources: Sequence[DataSource], held: Mapping[str, int], phases: Sequence[Phase], lengths: np.ndarray
) -> Iterator[_Limit]:
    count = len(sources)
    everywhere = np.arange(len(phases)) * count
    for number, source in enumerate(sources):
        tokens, inside, one = held[source.name], everywhere + number, [source.name]
        if source.tokens is not None:
            yield _Limit(f"{source.name!r}: tokens={source.tokens:,}", inside, source.tokens, source.tokens, names=one)
        if source.max_epochs is not None:
            reason = f"{source.name!r}: max_epochs={source.max_epochs:g} of {tokens:,} tokens"
            yield _Limit(reason, inside, high=source.max_epochs * tokens, names=one)
        if source.min_epochs:
            reason = f"{source.name!r}: min_epochs={source.min_epochs:g} of {tokens:,} tokens"
            yield _Limit(reason, inside, low=source.min_epochs * tokens, names=one)
    for row, (phase, length) in enumerate(zip(phases, lengths.tolist(), strict=True)):
        for name, (share, parent) in _shares(blend, sources, phase).items():
            inside = _inside(sources, name)
            rest = np.setdiff1d(_inside(sources, parent), inside) + row * count
            names = [sources[number].name for number in inside]
            mixed = phase.mix is not None and not parent
            reason = f"share {share:.4g} of {name!r}{f' in phase {phase.name!r}' if mixed else ''}"
            if not parent:
                wanted = share * length
                yield _Limit(reason, inside + row * count, wanted, wanted, scales=True, names=names)
            elif len(rest):
                yield _Limit(reason, inside + row * count, rest=rest, share=share, names=names)
    for row, (phase, length) in enumerate(zip(phases, lengths.tolist(), strict=True)):
        reason = f"phase {phase.name!r} of {length:,.0f} tokens" if blend.phases else f"{length:,.0f} tokens in all"
        yield _Limit(reason, np.arange(count) + row * count, length, length, scales=True)


def _settle(
    limits: Sequence[_Limit], weights: np.ndarray, total: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The tokens and factors after the last round, and, if limits exclude each other, the logarithms that it multiplied by."""
    with np.errstate(divide="ignore"):  # the logarithm of no tokens
        found = np.log(weights * (total / weights.sum()))
    factors = last = np.zeros(len(limits))
    before = change = math.inf
    for number in range(MAX_ROUNDS):
        last = factors.copy()
        for place, limit in enumerate(limits):
            factors[place] = _keep(limit, found, factors[place])
        change = float(np.abs(factors - last).max())
        if change < SETTLED:
            break
        # Slow progress is still progress, so look at many rounds together.
        if number % ROUNDS_PER_CHECK == ROUNDS_PER_CHECK - 1:
            if change > STALLED * before:  # limits that exclude each other never settle
                break
            before = change
    return np.exp(found), factors, factors - last if change > NEGLIGIBLE else None


def _keep(limit: _Limit, found: np.ndarray, factor: float) -> float:
    """Multiply the tokens so that they keep a limit; returns the logarithm of its factor, which was `factor`.

    `found` are the logarithms of tokens, as the factors of limits that exclude each other grow without end.
    """
    inside = float(np.logaddexp.reduce(found[limit.inside]))
    if math.isinf(inside):
        return factor
    if limit.rest is not None:
        rest = float(np.logaddexp.reduce(found[limit.rest]))
        step = 0.0 if math.isinf(rest) else math.log(limit.share) + rest - math.log(1 - limit.share) - inside
        found[limit.inside] += step * (1 - limit.share)
        found[limit.rest] -= step * limit.share
        return factor + step
    free = inside - factor
    least = math.log(limit.low) - free if limit.low else -math.inf
    new = min(max(0.0, least), math.log(limit.high) - free)
    found[limit.inside] += new - factor
    return new


def _conflict(limits: Sequence[_Limit], weights: np.ndarray, total: float, steps: np.ndarray) -> InputError:
    """The error for limits that exclude each other at this total; `steps` are the logarithms by which a round multiplies.

    At the nearest total by some limits others may still be broken: go on until none is. The last ones bind. If the bound does
    not move any more, it is reached: there tokens vanish, which takes rounds without end.
    """
    nearest, binding = total, limits
    for _ in range(len(limits)):
        chosen, certified = _certificate([limit.at(nearest / total) for limit in limits], steps, nearest)
        binding = [limits[number] for number in chosen]
        if not 1 / FARTHEST < certified / total < FARTHEST:
            return _refusal(binding, total, None)
        if abs(certified / nearest - 1) < 2 * NEGLIGIBLE:
            return _refusal(binding, total, nearest if nearest != total else None)
        nearest = certified * (1 - NEGLIGIBLE if certified < total else 1 + NEGLIGIBLE)
        _, _, again = _settle([limit.at(nearest / total) for limit in limits], weights, nearest)
        if again is None:
            return _refusal(binding, total, nearest)
        steps = again
    return _refusal(binding, total, None)


def _certificate(limits: Sequence[_Limit], steps: np.ndarray, total: float) -> tuple[list[int], float]:
    """The numbers of the limits in conflict, and the nearest total by them; 0 if no total is."""
    strongest = np.abs(steps).max()
    chosen = [number for number, step in enumerate(steps.tolist()) if abs(step) > 1e-3 * strongest]
    parts = [0.0, 0.0]
    for number in chosen:
        limit, step = limits[number], float(steps[number])
        if limit.rest is None:
            parts[limit.scales] += step * (limit.low if step > 0 else limit.high)
    fixed, scaling = parts
    nearest = -fixed / (scaling / total) if scaling else 0.0
    return chosen, max(nearest, 0.0)


def _refusal(binding: Sequence[_Limit], total: float, nearest: float | None) -> InputError:
    reasons = "; ".join(limit.reason for limit in sorted(binding, key=lambda limit: not limit.names))
    advice = "change one of them"
    if nearest is not None:
        bound = f"at most {math.floor(nearest):,}" if nearest < total else f"at least {math.ceil(nearest):,}"
        advice = f"{bound} tokens in all are possible with the others as they are: set tokens, or change one of them"
    return InputError(f"tokens={total:,.0f}: the budget cannot be kept: {reasons}; {advice}")
