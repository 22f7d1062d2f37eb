"""Quotas: how many samples a phase reads of each prefix, exactly.

megatron-core draws from the prefix that lags most behind its weight. With the quotas as weights and their sum as size, it draws
exactly these: a prefix that lags has less than its quota, and the quotas add up. So no prefix is read more often than planned, and
budgets are kept but for the rounding to samples: the last tokens of a prefix fill none.
"""

import numpy as np
from tokenmill.tasks.blend.mix import rounded
from tokenmill.tasks.errors import InputError

from .job import Source, TrainData, TrainPhase
from .settings import Plan, TrainSettings


def with_quotas(data: TrainData, length: int, global_batch: int) -> TrainData:
    """The data with quotas as weights, for steps of `global_batch` samples of `length` tokens.

    Prefixes without a sample are left out. Data without phases are returned as they are. Raises InputError for a phase that
    fills no step.
    """
    if not data.phases:
        return data
    sources: list[Source] = []
    phases: list[TrainPhase] = []
    before = tokens = 0.0
    for number, phase in enumerate(data.phases):
        tokens += phase.tokens
        steps = round(tokens / (length * global_batch)) - before
        own = [source for source in data.of("train") if source.phase == number]
        found, samples = _quotas(phase, own, length, int(steps) * global_batch, global_batch)
        before += samples // global_batch
        sources += found
        phases.append(phase.model_copy(update={"samples": samples}))
    held_out = [source for source in data.sources if source.split != "train"]
    return data.model_copy(update={"sources": [*sources, *held_out], "phases": phases})


def require_steps(data: TrainData, plan: Plan | TrainSettings) -> None:
    """Raises InputError for more steps than the budget has."""
    available = sum(phase.samples for phase in data.phases) // plan.global_batch
    if data.phases and plan.steps > available:
        raise InputError(
            f"steps={plan.steps}: the budget of {sum(phase.tokens for phase in data.phases):,.0f} tokens has {available:,} steps "
            f"of {plan.global_batch} samples of {plan.sequence_length}; set steps={available}, or raise tokens in the blend"
        )


def source_name(data: TrainData, source: Source) -> str:
    """The name of a source for people: with several phases, those of phase and dataset."""
    return f"{data.phases[source.phase].name}: {source.dataset}" if len(data.phases) > 1 else source.dataset


def _quotas(
    phase: TrainPhase, sources: list[Source], length: int, wanted: int, global_batch: int
) -> tuple[list[Source], int]:
    """The sources of a phase with their quotas, and the samples of the phase: `wanted`, or the full steps that there are."""
    drawn = np.array([weight for source in sources for weight in source.weights])
    sizes = np.array([size for source in sources for size in source.sizes], np.int64)
    most = (np.ceil(drawn / sizes - 1e-9).astype(np.int64) * sizes - 1) // length
    samples = min(wanted, int(most.sum()) // global_batch * global_batch)
    if samples <= 0:
        raise InputError(
            f"phase {phase.name!r}: {phase.tokens:,.0f} tokens fill no step of {global_batch} samples of {length}; set a "
            "smaller sequence_length or global_batch, or give the phase more tokens"
        )
    quotas = iter(rounded(drawn * (samples / drawn.sum()), most, samples).tolist())
    return [
        found for source in sources if (found := _with(source, [next(quotas) for _ in source.files])).files
    ], samples


def _with(source: Source, quotas: list[int]) -> Source:
    """A source with quotas as weights, without the files that have none."""
    kept = [number for number, quota in enumerate(quotas) if quota]
    chosen = {name: [getattr(source, name)[number] for number in kept] for name in ("files", "contents", "sizes")}
    return source.model_copy(
        update={**chosen, "weights": [float(quotas[number]) for number in kept], "tokens": sum(chosen["sizes"])}
    )
