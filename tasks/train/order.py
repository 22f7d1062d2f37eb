"""The order of a training run: which samples each step reads, planned before it starts.

    OUT/order.json       sealed: settings, a digest per range of steps, how often everything is read
    OUT/order/indices/   megatron-core's index caches, built by its own code

Workers build the indices of prefixes, then one builds the blend's; workers digest the steps' reads and count them; then the
order is published. The trainer builds no indices when data, seed, sequence length and number of samples match the order.
Megatron-LM and Megatron-Bridge name their caches after their own tokenizer object, and find none here unless
`recorder.use_order` names them; they read the same samples. megatron-core needs its caches on a local disk, so caches for data on
an object store are copied there before training. Nothing but `tokenmill order` writes into the folder of the data.

A budget with phases gives quotas: how many samples a phase reads of each prefix, exactly. megatron-core draws from the prefix
that lags most behind its weight. With the quotas as weights and their sum as size, it draws exactly these: a prefix that lags has
less than its quota, and the quotas add up. So no prefix is read more often than planned, and budgets are kept but for the
rounding to samples: the last tokens of a prefix fill none.
"""

import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from tokenmill.tasks.blend.mix import rounded
from tokenmill.tasks.blend.models import Split
from tokenmill.tasks.errors import InputError, pip_install
from tokenmill.tasks.kit.parts import Table
from tokenmill.tasks.kit.terminal import print_table
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.shards.executor import RunAll
from tokenmill.tasks.shards.publish import place_files, publish_bytes, publish_folder, sweep_folders
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, filesystem, is_local, join, temporary_folder
from tokenmill.tasks.strict import Strict, parse

from .blocks import block_calls, hash_blocks
from .job import READ_SPLITS, ReadSplit, TrainData, TrainPhase, TrainSource, contents_of, read_sealed
from .prepared import prepared_data
from .samples import (
    content_numbers,
    drawn,
    parts_of,
    pieces_of,
    range_digest,
    sample_hashes,
    samples_config,
    split_samples,
    step_digests,
)
from .settings import OrderPlan, OrderSettings, TrainSettings

ORDER = "order.json"
INDICES = "order/indices"

TIMES = ("never", "once", "partly", "twice", "more")
COUNTED = ("prefixes", "tokens", "drawn", "unread", "cut")
COLUMNS = ("dataset", "epochs", "never", "once", "in part", "twice", "more", "unread tokens", "cut")

MAX_DIGESTS = 10_000
MAX_TASKS = 64
TOKENS_AT_ONCE = 2**24

# Tokens that this process orders, of the data and of the samples: about 10 s of work. Workers take 30 CPU-seconds to
# start.
MAX_LOCAL_TOKENS = 4_000_000_000


class DatasetReads(Strict, frozen=True):
    """How often the training run reads a dataset."""

    dataset: str
    prefixes: int
    tokens: int
    drawn: int  # tokens of all samples
    unread: int  # tokens that are never an input
    cut: int  # tokens at the end of prefixes that fill no sample
    # By times read, of which the last counts when it has begun; `partly` of those read once lack tokens.
    documents: dict[str, int]


class Order(OrderPlan, frozen=True):
    """An order."""

    content: str  # identifies the data
    steps_per_digest: int  # steps that share one of the digests
    digests: list[str]
    datasets: list[DatasetReads]

    def differences(self, data: TrainData, settings: TrainSettings) -> list[str]:
        """Why a training run reads samples other than this order's; empty if it reads the same ones.

        Steps may be cut differently: 10 steps of 8 samples read what 20 steps of 4 do, but for phases, whose quotas are rounded
        to steps.
        """
        asked = {name: getattr(settings, name) for name in ("seed", "sequence_length", "global_batch", "steps")}
        if settings.steps * settings.global_batch == self.sizes[0] and not data.phases:
            asked |= {"global_batch": self.global_batch, "steps": self.steps}
        asked["content"] = data.made_from
        return [
            f"{name} is {value} in the training run and {getattr(self, name)} in the order"
            for name, value in asked.items()
            if value != getattr(self, name)
        ]


def publish_order(path: str, order: Order) -> None:
    """Write order.json into the folder of the data."""
    publish_bytes(join(path, ORDER), sealed({"type": "order", **order.model_dump(), "volatile": {}}))


