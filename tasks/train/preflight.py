"""Plan a training and check it before any process starts: a mistake found here costs a second, not a reservation.

Each check raises InputError with what is wrong, which value, where, and the remedy. Nothing is written, torch isn't loaded, and
of token files at most some packs are read. Only the training machine can tell whether the model fits into its memory.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.identity import difference
from tokenmill.tasks.shards.manifest import MANIFEST
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, filesystem, join

from .blocks import require_block_hashes
from .file_sizes import check_file_sizes
from .held_out import held_out
from .history import METRICS, TRAINING
from .initial_weights import check_initial_weights, start_place
from .job import CHECKPOINTS, JOB, MODEL, Job, job_of
from .launchers.launch import process_count
from .order import require_packages, sentence_on_order
from .phases import require_steps, source_name, with_quotas
from .prepared import (
    content_digest,
    listed_files,
    prepared_data,
    prepared_manifest,
)
from .settings import RUNTIME_SETTINGS, TrainSettings
from .skips import check_skipped, read_skip_list
from .tokenizer_files import check_tokenizer

PACKAGES = ("torch", "megatron", "transformers")

TOKENS_COUNTED = 1_000_000
"""Tokens of each dataset in which trained tokens behind EOS are counted; a chat template writes about as many everywhere."""

OWN_LAUNCHERS = {"local", "slurm", "kubernetes"}
"""Launchers that start tokenmill's trainer; the others write files for other trainers."""


def plan_training(path: str, settings: TrainSettings, output_dir: str) -> Job:
    """Make the job of training on the preparation in `path`, with local places made absolute.

    Raises InputError when `path` holds nothing to train on. `check` finds out whether the job can run.
    """
    if settings.start_from is not None:
        settings = settings.model_copy(update={"start_from": start_place(settings.start_from)})
    skipped = read_skip_list(settings.skip_list) if settings.skip_list is not None else []
    data = with_quotas(prepared_data(path), settings.sequence_length, settings.global_batch)
    return Job(settings=settings, data=data, output_dir=absolute(output_dir), skipped=skipped)


def check(job: Job) -> list[str]:
    """Check a job. Returns lines to show before it starts, and raises InputError when it cannot run."""
    manifest = prepared_manifest(job.data.path)
    _check_complete(job, manifest)
    listed = listed_files(job.data.path, manifest)
    if content_digest(listed) != job.data.made_from:
        raise InputError(
            f"{job.data.path}: prepared again since this job was planned; start over to train on its new content"
        )
    _check_train_split(job)
    _check_row_length(job)
    _check_packages(job.settings)
    _check_parallelism(job.settings)
    _check_sequence_multiple(job)
    _check_divisibility(job)
    _check_batch(job.settings)
    require_steps(job.data, job.settings)
    _check_reads(job)
    _check_skipped(job)
    resumption = _check_output(job)
    epochs = _check_epochs(job)
    if job.settings.launcher in OWN_LAUNCHERS:  # other trainers read ids and need no tokenizer
        check_tokenizer(job.data)
    check_file_sizes(job.data.path, listed, manifest)
    check_initial_weights(job)
    notes = [*_repeated_in_validation(job), *_cleared_by_bridge(job), *sentence_on_order(job.data, job.settings)]
    return [*epochs, *notes, *resumption]


def _check_complete(job: Job, manifest: Mapping[str, Any]) -> None:
    missing = manifest["missing"]
    if missing:
        raise InputError(
            f"{job.data.path}: published without {len(missing):,} of its shards, {missing[0]} among them; run the same "
            "preparation again without allow_partial"
        )


def _check_train_split(job: Job) -> None:
    if not any(source.tokens for source in job.data.of("train")):
        raise InputError(
            f"{job.data.path}: the train split is empty; prepare datasets under 'datasets' or 'train', with a smaller "
            "holdout"
        )


def _check_row_length(job: Job) -> None:
    """Every pack must fit into a row, or at least one dataset must fill one."""
    length, pack_size = job.settings.sequence_length, job.data.pack_size
    if pack_size is not None:
        if length < pack_size - 1:
            raise InputError(
                f"sequence_length={length} is too short for packs of up to {pack_size} tokens, {pack_size - 1} of them "
                f"inputs; set sequence_length={pack_size}, or prepare with pack_size={length}"
            )
        return
    longest = max(source.tokens for source in job.data.of("train"))
    if longest <= length:
        raise InputError(
            f"sequence_length={length} needs {length + 1:,} tokens in one dataset, but the largest in the train split "
            f"of {job.data.path} has {longest:,}; set sequence_length={max(2, longest - 1)} or less, or prepare more data"
        )


