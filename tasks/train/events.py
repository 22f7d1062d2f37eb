"""What a trainer tells: one line of JSON per event on the standard output, with the key `event`.

Lines of any other kind are the log. So a trainer can be watched through whatever carries its output (a pipe, `srun`,
`kubectl logs`), and needs neither an address to report to nor a library to do it with.
"""

import sys
from typing import Any, Literal

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.strict import Strict, parse


class Started(Strict, frozen=True):
    """Training begins or goes on. `step` is how many steps were done before, `parameters` those of the whole model."""

    event: Literal["started"] = "started"
    step: int
    steps: int
    parameters: int
    device: str
    processes: int
    engine: str


class Step(Strict, frozen=True):
    """An optimizer step was done.

    `loss` is nats per token trained on, over the whole global batch. `tokens` are all that were read (padding too),
    `loss_tokens` those trained on, `padding` those that only fill rows. `seconds` is the step's wall time with the device
    synchronised, of which `waited` for data. `mfu` is the share of the device's peak, None where that is unknown;
    `memory` the peak in bytes of the fullest process.
    """

    event: Literal["step"] = "step"
    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    loss_tokens: int
    padding: int
    seconds: float
    waited: float
    mfu: float | None
    memory: int


class Validated(Strict, frozen=True):
    """The loss on the valid split after a step, in nats per token."""

    event: Literal["validated"] = "validated"
    step: int
    loss: float


class Saved(Strict, frozen=True):
    """A checkpoint is complete."""

    event: Literal["saved"] = "saved"
    step: int
    path: str


class Exported(Strict, frozen=True):
    """The model is written as Hugging Face's libraries read it."""

    event: Literal["exported"] = "exported"
    path: str


class Failed(Strict, frozen=True):
    """The trainer gives up, for a reason that it can name. `wrong_call` tells what a person must mend first."""

    event: Literal["failed"] = "failed"
    reason: str
    wrong_call: bool = False


Event = Started | Step | Validated | Saved | Exported | Failed
KINDS: dict[str, type[Event]] = {
    "started": Started, "step": Step, "validated": Validated, "saved": Saved, "exported": Exported, "failed": Failed,
}  # fmt: skip


def tell(event: Event) -> None:
    """Write an event to the standard output, at once."""
    sys.stdout.write(orjson.dumps(event.model_dump()).decode() + "\n")
    sys.stdout.flush()


def heard(line: str) -> Event | None:
    """The event in a line of a trainer's output, None where it is a line of the log."""
    if not line.startswith("{"):
        return None
    try:
        found: Any = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    kind = KINDS.get(found.get("event", "")) if isinstance(found, dict) else None
    if kind is None:
        return None
    try:
        return parse(kind, found, "event")
    except InputError:
        return None