def read_order(path: str) -> Order | None:
    """Return the order in the data folder, None without one. Raises InputError when it is damaged."""
    place = join(path, ORDER)
    document = read_sealed(place, "run tokenmill order again")
    known = {name: value for name, value in (document or {}).items() if name not in ("type", "volatile")}
    return None if document is None else parse(Order, known, place)


def required_order(path: str) -> Order:
    """Return the order in the data folder. Raises InputError without one."""
    order = read_order(path)
    if order is None:
        raise InputError(f"{join(path, ORDER)}: no order here; plan one with: tokenmill order {path}")
    return order


def prepared_indices(data: TrainData, split: ReadSplit, sequence_length: int, samples: int, seed: int) -> str | None:
    """Return the folder or URI with indices built for such a training run, None if there are none. Raises InputError."""
    order = read_order(data.path)
    asked = (data.made_from, sequence_length, samples, seed)
    if order is None or asked != (
        order.content,
        order.sequence_length,
        order.sizes[READ_SPLITS.index(split)],
        order.seed,
    ):
        return None
    if split == "train" and data.phases:  # rounded to steps, whose size may differ
        planned = with_quotas(prepared_data(data.path), order.sequence_length, order.global_batch)
        if planned.phases != data.phases:
            return None
    return join(data.path, INDICES)


def followed_order(data: TrainData, settings: TrainSettings) -> Order | None:
    """Return the order of the data if a training run with these settings follows it; any other run reads in its own order."""
    order = read_order(data.path) if data.kind == "pretrain" else None
    return None if order is None or order.differences(data, settings) else order


def keep_order(order: Order | None, output_dir: str) -> None:
    """Copy an order into the folder of a training run, once: a later order may replace the data's."""
    if order is not None and read_bytes(join(output_dir, ORDER)) is None:
        publish_order(output_dir, order)


def sentence_on_order(data: TrainData, settings: TrainSettings) -> list[str]:
    """Return a line on the order of the data, if there is one."""
    order = read_order(data.path) if data.kind == "pretrain" else None
    if order is None:
        return []
    differences = order.differences(data, settings)
    place = join(data.path, ORDER)
    if not differences:
        return [f"{place}: read in this order; its indices are used"]
    return [
        f"{place}: for a training run with different settings ({'; '.join(differences)}); this one reads in its own order"
    ]


@contextmanager
def indices_folder(path: str) -> Generator[str]:
    """A local folder for new indices of the data in `path`; they replace the former ones when the `with` block ends well."""
    place = join(path, INDICES)
    if is_local(path):
        sweep_folders(str(Path(absolute(place)).parent))
        with publish_folder(place) as folder:
            yield folder
        return
    with TemporaryDirectory(dir=temporary_folder()) as folder:
        yield folder
        place_files([(str(file), join(place, file.name)) for file in sorted(Path(folder).glob("*.*"))])


def fetch_indices(place: str, folder: str) -> None:
    """Bring indices into a local folder, unless they are there: hard links where it is on the same disk, copies elsewhere."""
    system, path = filesystem(place)
    names = [str(each).rsplit("/", 1)[-1] for each in system.ls(path, detail=False)]
    place_files([(join(place, name), join(folder, name)) for name in names if not Path(folder, name).exists()])


