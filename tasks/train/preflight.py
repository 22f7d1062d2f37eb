"""Plan a training run and check it before any process starts: a mistake found here costs a second, not a reservation.

Each check raises InputError with the problem, the value, the location, and the remedy. Checks don't write files or load torch, and
read at most a few packs from token files. Only the training machine can check whether the model fits into its memory.

Initial weights of a different shape would fail only on the reserved machines. Weights trained with a different tokenizer would
not fail at all, although every id would mean a different string. So the tokenizer must be identical, and every field of
config.json that changes the computation must match the settings.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenmill.tasks.chat.template import ChatTemplate
from tokenmill.tasks.dataset.stored import StoredFileError, count_packs, pair_problem
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.pack.formats import find_template
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.runtime import in_threads
from tokenmill.tasks.shards.manifest import MANIFEST
from tokenmill.tasks.shards.receipt import difference
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.store import THREADS, read_bytes
from tokenmill.tasks.storage import absolute, filesystem, join
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .blocks import require_block_hashes
from .held_out import held_out
from .history import METRICS, TRAINING
from .job import CHECKPOINTS, JOB, MODEL, Job, TrainData, check_skipped, job_of, read_skip_list
from .launchers.launch import process_count, start_folder, start_place
from .order import require_packages, require_steps, sentence_on_order, source_name, with_quotas
from .prepared import (
    NOT_FOUND_HERE,
    ListedFile,
    content_digest,
    listed_files,
    prepared_data,
    prepared_manifest,
    vocabulary_of,
)
from .settings import RUNTIME_SETTINGS, ModelSettings, TrainSettings

# Tokens of each dataset in which trained tokens behind EOS are counted; a chat template writes about as many
# everywhere.
COUNTED_TOKENS = 1_000_000

# Launchers that start tokenmill's trainer; the others write files for other trainers.
OWN_LAUNCHERS = {"local", "slurm", "kubernetes"}


def plan_training(path: str, settings: TrainSettings, output_dir: str) -> Job:
    """Make the job of training on the preparation in `path`, with local places made absolute.

    Raises InputError when `path` doesn't contain training data. `check` finds out whether the job can run.
    """
    if settings.start_from is not None:
        settings = settings.model_copy(update={"start_from": start_place(settings.start_from)})
    skipped = read_skip_list(settings.skip_list) if settings.skip_list is not None else []
    data = with_quotas(prepared_data(path), settings.sequence_length, settings.global_batch)
    return Job(settings=settings, data=data, output_dir=absolute(output_dir), skipped=skipped)


def check(job: Job) -> list[str]:
    """Check a job. Returns lines to show before it starts, and raises InputError when it can't run."""
    settings, data = job.settings, job.data
    manifest = prepared_manifest(data.path)
    listed = listed_files(data.path, manifest)
    _check_data(job, manifest, content_digest(listed))
    if settings.launcher == "local":
        require_packages("train", ("torch", "megatron", "transformers"), ", or choose a launcher that trains elsewhere")
    _check_parallelism(job)
    _check_batch(settings)
    require_steps(data, settings)
    check_skipped(job.skipped, data.made_from, settings.steps)
    if settings.check_reads and data.kind == "sft":
        raise InputError("check_reads=true: packs are copied once before training; check them with tokenmill verify")
    for asked, name in ((settings.check_reads, "check_reads=true"), (job.skipped, "skip_list")):
        if asked and settings.launcher not in OWN_LAUNCHERS:
            raise InputError(f"{name}: launcher={settings.launcher} starts a different trainer; set launcher=local")
    if settings.check_reads:
        require_block_hashes(data)
    resumption = _check_output(job)
    epochs, most = epochs_of(job), settings.max_epochs
    largest = max(epochs, key=lambda each: each.count)
    if most is not None and largest.count > most:
        over = sum(each.count > most for each in epochs)
        steps = int(settings.steps * most / largest.count)
        fewer = f"steps={steps} or fewer" if steps else "a smaller global_batch"
        raise InputError(
            f"{largest}, more than max_epochs={most:g} for {over} of {len(epochs)} source(s); set {fewer}, prepare "
            f"more data, or set max_epochs={math.ceil(largest.count)} (null for no limit)"
        )
    if settings.launcher in OWN_LAUNCHERS:  # other trainers read ids and need no tokenizer
        find_exported_template(data, vocabulary_of(data))
    _check_file_sizes(data.path, listed, manifest)
    _check_initial_weights(job)
    return [*map(str, epochs), *_notes(job), *sentence_on_order(data, settings), *resumption]


