"""What is checked before a process is started: a mistake found here costs a second, one found by a trainer a reservation.

Each check is a function that refuses one bad case with what is wrong, which value, where, and what to do. Nothing is written
and nothing is imported that computes; files are looked at, not read (see presence.py). What only the trainer's machine can
tell, such as whether a model fits into a GPU, is left to it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.manifest import MANIFEST
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, filesystem, join

from .history import METRICS, TRAINING
from .job import CHECKPOINTS, JOB, MODEL, Job
from .prepared import content_digest, listed_files, prepared_manifest, tokenizer_is_here
from .presence import every_file_is_whole
from .processes import process_count
from .settings import TrainSettings
from .start_check import job_of, weights_to_begin_with_fit

WHERE_NOT_WHAT = {
    *("launcher", "nodes", "processes", "retries"),
    *("checkpoint_every", "keep_checkpoints", "validate_every", "validation_batches", "max_epochs"),
}
"""Settings that say where training runs and what is looked at on the way: a job goes on from its checkpoint whatever they
are by then. Steps are not among them, as the learning rate decays over all of them, and neither is the device, as it decides
the precision."""

PACKAGES = ("torch", "megatron", "transformers")
"""What a trainer imports: both engines read documents through megatron-core."""

OWN_LAUNCHERS = {"local", "slurm", "kubernetes"}
"""Those that start the engines of this room; the others write files for trainers of others."""


def check(job: Job) -> list[str]:
    """What is worth knowing before `job` is started, in lines. Raises InputError when it cannot be."""
    manifest = prepared_manifest(job.data.path)
    nothing_was_left_out(job, manifest)
    listed = listed_files(job.data.path, manifest)
    if content_digest(listed) != job.data.made_from:
        raise InputError(
            f"{job.data.path}: prepared anew since this job was planned; start again to train on what it holds now"
        )
    there_is_something_to_train_on(job)
    rows_are_long_enough(job)
    engine_is_installed(job)
    engine_can_be_cut(job)
    rows_can_be_cut(job)
    model_can_be_cut(job)
    processes_share_the_batch(job.settings)
    resumption = output_is_free_or_of_this_job(job)
    epochs = no_source_is_repeated_too_often(job)
    tokenizer_can_be_exported(job)
    every_file_is_whole(job.data.path, listed, manifest)
    weights_to_begin_with_fit(job)
    return [*epochs, *_repeated_in_validation(job), *resumption]


def nothing_was_left_out(job: Job, manifest: Mapping[str, Any]) -> None:
    """Raises InputError for a partial preparation."""
    missing = manifest["missing"]
    if missing:
        raise InputError(
            f"{job.data.path}: published without {len(missing):,} of its shards, {missing[0]} among them; run the same "
            "preparation again without allow_partial"
        )


def there_is_something_to_train_on(job: Job) -> None:
    """Raises InputError when nothing is in the train split."""
    if not any(source.tokens for source in job.data.of("train")):
        raise InputError(
            f"{job.data.path}: nothing is in the train split; prepare data sets under 'datasets' or 'train', and hold less "
            "of them out"
        )


def rows_are_long_enough(job: Job) -> None:
    """Raises InputError when a pack does not fit into a row, or no text fills one."""
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
            f"sequence_length={length} takes {length + 1:,} tokens of one data set, and {job.data.path} has {longest:,} at "
            f"most in the train split; set sequence_length={max(2, longest - 1)} or less, or prepare more data"
        )


def _repeated_in_validation(job: Job) -> Iterator[str]:
    """The data sets of the valid split that do not fill a row."""
    length = job.settings.sequence_length
    if job.data.kind == "sft" or job.settings.validate_every is None:
        return
    for source in job.data.of("valid"):
        if source.tokens <= length:
            yield f"{source.dataset}: {source.tokens:,} tokens of the valid split, repeated to fill rows of {length:,}"


def engine_is_installed(job: Job) -> None:
    """Raises InputError where this machine is to train and lacks a package for it."""
    if job.settings.launcher != "local":
        return
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise InputError(
            f"engine={job.settings.engine}: {' and '.join(missing)} must be installed: pip install 'tokenmill[train]', or "
            "choose a launcher that trains elsewhere"
        )


def engine_can_be_cut(job: Job) -> None:
    """Raises InputError for a kind of parallelism that the engine, or any engine of this room, has not."""
    settings, parallel = job.settings, job.settings.parallel
    if settings.launcher in OWN_LAUNCHERS and (parallel.context > 1 or parallel.sequence):
        asked = f"parallel.context={parallel.context}" if parallel.context > 1 else "parallel.sequence=true"
        raise InputError(
            f"{asked}: launcher={settings.launcher} does not cut sequences; leave it out, or hand the job to "
            "launcher=megatron-bridge"
        )
    if settings.engine != "transformers":
        return
    for name, value in (("parallel.tensor", parallel.tensor), ("parallel.pipeline", parallel.pipeline)):
        if value > 1:
            raise InputError(f"{name}={value}: engine=transformers keeps a model whole; use engine=megatron-core")
    if settings.optimizer.distributed:
        raise InputError("optimizer.distributed=true: engine=transformers does not share it; use engine=megatron-core")


def rows_can_be_cut(job: Job) -> None:
    """Raises InputError when sequences are to be cut into pieces that their lengths are no multiple of."""
    multiple = row_multiple(job.settings)
    parallel = job.settings.parallel
    asked = f"parallel.context={parallel.context} and tensor={parallel.tensor} with sequence={parallel.sequence}"
    padded = job.data.pad_seq_to_mult
    if padded is not None and padded % multiple:
        raise InputError(
            f"{asked}: sequences must be padded to a multiple of {multiple}, and {job.data.path} has "
            f"pad_seq_to_mult={padded}; prepare it again with pad_seq_to_mult={multiple}"
        )
    if padded is None and job.settings.sequence_length % multiple:
        raise InputError(
            f"{asked}: sequence_length={job.settings.sequence_length} must be a multiple of {multiple}; set it to "
            f"{-(-job.settings.sequence_length // multiple) * multiple}"
        )


def row_multiple(settings: TrainSettings) -> int:
    """What the length of a sequence must be a multiple of, in tokens: two pieces for each process of `context`, which takes
    one from either end; with `sequence`, as much for each process of `context` and `tensor`.
    """
    parallel = settings.parallel
    of_context = 2 * parallel.context if parallel.context > 1 else 1
    of_sequence = parallel.context * parallel.tensor if parallel.sequence else 1
    return math.lcm(of_context, of_sequence)


def model_can_be_cut(job: Job) -> None:
    """Raises InputError when a part of the model cannot be shared evenly."""
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
                f"parallel.{setting}={pieces}: {name}={value:,} cannot be shared evenly by {pieces} processes; choose a "
                f"divisor of it, or a {remedy} that is a multiple of {pieces}"
            )


def processes_share_the_batch(settings: TrainSettings) -> None:
    """Raises InputError when processes are left over, or rows of a batch."""
    each = process_count(settings)
    total, model = settings.nodes * each, settings.model_processes
    if total % model:
        found = "" if settings.processes else " (one per GPU found here, or one)"
        raise InputError(
            f"{settings.nodes} machine(s) of {each} process(es){found} cannot be shared evenly by replicas of {model} "
            f"(parallel.tensor x pipeline x context); set nodes and processes to make a multiple of {model}"
        )
    at_once = settings.micro_batch * (total // model)
    if settings.global_batch % at_once:
        raise InputError(
            f"global_batch={settings.global_batch} is no multiple of {at_once}, the micro_batch={settings.micro_batch} of "
            f"{total // model} replica(s); set global_batch={-(-settings.global_batch // at_once) * at_once}, or a smaller "
            "micro_batch"
        )


def tokenizer_can_be_exported(job: Job) -> None:
    """Raises InputError where the trained model is to be written with the data's tokenizer and this is not found.

    Trainers of others are given ids and a vocabulary's size, and know of no tokenizer.
    """
    if job.settings.launcher in OWN_LAUNCHERS:
        tokenizer_is_here(job.data)


@dataclass(frozen=True, slots=True)
class Epochs:
    """How often a source is read: `drawn` of the `held` tokens or packs that it has."""

    source: str
    drawn: float
    held: int
    unit: str

    @property
    def often(self) -> float:
        """Times that all of it is read."""
        return self.drawn / self.held

    def __str__(self) -> str:
        return f"{self.source}: {self.often:.2f} epochs ({self.drawn:,.0f} {self.unit} drawn, it has {self.held:,})"


def epochs_of(job: Job) -> list[Epochs]:
    """How often each source of the train split is read in all steps.

    Texts are drawn by weight. Packs are all read once before any is read again, as weights came true when they were
    published, so all data sets are one source.
    """
    sources, rows = job.data.of("train"), job.settings.steps * job.settings.global_batch
    if job.data.kind == "sft":
        return [Epochs("all packs", rows, sum(source.rows or 0 for source in sources), "packs")]
    weight = sum(sum(source.weights) for source in sources)
    tokens = rows * job.settings.sequence_length
    return [
        Epochs(source.dataset, tokens * sum(source.weights) / weight, source.tokens, "tokens") for source in sources
    ]


def no_source_is_repeated_too_often(job: Job) -> list[str]:
    """A line per source. Raises InputError when one is read more often than `max_epochs`."""
    epochs, most = epochs_of(job), job.settings.max_epochs
    often = max(epochs, key=lambda each: each.often)
    if most is not None and often.often > most:
        over = sum(each.often > most for each in epochs)
        steps = int(job.settings.steps * most / often.often)
        fewer = f"steps={steps} or fewer" if steps else "a smaller global_batch"
        raise InputError(
            f"{often}, more than max_epochs={most:g}, and so with {over} of {len(epochs)} source(s); set {fewer}, prepare "
            f"more data, or set max_epochs={math.ceil(often.often)} (null for any number)"
        )
    return [str(each) for each in epochs]


def output_is_free_or_of_this_job(job: Job) -> list[str]:
    """A line where the job was begun before. Raises InputError when the folder holds anything else.

    A job that was written for review only, by a dry run, may be replaced by another.
    """
    place = absolute(job.output_dir)
    content = read_bytes(join(place, JOB))
    if content is None:
        if read_bytes(join(place, MANIFEST)) is not None:
            raise InputError(
                f"{place}: its {MANIFEST} is that of a preparation; give training an --output-dir of its own"
            )
        return []
    earlier = job_of(content, join(place, JOB))
    if not _was_begun(place):
        return []
    differences = list(_differences(job, earlier))
    if differences:
        raise InputError(
            f"{join(place, JOB)}: another training was begun there: {'; '.join(differences)}; choose another --output-dir, "
            "or delete this one"
        )
    return [f"{place}: this job was begun before, and goes on from its last checkpoint"]


def _was_begun(place: str) -> bool:
    """Whether something of a training is in the folder, beside what a dry run writes."""
    system, path = filesystem(place)
    return any(system.exists(join(path, name)) for name in (CHECKPOINTS, METRICS, TRAINING, MODEL))


def _differences(job: Job, earlier: Job) -> Iterator[str]:
    now, before = _deciding(job), _deciding(earlier)
    return (f"{name} was {before[name]!r}, now {now[name]!r}" for name in now if now[name] != before[name])


def _deciding(job: Job) -> dict[str, Any]:
    """What decides the result, by dotted name."""
    content = {"content": job.data.made_from, "tokenizer": job.data.fingerprint}
    return _flat({**job.settings.model_dump(exclude=WHERE_NOT_WHAT), "data": content})


def _flat(values: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{within}{name}.") if isinstance(value, dict) else {f"{within}{name}": value}
    return flat