def require_packages(what: str, names: Sequence[str], otherwise: str = "") -> None:
    """Raises InputError for packages of the extra `train` that aren't installed here."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise InputError(f"{what}: {' and '.join(missing)} must be installed: {pip_install('train')}{otherwise}")


def checked_data(path: str, settings: OrderSettings) -> TrainData:
    """Return the data to order. Raises InputError for other data than documents with something to train on, remote data with
    workers elsewhere, and packages that aren't installed.
    """
    require_packages("order", ("torch", "megatron"))
    data = prepared_data(path)
    if data.kind != "pretrain":
        raise InputError(
            f"{data.path}: holds packs, which megatron-core doesn't index; train reads them in its own order, and "
            "records it. tokenmill order takes the output of tokenmill pretrain"
        )
    if not data.of("train"):
        raise InputError(f"{data.path}: the train split is empty; prepare datasets under 'datasets' or 'train'")
    data = with_quotas(data, settings.sequence_length, settings.global_batch)
    require_steps(data, settings)
    if not is_local(data.path) and settings.cluster != "local":
        raise InputError(
            f"cluster={settings.cluster}: megatron-core builds its indices on a local disk, which workers on other machines do "
            f"not share, before they are copied to {join(data.path, INDICES)}; set cluster=local"
        )
    return data


def fits_in_process(data: TrainData, settings: OrderSettings) -> bool:
    """Return whether this process makes the order: the data are small, and no number of workers is asked for."""
    tokens = sum(source.tokens for source in data.sources)
    return not settings.workers and max(tokens, settings.sizes[0] * settings.sequence_length) < MAX_LOCAL_TOKENS


def make_order(data: TrainData, settings: OrderSettings, run_all: RunAll) -> Order:
    """Build the indices, and publish them with the order. Raises RunError."""
    if settings.block_hashes:
        run_all("hash-blocks", hash_blocks, block_calls(data))
    plan = OrderPlan(**settings.model_dump(include=set(OrderPlan.model_fields)))
    together = -(-plan.steps // MAX_DIGESTS)
    with indices_folder(data.path) as folder:
        common = {"task": Task(data=data, plan=plan, indices=folder, objects=f"{folder}/objects")}
        builds: list[Mapping[str, Any]] = []
        for split, sizes in plan.all_sizes.items():
            phases = [(number, phase.samples) for number, phase in enumerate(data.phases)] if split == "train" else []
            for phase, size in phases or [(None, size) for size in sizes]:
                sources = data.of(split) if phase is None else data.in_phase(phase).of(split)
                asked = {**common, "split": split, "size": size, "phase": phase}
                files = [file for source in sources for file in source.files]
                builds += [{**asked, "numbers": numbers} for numbers in _round_robin(files)]
        run_all("build-indices", build_prefixes, builds)
        (counted,) = run_all("build-blend", build_blend, [common])
        size = together * -(-plan.steps // (together * MAX_TASKS))  # the range of a task ends where a digest does
        ranges = [
            {**common, "begin": begin, "end": min(begin + size, plan.steps), "together": together}
            for begin in range(0, plan.steps, size)
        ]
        digests = run_all("digest-steps", digest_steps, ranges)
        names = [source_name(data, source) for source in data.of("train") for _ in source.files]
        counts = [
            {
                **common,
                "numbers": each,
                "datasets": [names[number] for number in each],
                "counts": [counted[number] for number in each],
            }
            for each in _round_robin(names)
        ]
        reads = run_all("count-reads", count_reads, counts)
    order = Order(
        **plan.model_dump(),
        content=data.made_from,
        steps_per_digest=together,
        digests=[digest for part in digests for digest in part],
        datasets=merged([each for part in reads for each in part], names),
    )
    publish_order(data.path, order)
    return order


def _round_robin(items: Sequence[object]) -> list[list[int]]:
    return [list(range(first, len(items), MAX_TASKS)) for first in range(min(MAX_TASKS, len(items)))]


# The functions that Dask workers run. The indices of a prefix need about 30 bytes per document, and those of the blend 10 bytes
# per sample, in memory while they are built; after that they are mapped.


class Task(Strict, frozen=True):
    """A worker's input: the order's data and plan, and local folders for the indices, and for remote pairs."""

    data: TrainData
    plan: OrderPlan
    indices: str
    objects: str

    def samples(self, split: Split, size: int) -> Any:  # noqa: ANN401 - megatron-core has no types
        """megatron-core's dataset of a split; see `split_samples`."""
        from .engine import joined

        _import_datasets()
        plan = self.plan
        with joined("cpu"):  # megatron-core asks for its rank
            return split_samples(self.data, split, plan.sequence_length, size, plan.seed, self.indices, self.objects)


@cache
def _import_datasets() -> tuple[Any, Any]:
    """Import megatron-core's builder of blends, and its dataset.

    Decorators of its layers would import torch's compiler for 2 CPU-seconds, and no layer runs in a worker.
    """
    import torch

    with patch.object(torch, "compile", lambda function: function), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPU packages that datasets don't need
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.gpt_dataset import GPTDataset
    return BlendedMegatronDatasetBuilder, GPTDataset