def _repeated_in_validation(job: Job) -> Iterator[str]:
    """The datasets of the valid split that do not fill a row."""
    length = job.settings.sequence_length
    if job.data.kind == "sft" or job.settings.validate_every is None:
        return
    for source in job.data.of("valid"):
        if source.tokens <= length:
            yield f"{source.dataset}: {source.tokens:,} tokens of the valid split, repeated to fill rows of {length:,}"


def _cleared_by_bridge(job: Job) -> Iterator[str]:
    """The trained tokens that Megatron-Bridge leaves out before its #5213: it clears the loss where the input is EOS."""
    if job.settings.launcher != "megatron-bridge" or job.data.kind != "sft":
        return
    trained = cleared = 0
    for _, batch in held_out(job.data, "train", TOKENS_COUNTED):
        trained += int(batch.loss.sum())
        cleared += int(batch.loss[1:][batch.ids[:-1] == job.data.eos].sum())  # the first of a sequence has no loss
    if cleared:
        yield (
            f"{cleared:,} of {trained:,} trained tokens ({cleared / trained:.1%}, of the first {TOKENS_COUNTED:,} tokens per "
            "dataset) follow an EOS: Megatron-Bridge 0.6.2 and older leave them out of the loss (NVIDIA-NeMo/Megatron-Bridge#5213); "
            "use 0.7 or newer, or launcher=local"
        )


def _check_packages(settings: TrainSettings) -> None:
    if settings.launcher == "local":
        require_packages(f"engine={settings.engine}", PACKAGES, ", or choose a launcher that trains elsewhere")


def _check_skipped(job: Job) -> None:
    """What is left out must be of these data, and the trainer must be one that leaves it out."""
    check_skipped(job.skipped, job.data.made_from, job.settings.steps)
    if job.skipped and job.settings.launcher not in OWN_LAUNCHERS:
        raise InputError(f"skip_list: launcher={job.settings.launcher} starts another trainer; set launcher=local")


def _check_reads(job: Job) -> None:
    """Block hashes must exist, and the trainer must be one that checks them."""
    if not job.settings.check_reads:
        return
    if job.data.kind == "sft":
        raise InputError("check_reads=true: packs are copied once before training; check them with tokenmill verify")
    if job.settings.launcher not in OWN_LAUNCHERS:
        raise InputError(
            f"check_reads=true: launcher={job.settings.launcher} starts another trainer; set launcher=local"
        )
    require_block_hashes(job.data)


def _check_parallelism(settings: TrainSettings) -> None:
    """The engine must support the kinds of parallelism."""
    parallel = settings.parallel
    if settings.launcher in OWN_LAUNCHERS and (parallel.context > 1 or parallel.sequence):
        asked = f"parallel.context={parallel.context}" if parallel.context > 1 else "parallel.sequence=true"
        raise InputError(
            f"{asked}: launcher={settings.launcher} does not split sequences; remove it, or set launcher=megatron-bridge"
        )
    if settings.engine != "transformers":
        return
    for name, value in (("parallel.tensor", parallel.tensor), ("parallel.pipeline", parallel.pipeline)):
        if value > 1:
            raise InputError(f"{name}={value}: engine=transformers does not split a model; use engine=megatron-core")
    if settings.optimizer.distributed:
        raise InputError("optimizer.distributed=true: engine=transformers cannot do this; use engine=megatron-core")


def _check_sequence_multiple(job: Job) -> None:
    """The length of sequences must be a multiple of the number of pieces they are split into.

    These are two per process of `context`, one from either end; with `sequence`, one per process of `context` and
    `tensor`.
    """
    parallel, length = job.settings.parallel, job.settings.sequence_length
    multiple = math.lcm(
        2 * parallel.context if parallel.context > 1 else 1,
        parallel.context * parallel.tensor if parallel.sequence else 1,
    )
    asked = f"parallel.context={parallel.context} and tensor={parallel.tensor} with sequence={parallel.sequence}"
    padded = job.data.pad_seq_to_mult
    if padded is not None and padded % multiple:
        raise InputError(
            f"{asked}: sequences must be padded to a multiple of {multiple}, and {job.data.path} has "
            f"pad_seq_to_mult={padded}; prepare it again with pad_seq_to_mult={multiple}"
        )
    if padded is None and length % multiple:
        raise InputError(
            f"{asked}: sequence_length={length} must be a multiple of {multiple}; set it to {-(-length // multiple) * multiple}"
        )


