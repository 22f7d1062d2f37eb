"""A training, in one process of those that train together.

It goes on from the newest checkpoint of the job's folder, trains to the last step, and writes the model as Hugging Face's
libraries read it.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import cast

from . import checkpoints
from .batch import Rows
from .documents import document_rows
from .engine import Engine
from .events import Event, Exported, Started, tell
from .job import MODEL, Job
from .llama import Weights, configuration, fresh, parameters, publish_model, stored
from .loop import Training, train
from .packed import PackedRows, flat_packs, lay_out, layout_folder
from .peaks import flops_per_token, peak
from .prepared import tokenizer_is_here
from .settings import Precision
from .start import start_folder
from .tokenizer_files import tokenizer_files
from .world import World, joined


def run(job: Job) -> None:
    """Train. Raises InputError and RunError, whose messages are for people."""
    with joined(job.settings.device) as world:
        if world.first:
            tokenizer_is_here(job.data)  # after the last step it is too late to learn that this machine has none
        voice = _Voice(aloud=world.first)
        precision: Precision = job.settings.precision or ("bfloat16" if world.device.type == "cuda" else "float32")
        engine = _engine(job, world, precision)
        rows, validation = _rows(job, world)
        done = checkpoints.resume(engine, world, job.output_dir)
        model, vocabulary = job.settings.model, _vocabulary(job)
        voice.tell(
            Started(
                step=done, steps=job.settings.steps, parameters=parameters(model, vocabulary),
                device=world.device_name(), processes=world.size, engine=job.settings.engine,
            )
        )  # fmt: skip
        save = partial(_save, engine, world, job, voice)
        work = flops_per_token(model, vocabulary, job.settings.sequence_length)
        best = peak(world.device_name())
        speed = best * world.size if best else None
        train(Training(job.settings, engine, world, rows, validation, work, speed, voice.tell, save), done)
        _export(job, engine, world)


@dataclass(slots=True)
class _Voice:
    """Tells what happens, in the first process alone, and knows what of it no checkpoint holds yet."""

    aloud: bool
    unsaved: list[Event] = field(default_factory=list[Event])

    def tell(self, event: Event) -> None:
        if self.aloud:
            tell(event)
            self.unsaved.append(event)


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


def _rows(job: Job, world: World) -> tuple[Rows, Rows | None]:
    settings, data = job.settings, job.data
    folder = f"{job.output_dir}/cache"
    if data.kind == "sft":
        return _packs(job, world, "train", folder), _packs(job, world, "valid", folder) if data.of("valid") else None
    validated = settings.global_batch * settings.validation_batches if settings.validate_every else 0
    sizes = (settings.steps * settings.global_batch, validated)
    found = document_rows(data, settings.sequence_length, sizes, settings.seed, folder)
    return cast("Rows", found[0]), found[1]


def _packs(job: Job, world: World, split: str, folder: str) -> PackedRows:
    place = layout_folder(job.data, split, folder)
    if world.first:
        lay_out([file for source in job.data.of(split) for file in source.files], place)
    world.wait()
    return PackedRows(flat_packs(place), job.settings.sequence_length, job.data.eos or 0, job.settings.seed)


def _save(engine: Engine, world: World, job: Job, voice: _Voice, step: int) -> str:
    folder = checkpoints.save(engine, world, job.output_dir, step, job.settings.keep_checkpoints, voice.unsaved)
    voice.unsaved.clear()
    return folder


def _export(job: Job, engine: Engine, world: World) -> None:
    """Write the model, once training has ended."""
    weights = engine.weights()
    if world.first:
        config = configuration(job.settings.model, _vocabulary(job), job.settings.sequence_length, job.data.eos)
        folder = f"{job.output_dir}/{MODEL}"
        publish_model(folder, config, weights, tokenizer_files(job.data))
        tell(Exported(path=folder))
    world.wait()