@lru_cache(maxsize=1)
def _opened(task: str) -> Any:  # noqa: ANN401
    """The train split of a task in JSON. A process opens its prefixes once: each takes about 10 ms."""
    found = Task.model_validate_json(task)
    return found.samples("train", found.plan.sizes[0])


class _BuiltError(Exception):
    """All requested prefixes are built."""


def build_prefixes(task: Task, split: Split, size: int, phase: int | None, numbers: Sequence[int]) -> None:
    """Build the indices of the prefixes with these numbers, for `size` samples of a split, or of a phase of it."""
    builder, dataset = _import_datasets()

    class SomePrefixes(builder):
        def _build_megatron_datasets_parallel(self, prefixes: Any, split: Any, sizes_per_dataset: Any) -> Any:  # noqa: ANN401
            chosen = [[each[number] for number in numbers] for each in (prefixes, sizes_per_dataset)]
            super()._build_megatron_datasets_parallel(chosen[0], split, chosen[1])
            raise _BuiltError  # before it builds the blend

    plan, data = task.plan, task.data if phase is None else task.data.in_phase(phase)
    config, sizes = samples_config(data, split, plan.sequence_length, size, plan.seed, task.indices, task.objects)
    try:
        SomePrefixes(dataset, sizes, lambda: True, config).build()
    except _BuiltError:
        return


def build_blend(task: Task) -> list[int]:
    """Build the indices of the blends of all splits; returns how many samples of each prefix the steps read."""
    train = _opened(task.model_dump_json())
    for split, sizes in task.plan.all_sizes.items():
        for size in sizes if split != "train" else ():
            task.samples(split, size)
    counts = np.zeros(len(parts_of(train)), np.int64)
    for numbers in _batches(task.plan.sizes[0], 2**24):
        counts += np.bincount(drawn(train, np.arange(numbers.start, numbers.stop))[0], minlength=len(counts))
    return counts.tolist()


def _batches(count: int, at_once: int) -> Iterator[slice]:
    return (slice(begin, min(begin + at_once, count)) for begin in range(0, count, at_once))


