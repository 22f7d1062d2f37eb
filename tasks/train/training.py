"""Train, as one of the processes that train together.

It resumes from the newest checkpoint of the job's folder, trains to the last step, and exports the model in the format of
Hugging Face's libraries.
"""

from dataclasses import replace
from functools import partial
from typing import cast

from tokenmill.tasks.storage import is_local

from . import checkpoints
from .blocks import block_checks, check_places_of_documents
from .engine import Engine, World, joined
from .events import Event, Exported, Started, emit
from .initial_weights import start_folder
from .job import MODEL, READ_SPLITS, Job, contents_of
from .loop import Training, flops_per_token, peak_flops, train
from .masked import TrainedRows
from .model import Weights, configuration, fresh, parameters, publish_model, stored
from .order import fetch_indices, prepared_indices
from .rows import DocumentRows, PackedRows, Rows, document_rows, flat_packs, lay_out, layout_folder, remove_torn_indices
from .settings import Precision
from .skips import skipped_steps
from .tokenizer_files import tokenizer_files


def run(job: Job) -> None:
    """Train. Raises InputError and RunError, with messages for the user."""
    with joined(job.settings.device) as world:
        exported = tokenizer_files(job.data) if world.first else {}  # fail now, not after the last step
        precision: Precision = job.settings.precision or ("bfloat16" if world.device.type == "cuda" else "float32")
        engine = _engine(job, world, precision)
        rows, validation = _rows(job, world)
        rows = TrainedRows.of(rows, job.skipped) if job.skipped else rows
        unsaved: list[Event] = []
        done = checkpoints.resume(engine, world, job.output_dir)
        model, vocabulary = job.settings.model, _vocabulary(job)
        report = partial(_report, world, unsaved)
        report(
            Started(
                step=done, steps=job.settings.steps, parameters=parameters(model, vocabulary),
                device=world.device_name(), processes=world.size, engine=job.settings.engine,
            )
        )  # fmt: skip
        peak = peak_flops(world.device_name())
        training = Training(
            settings=job.settings, engine=engine, world=world, rows=rows, validation=validation,
            flops_per_token=flops_per_token(model, vocabulary, job.settings.sequence_length),
            peak_flops=peak * world.size if peak else None,
            report=report, save=partial(_save, engine, world, job, unsaved),
            skipped=skipped_steps(job.skipped) if job.skipped else None,
        )  # fmt: skip
        train(training, done)
        weights = engine.weights()
        if world.first:
            config = configuration(model, vocabulary, job.settings.sequence_length, job.data.eos)
            publish_model(f"{job.output_dir}/{MODEL}", config, weights, exported)
            emit(Exported(path=f"{job.output_dir}/{MODEL}"))
        world.wait()


def _report(world: World, unsaved: list[Event], event: Event) -> None:
    """Report an event once, and keep it for the next checkpoint."""
    if world.first:
        emit(event)
        unsaved.append(event)


def _vocabulary(job: Job) -> int:
    return job.settings.model.vocabulary(job.data.vocabulary_size)


def _engine(job: Job, world: World, precision: Precision) -> Engine:
    settings, vocabulary = job.settings, _vocabulary(job)
    weights = _weights(job)
    if settings.engine == "transformers":
        from .plain import PlainEngine

        config = configuration(settings.model, vocabulary, settings.sequence_length, job.data.eos)
        return PlainEngine(settings, precision, world, config, weights)
    from .megatron import MegatronEngine

    return MegatronEngine(settings, precision, world, vocabulary, weights)


def _weights(job: Job) -> Weights:
    settings, vocabulary = job.settings, _vocabulary(job)
    if settings.start_from is None:
        return fresh(settings.model, vocabulary, settings.seed)
    return stored(start_folder(settings.start_from), settings.model, vocabulary)


def _rows(job: Job, world: World) -> tuple[DocumentRows | PackedRows, Rows | None]:
    settings, data = job.settings, job.data
    folder = f"{job.output_dir}/cache"
    if data.kind == "sft":
        return _packs(job, world, "train", folder), _packs(job, world, "valid", folder) if data.of("valid") else None
    validated = settings.global_batch * settings.validation_batches if settings.validate_every else 0
    sizes = (settings.steps * settings.global_batch, validated)
    if world.first:
        remove_torn_indices(f"{folder}/indices")
    for split, size in zip(READ_SPLITS, sizes, strict=True):
        stored = prepared_indices(data, split, settings.sequence_length, size, settings.seed)
        if world.first and stored and not is_local(stored):
            fetch_indices(stored, f"{folder}/indices")
    world.wait()
    if settings.check_reads:
        check_places_of_documents(data)
    found = document_rows(data, settings.sequence_length, sizes, settings.seed, folder)
    if settings.check_reads:
        found = [
            rows and replace(rows, checks=block_checks(data, split, rows.samples))
            for split, rows in zip(READ_SPLITS, found, strict=True)
        ]
    return cast("DocumentRows", found[0]), found[1]


def _packs(job: Job, world: World, split: str, folder: str) -> PackedRows:
    place = layout_folder(job.data, split, folder)
    if world.first:
        lay_out([file for source in job.data.of(split) for file in source.files], place)
    world.wait()
    contents = " ".join(contents_of(job.data, split))
    return PackedRows(flat_packs(place), job.settings.sequence_length, job.data.eos or 0, job.settings.seed, contents)


def _save(engine: Engine, world: World, job: Job, unsaved: list[Event], step: int) -> str:
    folder = checkpoints.save(engine, world, job.output_dir, step, job.settings.keep_checkpoints, unsaved)
    unsaved.clear()
    return folder