def _check_data(job: Job, manifest: Manifest, content: str) -> None:
    """The data must be complete and as planned, every pack must fit into a row, or at least one dataset must fill one."""
    path, missing = job.data.path, manifest["missing"]
    if missing:
        raise InputError(
            f"{path}: published without {len(missing):,} of its shards, {missing[0]} among them; run the same "
            "preparation again without allow_partial"
        )
    if content != job.data.made_from:
        raise InputError(f"{path}: prepared again since this job was planned; start over to train on its new content")
    length, pack_size = job.settings.sequence_length, job.data.pack_size
    longest = max((source.tokens for source in job.data.of("train")), default=0)
    if not longest:
        raise InputError(
            f"{path}: the train split is empty; prepare datasets under 'datasets' or 'train', with a smaller holdout"
        )
    if pack_size is not None and length < pack_size - 1:
        raise InputError(
            f"sequence_length={length} is too short for packs with up to {pack_size} tokens, {pack_size - 1} of them "
            f"inputs; set sequence_length={pack_size}, or prepare with pack_size={length}"
        )
    if pack_size is None and longest <= length:
        raise InputError(
            f"sequence_length={length} needs {length + 1:,} tokens in one dataset, but the largest in the train split "
            f"of {path} has {longest:,}; set sequence_length={max(2, longest - 1)} or less, or prepare more data"
        )


def _check_file_sizes(path: str, listed: Sequence[ListedFile], manifest: Manifest) -> None:
    """Every listed file must exist with its recorded size.

    Only sizes, headers and footers are read, a request or two per file, so that 10,000 files of an object store take a minute.
    The store is not needed, so a copy of an output folder can be trained on without it. Only `tokenmill verify`, which reads
    everything, finds a changed byte.
    """
    dtype = np.dtype(manifest["tokenizer"].get("dtype", "int32"))

    def problem_of(file: ListedFile) -> str | None:
        if file.packs is None:
            return pair_problem(file.path, file.documents or 0, file.tokens or 0, file.held, dtype)
        try:
            rows = count_packs(file.path)
        except StoredFileError as error:
            return error.problem
        return None if rows == file.packs else f"{file.path}: {rows:,} packs instead of {file.packs:,}"

    if problems := [problem for problem in in_threads(problem_of, listed, THREADS) if problem]:
        raise InputError(
            f"{problems[0]}; {len(problems):,} of {len(listed):,} files are wrong: see all with `tokenmill verify {path}`, "
            "then run the same preparation again, which builds only the missing shards"
        )


def _notes(job: Job) -> Iterator[str]:
    """Yield lines on effects of data and settings that a user may not expect."""
    length = job.settings.sequence_length
    if job.data.kind == "pretrain":
        for source in job.data.of("valid") if job.settings.validate_every is not None else ():
            if source.tokens <= length:
                yield f"{source.dataset}: {source.tokens:,} tokens of the validation split, repeated to fill rows of {length:,}"
        return
    if job.settings.launcher != "megatron-bridge":
        return
    trained = cleared = 0
    for _, batch in held_out(job.data, "train", COUNTED_TOKENS):
        trained += int(batch.loss.sum())
        # Before its #5213, Megatron-Bridge clears the loss where the input is EOS.
        cleared += int(batch.loss[1:][batch.ids[:-1] == job.data.eos].sum())  # the first of a sequence has no loss
    if cleared:
        yield (
            f"{cleared:,} of {trained:,} trained tokens ({cleared / trained:.1%}, of the first {COUNTED_TOKENS:,} tokens per "
            "dataset) follow an EOS: Megatron-Bridge 0.6.2 and older omit them from the loss (NVIDIA-NeMo/Megatron-Bridge#5213); "
            "use 0.7 or newer, or launcher=local"
        )