def digest_steps(task: Task, begin: int, end: int, together: int) -> list[str]:
    """Return the digests of the steps from `begin` to before `end`, counted from 0; `together` steps share one."""
    samples, contents = _opened(task.model_dump_json()), content_numbers(contents_of(task.data, "train"))
    length, batch = task.plan.sequence_length, task.plan.global_batch
    found: list[str] = []
    for steps in _batches(end - begin, max(1, TOKENS_AT_ONCE // (length * batch))):
        numbers = np.arange((begin + steps.start) * batch, (begin + steps.stop) * batch)
        parts = _batches(len(numbers), max(1, TOKENS_AT_ONCE // length))
        hashes = [sample_hashes(pieces_of(samples, numbers[part]), contents) for part in parts]
        found += step_digests(np.concatenate(hashes), batch)
    return [range_digest(found[part]) for part in _batches(len(found), together)]


def count_reads(
    task: Task, datasets: Sequence[str], numbers: Sequence[int], counts: Sequence[int]
) -> list[dict[str, Any]]:
    """Return how often the steps read the prefixes with these numbers, as `DatasetReads` of one prefix each.

    `datasets` are their datasets, `counts` the samples read of each.
    """
    parts = parts_of(_opened(task.model_dump_json()))
    return [
        _prefix_reads(parts[number], dataset, count, task.plan.sequence_length).model_dump()
        for dataset, number, count in zip(datasets, numbers, counts, strict=True)
    ]


def _prefix_reads(part: Any, dataset: str, drawn: int, length: int) -> DatasetReads:  # noqa: ANN401
    """Inputs are counted. A document whose last token is only a label was read whole."""
    lengths = np.asarray(part.dataset.sequence_lengths, np.int64)
    read = np.zeros(len(lengths), np.int64)
    for numbers in _batches(drawn, max(1, TOKENS_AT_ONCE // length)):
        pieces = pieces_of(part, np.arange(numbers.start, numbers.stop))
        inputs = pieces.length.copy()
        inputs[pieces.bounds[1:] - 1] -= 1
        np.add.at(read, pieces.document, inputs)
    tokens, filled = int(lengths.sum()), lengths > 0
    passes = len(part.document_index) // max(1, len(lengths))
    return DatasetReads(
        dataset=dataset, prefixes=1, tokens=tokens, drawn=drawn * length,
        unread=int(np.maximum(lengths - read, 0).sum()),
        cut=passes * tokens - 1 - (len(part.sample_index) - 1) * length,
        documents={
            "never": int((filled & (read == 0)).sum()),
            "once": int((filled & (read > 0) & (read <= lengths)).sum()),
            "partly": int((filled & (read > 0) & (read < lengths - 1)).sum()),
            "twice": int((filled & (read > lengths) & (read <= 2 * lengths)).sum()),
            "more": int((filled & (read > 2 * lengths)).sum()),
        },
    )  # fmt: skip


def merged(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[DatasetReads]:
    """Return the numbers of datasets, in the order of `names`, from their prefixes."""
    found: dict[str, Any] = {
        name: {"dataset": name, **dict.fromkeys(COUNTED, 0), "documents": dict.fromkeys(TIMES, 0)} for name in names
    }
    for part in parts:
        known = found[part["dataset"]]
        for name in COUNTED:
            known[name] += part[name]
        for times, count in part["documents"].items():
            known["documents"][times] += count
    return [DatasetReads(**figures) for figures in found.values()]


def with_quotas(data: TrainData, length: int, global_batch: int) -> TrainData:
    """Return the data with quotas as weights, for steps of `global_batch` samples of `length` tokens.

    Prefixes without a sample are omitted. Data without phases are returned as they are. Raises InputError for a phase that
    doesn't fill a step.
    """
    if not data.phases:
        return data
    sources: list[TrainSource] = []
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


def require_steps(data: TrainData, plan: OrderPlan | TrainSettings) -> None:
    """Raises InputError for more steps than the budget has."""
    available = sum(phase.samples for phase in data.phases) // plan.global_batch
    if data.phases and plan.steps > available:
        raise InputError(
            f"steps={plan.steps}: the budget of {sum(phase.tokens for phase in data.phases):,.0f} tokens has {available:,} steps "
            f"of {plan.global_batch} samples of {plan.sequence_length}; set steps={available}, or raise tokens in the blend"
        )


def source_name(data: TrainData, source: TrainSource) -> str:
    """Return a source's name for people: with several phases, phase and dataset."""
    return f"{data.phases[source.phase].name}: {source.dataset}" if len(data.phases) > 1 else source.dataset


def _quotas(
    phase: TrainPhase, sources: list[TrainSource], length: int, wanted: int, global_batch: int
) -> tuple[list[TrainSource], int]:
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
    found: list[TrainSource] = []
    for source in sources:
        own = [next(quotas) for _ in source.files]
        kept = [number for number, quota in enumerate(own) if quota]  # files without a sample are left out
        chosen = {name: [getattr(source, name)[number] for number in kept] for name in ("files", "contents", "sizes")}
        weights = [float(own[number]) for number in kept]
        if kept:
            found.append(source.model_copy(update={**chosen, "weights": weights, "tokens": sum(chosen["sizes"])}))
    return found, samples


def artifact_record(order: Order, path: str) -> dict[str, Any]:
    """Return the artifact record of an order, for the next program."""
    record = order.model_dump(exclude={"digests", "content"})
    digest = {"path": path, "type": "order", "file": join(path, ORDER), "indices": join(path, INDICES)}
    return {"order": {**digest, **record}}


def print_order(order: Order, console: Console) -> None:
    """Show people the reads of the training run: how many documents of each dataset how often, and the omitted ones."""
    rows = [
        (
            each.dataset, f"{each.drawn / each.tokens if each.tokens else 0:.2f}",
            *(each.documents[times] for times in TIMES), each.unread, each.cut,
        )
        for each in order.datasets
    ]  # fmt: skip
    print_table(console, Table("documents of each dataset, by how often they are read", COLUMNS, rows))
    console.print(
        f"{order.steps:,} steps of {order.global_batch:,} rows of {order.sequence_length:,} tokens, seed {order.seed}: a training run "
        "with these settings reads in this order and doesn't build an index",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
