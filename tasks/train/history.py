"""The record of a training run: its steps over all starts, and its result.

    OUT/metrics.jsonl    a line per step, from its latest execution
    OUT/training.json    sealed; written after the model, so it means that training has finished

A restart repeats the steps after the last checkpoint, with the same losses; their later events replace the earlier ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import join
from tokenmill.tasks.strict import parse

from .checkpoints import saved_events
from .events import Event, Started, TrainStep, Validated, event_in
from .job import MODEL, Job, read_job, read_sealed

METRICS = "metrics.jsonl"
TRAINING = "training.json"


@dataclass(slots=True)
class History:
    """The steps and losses of a training run."""

    output_dir: str
    steps: dict[int, TrainStep] = field(default_factory=dict[int, TrainStep])  # by number
    validated: dict[int, Validated] = field(default_factory=dict[int, Validated])
    started: Started | None = None  # its last start

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started = event
            self.steps = {number: step for number, step in self.steps.items() if number <= event.step}
        elif isinstance(event, TrainStep):
            self.steps[event.step] = event
        elif isinstance(event, Validated):
            self.validated[event.step] = event

    def publish(self) -> None:
        """Write the steps so far. Raises OSError."""
        events = [*self.steps.values(), *self.validated.values()]
        lines = [orjson.dumps(event.model_dump()) for event in sorted(events, key=lambda event: event.step)]
        publish_bytes(join(self.output_dir, METRICS), b"".join(line + b"\n" for line in lines))


def history_of(output_dir: str) -> History:
    """Return the history of the training run in a folder, including events that only its checkpoints hold. Raises InputError."""
    found, place = History(output_dir), join(output_dir, METRICS)
    for number, line in enumerate((read_bytes(place) or b"").decode(errors="replace").splitlines(), 1):
        event = event_in(line)
        if event is None:
            raise InputError(
                f"{place}:{number}: damaged ({line[:40]!r} is not a step); remove this line: checkpoints hold the latest steps too"
            )
        found.add(event)
    for event in saved_events(output_dir):
        written = found.steps if isinstance(event, TrainStep) else found.validated
        if event.step not in written:
            found.add(event)
    return found


def publish_training(job: Job, history: History, seconds: float) -> dict[str, Any]:
    """Write and return the record of a finished training. `seconds` is the time since its last start."""
    steps = [step for _, step in sorted(history.steps.items())]
    trained = [step for step in steps if step.loss_tokens] or steps  # a step that is left out has no loss
    record: dict[str, Any] = {
        "type": "model",
        "model": join(job.output_dir, MODEL),
        "made_from": made_from(job),
        "steps": steps[-1].step,
        "tokens": sum(step.tokens for step in steps),
        "loss_tokens": sum(step.loss_tokens for step in steps),
        "first_loss": trained[0].loss,
        "final_loss": trained[-1].loss,
        "validated": {str(number): event.loss for number, event in sorted(history.validated.items())},
        "settings": job.settings.model_dump(),
        "volatile": {
            "seconds": seconds,
            "started": history.started.model_dump() if history.started else None,
            "seconds_per_step": sum(step.seconds for step in steps) / len(steps),
        },
    }
    publish_bytes(join(job.output_dir, TRAINING), sealed(record))
    return record


def made_from(job: Job) -> list[dict[str, str]]:
    """Return the inputs of a training run: the preparation, and the model that it starts from."""
    data = {"type": job.data.kind, "path": job.data.path, "digest": job.data.made_from}
    start = job.settings.start_from
    return [data, {"type": "model", "path": start}] if start else [data]


def read_training(output_dir: str) -> dict[str, Any]:
    """Return the record of a finished training. Raises InputError if there is none, or it is damaged."""
    record = ended_training(output_dir)
    if record is None:
        raise InputError(f"{join(output_dir, TRAINING)}: no finished training here; finish it with: tokenmill train")
    return record


def ended_training(output_dir: str) -> dict[str, Any] | None:
    """Return the record of a training run, None if it has not finished. Raises InputError if it is damaged."""
    remedy = "delete it and train again, which resumes from the last checkpoint"
    return read_sealed(join(output_dir, TRAINING), remedy)


def recorded_run(output_dir: str) -> tuple[Job, Started, list[TrainStep]]:
    """Return the job of a finished training, its last start, and its steps in order. Raises InputError."""
    record = read_training(output_dir)
    started = parse(Started, record["volatile"]["started"], join(output_dir, TRAINING))
    return read_job(output_dir), started, [step for _, step in sorted(history_of(output_dir).steps.items())]


def training_record(record: Mapping[str, Any], output_dir: str) -> dict[str, Any]:
    """Return the artifact record of a training run, for the next program."""
    names = ("type", "model", "steps", "tokens", "loss_tokens", "first_loss", "final_loss", "made_from")
    return {"train": {"path": output_dir, **{name: record[name] for name in names}}}