def _check_parallelism(job: Job) -> None:
    """Lengths, and the parts of the model, must be divisible by the processes that share them.

    Sequences are split into two pieces per process of `context`, one from either end; with `sequence`, into one per process of
    `context` and `tensor`.
    """
    model, parallel, launcher = job.settings.model, job.settings.parallel, job.settings.launcher
    if launcher in OWN_LAUNCHERS and (parallel.context > 1 or parallel.sequence):
        asked = f"parallel.context={parallel.context}" if parallel.context > 1 else "parallel.sequence=true"
        raise InputError(
            f"{asked}: launcher={launcher} does not split sequences; remove it, or set launcher=megatron-bridge"
        )
    multiple = math.lcm(
        2 * parallel.context if parallel.context > 1 else 1,
        parallel.context * parallel.tensor if parallel.sequence else 1,
    )
    asked = f"parallel.context={parallel.context} and tensor={parallel.tensor} with sequence={parallel.sequence}"
    length, padded = job.settings.sequence_length, job.data.pad_seq_to_mult
    if padded is not None and padded % multiple:
        raise InputError(
            f"{asked}: sequences must be padded to a multiple of {multiple}, and {job.data.path} has "
            f"pad_seq_to_mult={padded}; prepare it again with pad_seq_to_mult={multiple}"
        )
    if padded is None and length % multiple:
        raise InputError(
            f"{asked}: sequence_length={length} must be a multiple of {multiple}; set it to {-(-length // multiple) * multiple}"
        )
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
    """How often a source is read."""

    source: str
    drawn: float  # tokens or packs
    held: int  # tokens or packs in it
    unit: str

    @property
    def count(self) -> float:
        return self.drawn / self.held

    def __str__(self) -> str:
        return f"{self.source}: {self.count:.2f} epochs ({self.drawn:,.0f} {self.unit} drawn, of {self.held:,})"


def epochs_of(job: Job) -> list[Epochs]:
    """Return how often the whole training run reads each source of the train split.

    Documents are drawn by weight. Packs count as one source: all are read before any is read again, because their weights
    were applied when they were published.
    """
    sources, rows = job.data.of("train"), job.settings.steps * job.settings.global_batch
    if job.data.kind == "sft":
        return [Epochs("all packs", rows, sum(source.rows or 0 for source in sources), "packs")]
    length = job.settings.sequence_length
    # With phases, weights are the samples that whole phases read.
    each = length if job.data.phases else rows * length / sum(sum(source.weights) for source in sources)
    return [
        Epochs(source_name(job.data, source), sum(source.weights) * each, source.tokens, "tokens") for source in sources
    ]


def _check_output(job: Job) -> list[str]:
    """The folder must be empty, hold this job, or a job that a dry run wrote; returns a line if the job is resumed."""
    place = absolute(job.output_dir)
    content = read_bytes(join(place, JOB))
    if content is None:
        if read_bytes(join(place, MANIFEST)) is not None:
            raise InputError(f"{place}: {MANIFEST} here belongs to a preparation; choose a different --output-dir")
        return []
    earlier = job_of(content, join(place, JOB))
    system, path = filesystem(place)
    if not any(system.exists(join(path, name)) for name in (CHECKPOINTS, METRICS, TRAINING, MODEL)):
        return []

    def content_of(job: Job) -> dict[str, Any]:
        data = {"content": job.data.made_from, "tokenizer": job.data.fingerprint}
        return {**job.settings.model_dump(exclude=RUNTIME_SETTINGS), "data": data}

    changed = difference(content_of(earlier), content_of(job))
    if changed:
        differences = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in changed.items())
        raise InputError(
            f"{join(place, JOB)}: a different training run was started here: {differences}; choose a different --output-dir, or delete this one"
        )
    return [f"{place}: this job resumes from its last checkpoint"]


def _check_initial_weights(job: Job) -> None:
    """Raises InputError unless `start_from`, if given, has the data's tokenizer and the model's shape.

    A model on the hub is fetched for this, as the trainer would do.
    """
    start = job.settings.start_from
    if start is None:
        return
    training = Path(start).expanduser()
    if (training / JOB).is_file():
        if not (training / MODEL / "config.json").is_file():
            raise InputError(
                f"start_from={start}: this training run hasn't written its {MODEL} yet; let it finish first"
            )
        earlier = job_of((training / JOB).read_bytes(), str(training / JOB))
        fingerprint, config = earlier.data.fingerprint, None
        before, model = earlier.settings.model.model_dump(), job.settings.model.model_dump()
        differences = [
            f"model.{name} is {before[name]}, not {model[name]}" for name in model if before[name] != model[name]
        ]
    else:
        fingerprint, config = _tokenizer_and_config(start)
        differences = list(_config_differences(config, job.settings.model))
    if fingerprint != job.data.fingerprint:
        raise InputError(
            f"start_from={start}: its tokenizer is {fingerprint}, but {job.data.path} was prepared with "
            f"{job.data.tokenizer['model']!r}, which is {job.data.fingerprint}; prepare the data with the model's tokenizer, or "
            "use a model trained with the data's"
        )
    if config is not None:
        rows, size, model = config.get("vocab_size", 0), job.data.vocabulary_size, job.settings.model
        if rows < size:
            raise InputError(
                f"start_from={start}: its vocab_size is {rows}, but the data has ids up to {size - 1}; use a model whose "
                "embedding has a row for each of them"
            )
        if rows > model.vocabulary(size):
            raise InputError(
                f"start_from={start}: its vocab_size is {rows}, but model.vocabulary_multiple={model.vocabulary_multiple} "
                f"pads the data's {size} ids to {model.vocabulary(size)}; set model.vocabulary_multiple={rows}"
            )
    if differences:
        raise InputError(
            f"start_from={start}: not the model of the settings: {'; '.join(differences)}; set model to match these weights"
        )


