"""The events of a trainer: one line of JSON each on its standard output, with the key `event`.

All other lines are its log. So any pipe (`srun`, `kubectl logs`) can carry the output of a watched trainer.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import orjson
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.strict import Model, Strict, parse


class Started(Strict, frozen=True):
    """Training begins."""

    event: Literal["started"] = "started"
    step: int  # done by earlier runs
    steps: int
    parameters: int  # of the whole model
    device: str
    processes: int
    engine: str


class TrainStep(Strict, frozen=True):
    """An optimizer step is done."""

    event: Literal["step"] = "step"
    step: int
    loss: float  # in nats per trained token, over the global batch
    learning_rate: float
    gradient_norm: float
    tokens: int  # all inputs
    loss_tokens: int  # the trained ones
    padding: int  # those that fill up rows
    seconds: float  # wall time with the device synchronized
    waited: float  # the part of it spent waiting for data
    mfu: float | None  # model FLOPs utilization, None if the device's peak is unknown
    memory: int  # peak in bytes of the fullest process
    read: str | None = None  # digest of the step's reads (`samples.step_digest`), None if its data lack content keys


class Validated(Strict, frozen=True):
    """The loss on the validation split after a step, in nats per token."""

    event: Literal["validated"] = "validated"
    step: int
    loss: float


class Saved(Strict, frozen=True):
    """A checkpoint is complete."""

    event: Literal["saved"] = "saved"
    step: int
    path: str


class Exported(Strict, frozen=True):
    """The model is written in the format of Hugging Face's libraries."""

    event: Literal["exported"] = "exported"
    path: str


class Failed(Strict, frozen=True):
    """The trainer stops for a known reason."""

    event: Literal["failed"] = "failed"
    reason: str
    wrong_call: bool = False  # the user must fix something first


Event = Started | TrainStep | Validated | Saved | Exported | Failed
KINDS: dict[str, type[Event]] = {kind.model_fields["event"].default: kind for kind in get_args(Event)}


def emit(event: Event) -> None:
    """Write an event to the standard output at once."""
    sys.stdout.write(orjson.dumps(event.model_dump()).decode() + "\n")
    sys.stdout.flush()


def event_in(line: str) -> Event | None:
    """Return the event in a line of output, None for a line of the log."""
    if not line.startswith("{"):
        return None
    try:
        found: Any = orjson.loads(line)
        kind = KINDS.get(str(found.get("event")))
        return parse(kind, found, "event") if kind else None
    except (orjson.JSONDecodeError, InputError):
        return None


def run_request(model: type[Model], work: Callable[[Model], None]) -> int:
    """Run `work` on the request in the JSON file that the command line names, and return the exit code.

    A failure is also an event; the code is 1 for a failed run, 2 for a request that must be changed.
    """
    try:
        work(parse(model, orjson.loads(Path(sys.argv[1]).read_bytes()), sys.argv[1]))
    except (InputError, RunError) as error:
        emit(Failed(reason=str(error), wrong_call=isinstance(error, InputError)))
        return 2 if isinstance(error, InputError) else 1
    return 0
