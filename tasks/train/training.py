"""Train, as one of the processes that train together: read, step, report; validate and save at intervals.

It resumes from the newest checkpoint of the job's folder, trains to the last step, and exports the model in the format of
Hugging Face's libraries. A thread reads the rows of the next step while the device computes, so waiting for data shows only if
reading is slower than training. A step is timed between two synchronizations of the device.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.storage import is_local

from . import checkpoints
from .blocks import block_checks, check_places_of_documents
from .engine import Losses, World, joined
from .events import Event, Exported, Saved, Started, TrainStep, Validated, emit
from .job import MODEL, READ_SPLITS, Job, contents_of, skipped_steps
from .launchers.launch import start_folder
from .model import configuration, fresh, parameters, publish_model, stored
from .order import fetch_indices, prepared_indices
from .preflight import exported_files
from .rows import (
    DocumentRows,
    PackedRows,
    TrainBatch,
    TrainedRows,
    TrainRows,
    document_rows,
    flat_packs,
    lay_out,
    layout_folder,
    remove_torn_indices,
)  # fmt: skip
from .samples import step_digest, step_sums
from .settings import ModelSettings, OptimizerSettings, Precision, TrainSettings

if TYPE_CHECKING:  # megatron-core takes seconds to import
    from .megatron import MegatronEngine


# Dense bfloat16 FLOPS from NVIDIA's data sheets, by the words in a device's name; the entry with the most words
# applies. Figures that a sheet gives only with 2:4 sparsity are halved.
PEAK_FLOPS = {
    "A100": 312e12, "H100": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200": 989e12, "H200 NVL": 835e12,
    "L40": 181e12, "L40S": 362e12, "L4": 121e12, "B200": 2250e12,
}  # fmt: skip


def run(job: Job) -> None:
    """Train. Raises InputError and RunError, with messages for the user."""
    settings, model = job.settings, job.settings.model
    vocabulary = model.vocabulary(job.data.vocabulary_size)
    with joined(settings.device) as world:
        exported = exported_files(job.data) if world.first else {}  # fail now, not after the last step
        precision: Precision = settings.precision or ("bfloat16" if world.device.type == "cuda" else "float32")
        weights = (
            fresh(model, vocabulary, settings.seed)
            if settings.start_from is None
            else stored(start_folder(settings.start_from), model, vocabulary)
        )
        from .megatron import MegatronEngine

        engine = MegatronEngine(settings, precision, world, vocabulary, weights)
        rows, validation = _rows(job, world)
        rows = TrainedRows.of(rows, job.skipped) if job.skipped else rows
        done = checkpoints.resume(engine, world, job.output_dir)
        unsaved: list[Event] = []

        def report(event: Event) -> None:
            if world.first:
                emit(event)
                unsaved.append(event)  # the next checkpoint holds it, too

        def save(step: int) -> str:
            folder = checkpoints.save(engine, world, job.output_dir, step, settings.keep_checkpoints, unsaved)
            unsaved.clear()
            return folder

        report(
            Started(
                step=done, steps=settings.steps, parameters=parameters(model, vocabulary), device=world.device_name(),
                processes=world.size, engine="megatron-core",
            )
        )  # fmt: skip
        peak = peak_flops(world.device_name())
        training = Training(
            settings=settings, engine=engine, world=world, rows=rows, validation=validation,
            flops_per_token=flops_per_token(model, vocabulary, settings.sequence_length),
            peak_flops=peak * world.size if peak else None, report=report, save=save,
            skipped=skipped_steps(job.skipped) if job.skipped else None,
        )  # fmt: skip
        train(training, done)
        final = engine.weights()
        if world.first:
            config = configuration(model, vocabulary, settings.sequence_length, job.data.eos)
            publish_model(f"{job.output_dir}/{MODEL}", config, final, exported)
            emit(Exported(path=f"{job.output_dir}/{MODEL}"))
        world.wait()


def _rows(job: Job, world: World) -> tuple[DocumentRows | PackedRows, TrainRows | None]:
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


@dataclass(frozen=True, slots=True)
class Training:
    """The parts of a training run."""

    settings: TrainSettings
    engine: "MegatronEngine"
    world: World
    rows: TrainRows
    validation: TrainRows | None
    flops_per_token: float  # of the model
    peak_flops: float | None  # of all devices, None if unknown
    report: Callable[[Event], None]
    save: Callable[[int], str]
    skipped: frozenset[int] | None = None  # steps that read their rows without an update; None without a skip list


def train(training: Training, done: int) -> None:
    """Run all steps after the first `done`. Raises RunError when the loss is no longer finite."""
    settings, engine, world = training.settings, training.engine, training.world

    def read(rows: TrainRows, number: int) -> list[TrainBatch]:
        return [rows.batch(numbers) for numbers in engine.shape.numbers(number)]

    if done >= settings.steps:  # an earlier start ended between its last checkpoint and its model
        return
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(read, training.rows, done)
        for step in range(done + 1, settings.steps + 1):
            world.synchronize()
            began = time.perf_counter()
            batches = ahead.result()
            if step < settings.steps:
                ahead = reader.submit(read, training.rows, step)  # while the device computes
            waited = time.perf_counter() - began
            losses, norm = Losses(0.0, 0), 0.0
            # A step is omitted by its number, or because all of its documents are: without labels there isn't a loss.
            skipped = training.skipped is not None and (
                step in training.skipped
                or not world.reduced([sum(int(batch.loss_mask.sum()) for batch in batches)], "sum")[0]
            )
            if not skipped:
                losses, norm = engine.step(batches, learning_rate(step, settings.steps, settings.optimizer))
            world.synchronize()
            _report(training, step, batches, losses, norm, time.perf_counter() - began, waited)
            last = step == settings.steps
            if training.validation and settings.validate_every and (last or step % settings.validate_every == 0):
                numbers = range(settings.validation_batches)
                found = [engine.losses(read(training.validation, number)) for number in numbers]
                loss = Losses(sum(each.total for each in found), sum(each.tokens for each in found)).mean
                training.report(Validated(step=step, loss=loss))
            if last or (settings.checkpoint_every and step % settings.checkpoint_every == 0):
                training.report(Saved(step=step, path=training.save(step)))


def _report(
    training: Training, step: int, batches: Sequence[TrainBatch], losses: Losses, norm: float, seconds: float, waited: float
) -> None:  # fmt: skip
    if not math.isfinite(losses.total) or not math.isfinite(norm):
        raise RunError(
            f"step {step}: the loss is {losses.mean} and the gradient's norm {norm}; lower optimizer.learning_rate or raise "
            "optimizer.warmup_steps, and check the data of this step"
        )
    settings, world = training.settings, training.world
    share = training.engine.shape.replicas / world.size  # processes that share a replica read the same rows
    (padding,) = world.reduced([sum(batch.padding for batch in batches) * share], "sum")
    longest, waiting, memory = world.reduced([seconds, waited, world.memory()], "max")
    tokens = settings.global_batch * settings.sequence_length
    flops = tokens * training.flops_per_token / longest
    training.report(
        TrainStep(
            step=step, loss=losses.mean, learning_rate=learning_rate(step, settings.steps, settings.optimizer),
            gradient_norm=norm, tokens=tokens, loss_tokens=losses.tokens, padding=round(padding), seconds=longest,
            waited=waiting, mfu=flops / training.peak_flops if training.peak_flops else None, memory=int(memory),
            read=_digest_of_reads(training, step, batches),
        )
    )  # fmt: skip


def _digest_of_reads(training: Training, step: int, batches: Sequence[TrainBatch]) -> str | None:
    """What all replicas have read in a step, None if the rows lack hashes.

    Raises RunError when processes that share a replica have read different rows.
    """
    hashes, shape = np.concatenate([batch.reads for batch in batches]), training.engine.shape
    if not len(hashes):
        return None
    positions = np.concatenate(shape.numbers(step - 1)) % training.settings.global_batch
    sums = np.array(step_sums(hashes, positions), np.uint64).view(np.int64).tolist()
    replicas: dict[int, tuple[int, int]] = {}
    for replica, first, second in training.world.gathered([shape.replica, *sums]):
        if replicas.setdefault(replica, (first, second)) != (first, second):
            raise RunError(
                f"step {step}: processes of replica {replica} read different rows; check that they see the same data"
            )
    return step_digest(replicas.values())


def learning_rate(step: int, steps: int, settings: OptimizerSettings) -> float:
    """Return the learning rate of step `step` of `steps`, counted from 1: linear warm-up to the peak, then decay."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    if settings.decay == "constant":
        return settings.learning_rate
    share = 1 - done if settings.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.minimum_learning_rate + share * (settings.learning_rate - settings.minimum_learning_rate)


def peak_flops(device: str) -> float | None:
    """Return the dense bfloat16 FLOPS of a device by the name its driver gives it; None if unlisted, or a MIG slice."""
    words = {*re.split(r"[\s-]+", device)}
    found = [name for name in PEAK_FLOPS if {*name.split()} <= words]
    return PEAK_FLOPS[max(found, key=len)] if found and "MIG" not in words else None


def flops_per_token(model: ModelSettings, vocabulary: int, sequence_length: int) -> float:
    """FLOPs of a forward and backward pass per token; a multiplication with its addition counts two.

    `vocabulary` is padded already. All matrix products count, in attention those that a causal model needs: (sequence_length +
    1) / 2 tokens on average. Packed rows need less, as their sequences do not attend to each other. Norms, activations, rotary
    positions and recomputation do not count.
    """
    head = model.hidden // model.heads
    projections = 2 * model.hidden * head * (model.heads + model.key_value_heads)
    attention = 2 * model.heads * head * (sequence_length + 1) / 2
    feed_forward = 3 * model.hidden * model.feed_forward
    forward = model.layers * (projections + attention + feed_forward) + model.hidden * vocabulary
    return 3 * 2 * forward  # the backward pass costs twice the forward pass