def _tokenizer_and_config(start: str) -> tuple[str, dict[str, Any]]:
    """The fingerprint of a model's tokenizer, and its config.json."""
    try:
        folder = start_folder(start)
    except InputError as error:
        raise InputError(f"start_from: {str(error).removeprefix('model: ')}") from error
    try:
        fingerprint = find_vocabulary(TokenizerSource(model=str(folder))).fingerprint
    except InputError as error:
        raise InputError(
            f"start_from={start}: its tokenizer can't be compared with the data's tokenizer: {error}; put the model's "
            "tokenizer.json next to its config.json"
        ) from error
    place = folder / "config.json"
    try:
        return fingerprint, dict(orjson.loads(place.read_bytes()))
    except (ValueError, TypeError) as error:
        raise InputError(f"start_from: {place} is not a JSON object: {error}; save the model again") from error


def _config_differences(config: Mapping[str, Any], model: ModelSettings) -> Iterator[str]:
    """The fields of config.json that make the model compute differently from `model`, given the defaults of `LlamaConfig`."""
    known = {name: value for name, value in config.items() if value is not None}
    rope = known.get("rope_parameters") or {}
    scaled = rope or known.get("rope_scaling") or {}
    head = model.hidden // model.heads
    for name, found, wanted, setting in (
        ("model_type", known.get("model_type"), "llama", None),
        ("hidden_size", known.get("hidden_size"), model.hidden, "hidden"),
        ("num_hidden_layers", known.get("num_hidden_layers"), model.layers, "layers"),
        ("num_attention_heads", known.get("num_attention_heads"), model.heads, "heads"),
        ("num_key_value_heads", known.get("num_key_value_heads", known.get("num_attention_heads")), model.key_value_heads, "key_value_heads"),
        ("head_dim", known.get("head_dim", head), head, "hidden"),
        ("intermediate_size", known.get("intermediate_size"), model.feed_forward, "feed_forward"),
        ("rope_theta", rope.get("rope_theta", known.get("rope_theta", 10_000.0)), model.rope_base, "rope_base"),
        ("rope_type", scaled.get("rope_type", scaled.get("type", "default")), "default", None),
        ("rms_norm_eps", known.get("rms_norm_eps", 1e-6), model.norm_epsilon, "norm_epsilon"),
        ("tie_word_embeddings", known.get("tie_word_embeddings", False), model.tied_embeddings, "tied_embeddings"),
        ("hidden_act", known.get("hidden_act", "silu"), "silu", None),
        ("attention_bias", known.get("attention_bias", False), False, None),
        ("mlp_bias", known.get("mlp_bias", False), False, None),
    ):  # fmt: skip
        if found != wanted:
            remedy = f"but model.{setting} is {wanted!r}" if setting else f"but only {wanted!r} is supported"
            yield f"{name} is {found!r}, {remedy}"


def exported_files(data: TrainData) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json for a model trained on `data`, by name; with the chat template of packs.

    Raises InputError when the tokenizer or the chat template of the preparation isn't found.
    """
    vocabulary = vocabulary_of(data)
    names = {number: token for token, number in vocabulary.controls.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names.get(-1 if vocabulary.bos is None else vocabulary.bos),
        "eos_token": names.get(-1 if vocabulary.eos is None else vocabulary.eos),
        "chat_template": find_exported_template(data, vocabulary),
    }
    given = {name: value for name, value in config.items() if value is not None}
    return {"tokenizer.json": vocabulary.definition(), "tokenizer_config.json": orjson.dumps(given)}


def find_exported_template(data: TrainData, vocabulary: Vocabulary) -> str | None:
    """Return the chat template of the conversations; the tokenizer's own for documents. Raises InputError if it isn't found."""
    if data.kind != "sft":
        return vocabulary.chat_template
    settings = parse(SftSettings, prepared_manifest(data.path)["settings"], data.path)
    try:
        template = find_template(settings, vocabulary)
    except InputError as error:
        raise InputError(
            f"{data.path}: was prepared with a chat template that is not found here: {error}; {NOT_FOUND_HERE}"
        ) from error
    return template.source if isinstance(template, ChatTemplate) else None
