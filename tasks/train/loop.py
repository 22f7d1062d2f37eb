"""The loop: read, step, tell; validate and save at times.

While the device computes a step, a thread reads the rows of the next, so that waiting for data shows up only where reading
is slower than training. A step's time is taken between two synchronised moments, or it would be that of the queue.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tokenmill.tasks.errors import RunError

from .batch import Batch, Rows
from .engine import Engine, Losses, Shape
from .events import Event, Saved, Step, Validated
from .schedule import learning_rate
from .settings import TrainSettings
from .world import World


@dataclass(frozen=True, slots=True)
class Training:
    """All that a training is made of. `work` is the FLOPs per token, and `speed` those per second that the devices of all
    processes are built for, None where that is unknown.
    """

    settings: TrainSettings
    engine: Engine
    world: World
    rows: Rows
    validation: Rows | None
    work: float
    speed: float | None
    tell: Callable[[Event], None]
    save: Callable[[int], str]


def train(training: Training, done: int) -> None:
    """Run all steps after the first `done`. Raises RunError when the loss is no number any more."""
    settings = training.settings
    with ThreadPoolExecutor(1) as reader:
        ahead = _ahead(training, reader, range(done, settings.steps))
        for step in range(done + 1, settings.steps + 1):
            training.world.synchronize()
            began = time.perf_counter()
            batches = next(ahead)
            waited = time.perf_counter() - began
            losses, norm = training.engine.step(batches, learning_rate(step, settings.steps, settings.optimizer))
            training.world.synchronize()
            _tell(training, step, batches, losses, norm, time.perf_counter() - began, waited)
            _afterwards(training, step)


def _ahead(training: Training, reader: ThreadPoolExecutor, steps: range) -> Iterator[list[Batch]]:
    """The batches of each step, read while the step before is computed."""
    following = [reader.submit(_read, training.rows, training.engine.shape, step) for step in steps[:1]]
    for step in steps:
        batches = following.pop().result()
        if step + 1 in steps:
            following.append(reader.submit(_read, training.rows, training.engine.shape, step + 1))
        yield batches


def _read(rows: Rows, shape: Shape, step: int) -> list[Batch]:
    return [rows.batch(numbers) for numbers in shape.numbers(step)]


def _tell(
    training: Training, step: int, batches: Sequence[Batch], losses: Losses, norm: float, seconds: float, waited: float
) -> None:
    if not math.isfinite(losses.total) or not math.isfinite(norm):
        raise RunError(
            f"step {step}: the loss is {losses.mean} and the gradient's norm {norm}; lower optimizer.learning_rate or raise "
            "optimizer.warmup_steps, and look at the data of this step"
        )
    settings, world = training.settings, training.world
    share = training.engine.shape.replicas / world.size  # processes that share a replica read the same rows
    padding = sum(batch.padding for batch in batches) * share
    (padding,) = world.reduced([padding], "sum")
    longest, waiting, memory = world.reduced([seconds, waited, world.memory()], "max")
    tokens = settings.global_batch * settings.sequence_length
    training.tell(
        Step(
            step=step,
            loss=losses.mean,
            learning_rate=learning_rate(step, settings.steps, settings.optimizer),
            gradient_norm=norm,
            tokens=tokens,
            loss_tokens=losses.tokens,
            padding=round(padding),
            seconds=longest,
            waited=waiting,
            mfu=tokens * training.work / longest / training.speed if training.speed else None,
            memory=int(memory),
        )
    )


def _afterwards(training: Training, step: int) -> None:
    """What is due after a step: a loss on the valid split, a checkpoint."""
    settings = training.settings
    last = step == settings.steps
    if training.validation and settings.validate_every and (last or step % settings.validate_every == 0):
        training.tell(Validated(step=step, loss=_validated(training, training.validation)))
    if last or (settings.checkpoint_every and step % settings.checkpoint_every == 0):
        training.tell(Saved(step=step, path=training.save(step)))


def _validated(training: Training, rows: Rows) -> float:
    shape = training.engine.shape
    found = [
        training.engine.losses(_read(rows, shape, number)) for number in range(training.settings.validation_batches)
    ]
    return Losses(sum(each.total for each in found), sum(each.tokens for each in found)).mean
