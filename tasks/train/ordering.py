"""Plan the order of a training, in parallel over prefixes and steps.

build the indices of prefixes ─► build those of the blend ─► digest what steps read, count what is read ─► publish
"""

from collections.abc import Iterator, Sequence

from tokenmill.tasks.blend.models import Split
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.pool import RunAll
from tokenmill.tasks.storage import is_local, join

from .blocks import block_calls, hash_blocks
from .job import TrainData
from .order import (
    INDICES,
    Order,
    indices_folder,
    merged,
    publish_order,
    require_documents,
    require_packages,
    steps_per_digest,
)
from .phases import require_steps, source_name, with_quotas
from .prepared import prepared_data
from .settings import OrderSettings, Plan

MOST_TASKS = 64

LITTLE_TOKENS = 4_000_000_000
"""Tokens that this process orders, of the data and of the samples: some 10 s of work. Workers take 30 CPU-seconds to start."""


def checked_data(path: str, settings: OrderSettings) -> TrainData:
    """The data to order. Raises InputError for other data than documents, remote data with workers elsewhere, and
    packages that are not installed.
    """
    require_packages("order", ("torch", "megatron"))
    data = prepared_data(path)
    require_documents(data)
    data = with_quotas(data, settings.sequence_length, settings.global_batch)
    require_steps(data, settings)
    if not is_local(data.path) and settings.cluster != "local":
        raise InputError(
            f"cluster={settings.cluster}: megatron-core builds its indices on a local disk, which workers on other machines do "
            f"not share, before they are copied to {join(data.path, INDICES)}; set cluster=local"
        )
    return data


def is_little(data: TrainData, settings: OrderSettings) -> bool:
    """Whether this process makes the order: the data are small, and no number of workers is asked for."""
    tokens = sum(source.tokens for source in data.sources)
    return not settings.workers and max(tokens, settings.sizes[0] * settings.sequence_length) < LITTLE_TOKENS


def make_order(data: TrainData, settings: OrderSettings, run_all: RunAll) -> Order:
    """Build the indices, and publish them with the order. Raises RunError."""
    from . import indices  # noqa: PLC0415 - imports torch

    if settings.block_hashes:
        run_all("hash-blocks", hash_blocks, block_calls(data))
    plan = Plan(**settings.model_dump(include=set(Plan.model_fields)))
    together = steps_per_digest(plan.steps)
    with indices_folder(data.path) as folder:
        common = {"task": indices.Task(data=data, plan=plan, indices=folder, objects=f"{folder}/objects")}
        builds = [
            {**common, "split": split, "size": size, "phase": phase, "numbers": numbers}
            for split, size, phase, files in _built(data, plan)
            for numbers in _dealt(files)
        ]
        run_all("build-indices", indices.build_prefixes, builds)
        (drawn,) = run_all("build-blend", indices.build_blend, [common])
        ranges = [
            {**common, "begin": begin, "end": end, "together": together} for begin, end in _ranges(plan.steps, together)
        ]
        digests = run_all("digest-steps", indices.digests, ranges)
        names = [source_name(data, source) for source in data.of("train") for _ in source.files]
        counts = [
            {
                **common,
                "numbers": each,
                "datasets": [names[number] for number in each],
                "counts": [drawn[number] for number in each],
            }
            for each in _dealt(names)
        ]
        reads = run_all("count-reads", indices.count_reads, counts)
    order = Order(
        **plan.model_dump(),
        content=data.made_from,
        steps_per_digest=together,
        digests=[digest for part in digests for digest in part],
        datasets=merged([each for part in reads for each in part], names),
    )
    publish_order(data.path, order)
    return order


def _built(data: TrainData, plan: Plan) -> Iterator[tuple[Split, int, int | None, list[str]]]:
    """The splits, with the samples of each that are asked for; the phases of the train split; and the files of each."""
    for split, sizes in plan.all_sizes.items():
        phases = [(number, phase.samples) for number, phase in enumerate(data.phases)] if split == "train" else []
        for phase, size in phases or [(None, size) for size in sizes]:
            sources = data.of(split) if phase is None else data.in_phase(phase).of(split)
            yield split, size, phase, [file for source in sources for file in source.files]


def _dealt(items: Sequence[object]) -> list[list[int]]:
    """The numbers of items, dealt out to tasks."""
    return [list(range(first, len(items), MOST_TASKS)) for first in range(min(MOST_TASKS, len(items)))]


def _ranges(steps: int, together: int) -> list[tuple[int, int]]:
    """Ranges of steps, one per task, none of which divides the steps of a digest."""
    size = together * -(-steps // (together * MOST_TASKS))
    return [(begin, min(begin + size, steps)) for begin in range(0, steps, size)]