def _check_divisibility(job: Job) -> None:
    """The parts of the model must be divisible by the processes that share them."""
    model, parallel = job.settings.model, job.settings.parallel
    for name, value, setting, pieces in (
        ("model.heads", model.heads, "tensor", parallel.tensor),
        ("model.key_value_heads", model.key_value_heads, "tensor", parallel.tensor),
        ("model.feed_forward", model.feed_forward, "tensor", parallel.tensor),
        ("the padded vocabulary", model.vocabulary(job.data.vocabulary_size), "tensor", parallel.tensor),
        ("model.layers", model.layers, "pipeline", parallel.pipeline),
    ):
        if value % pieces:
            remedy = "model.vocabulary_multiple" if " " in name else name
            raise InputError(
                f"parallel.{setting}={pieces}: {name}={value:,} is not divisible by {pieces}; choose a divisor of it, or "
                f"a {remedy} that is a multiple of {pieces}"
            )


def _check_batch(settings: TrainSettings) -> None:
    """Processes and the rows of a batch must be divisible by the replicas."""
    each = process_count(settings)
    total, model = settings.nodes * each, settings.model_processes
    if total % model:
        found = "" if settings.processes else " (one per GPU found here, or one)"
        raise InputError(
            f"{settings.nodes} machine(s) of {each} process(es){found} do not divide into replicas of {model} "
            f"(parallel.tensor x pipeline x context); set nodes and processes so that their product is a multiple of {model}"
        )
    at_once = settings.micro_batch * (total // model)
    if settings.global_batch % at_once:
        raise InputError(
            f"global_batch={settings.global_batch} is not a multiple of {at_once}, the micro_batch={settings.micro_batch} of "
            f"{total // model} replica(s); set global_batch={-(-settings.global_batch // at_once) * at_once}, or a smaller "
            "micro_batch"
        )


@dataclass(frozen=True, slots=True)
class Epochs:
    """How often a source is read: `drawn` tokens or packs, of `held` in it."""

    source: str
    drawn: float
    held: int
    unit: str

    @property
    def count(self) -> float:
        """The number of epochs."""
        return self.drawn / self.held

    def __str__(self) -> str:
        return f"{self.source}: {self.count:.2f} epochs ({self.drawn:,.0f} {self.unit} drawn, of {self.held:,})"


def epochs_of(job: Job) -> list[Epochs]:
    """How often the whole training reads each source of the train split.

    Documents are drawn by weight. Packs count as one source: all are read before any is read again, because their weights
    were applied when they were published.
    """
    sources, rows = job.data.of("train"), job.settings.steps * job.settings.global_batch
    if job.data.kind == "sft":
        return [Epochs("all packs", rows, sum(source.rows or 0 for source in sources), "packs")]
    if job.data.phases:  # weights are the samples that whole phases read
        length = job.settings.sequence_length
        return [
            Epochs(source_name(job.data, source), sum(source.weights) * length, source.tokens, "tokens")
            for source in sources
        ]
    weight = sum(sum(source.weights) for source in sources)
    tokens = rows * job.settings.sequence_length
    return [
        Epochs(source.dataset, tokens * sum(source.weights) / weight, source.tokens, "tokens") for source in sources
    ]


def _check_epochs(job: Job) -> list[str]:
    """A line per source. Raises InputError for a source that is read more often than `max_epochs`."""
    epochs, most = epochs_of(job), job.settings.max_epochs
    largest = max(epochs, key=lambda each: each.count)
    if most is not None and largest.count > most:
        over = sum(each.count > most for each in epochs)
        steps = int(job.settings.steps * most / largest.count)
        fewer = f"steps={steps} or fewer" if steps else "a smaller global_batch"
        raise InputError(
            f"{largest}, more than max_epochs={most:g} for {over} of {len(epochs)} source(s); set {fewer}, prepare "
            f"more data, or set max_epochs={math.ceil(largest.count)} (null for no limit)"
        )
    return [str(each) for each in epochs]


def _check_output(job: Job) -> list[str]:
    """The folder must be empty, hold this job, or a job that a dry run wrote; returns a line if the job is resumed."""
    place = absolute(job.output_dir)
    content = read_bytes(join(place, JOB))
    if content is None:
        if read_bytes(join(place, MANIFEST)) is not None:
            raise InputError(f"{place}: {MANIFEST} here belongs to a preparation; choose another --output-dir")
        return []
    earlier = job_of(content, join(place, JOB))
    system, path = filesystem(place)
    if not any(system.exists(join(path, name)) for name in (CHECKPOINTS, METRICS, TRAINING, MODEL)):
        return []
    changed = difference(_content(earlier), _content(job))
    if changed:
        differences = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in changed.items())
        raise InputError(
            f"{join(place, JOB)}: another training was started here: {differences}; choose another --output-dir, or delete this one"
        )
    return [f"{place}: this job resumes from its last checkpoint"]


def _content(job: Job) -> dict[str, Any]:
    """The settings and data that determine the result of a job."""
    data = {"content": job.data.made_from, "tokenizer": job.data.fingerprint}
    return {**job.settings.model_dump(exclude=RUNTIME_SETTINGS), "data": data}
