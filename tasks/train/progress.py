"""The progress of a training run: a bar in the terminal, sentences for the log, and rows for tables."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.shards.progress import say

from .events import Event, Started, TrainStep, Validated

REFRESH_SECONDS = 5.0
OF_ELAPSED = 1_000


@dataclass(slots=True)
class UpdateSchedule:
    """When to update a server: at most every REFRESH_SECONDS, and less often after an hour and a half.

    Prefect keeps an event per update for a week, 7 kB with its table. The wait is at least one OF_ELAPSED-th of the time since
    `began`, so ten days of training make 6,150 updates (42 MB) instead of 172,800.
    """

    began: float
    shown: float = float("-inf")

    def due(self, now: float) -> bool:
        """Return whether an update is due at `now`, in seconds of the same clock as `began`; if so, it counts as made."""
        if now - self.shown < max(REFRESH_SECONDS, (now - self.began) / OF_ELAPSED):
            return False
        self.shown = now
        return True


class TrainingProgress:
    """A context that shows a training run on stderr: a bar in a terminal, otherwise a line now and then."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._lines = None if console.is_terminal else UpdateSchedule(time.monotonic())
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("starting the trainer", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def handle(self, event: Event) -> None:
        if self._lines and (not isinstance(event, TrainStep) or self._lines.due(time.monotonic())):
            say(f"step {event.step}: {facts(event)}" if isinstance(event, TrainStep) else sentence(event))
        if isinstance(event, Started):
            self._progress.update(self._task, total=event.steps, completed=event.step)
        if isinstance(event, TrainStep):
            self._progress.update(self._task, completed=event.step, description=facts(event))


def facts(step: TrainStep) -> str:
    """Loss and speed of a step."""
    mfu = "" if step.mfu is None else f"  MFU {step.mfu:.0%}"
    return f"loss {step.loss:.4f}  {step.tokens / step.seconds:,.0f} tokens/s{mfu}"


def print_training(record: Mapping[str, Any], console: Console) -> None:
    """Print the result of a training run and the next command, or how to start the training run of a different program."""
    if record["type"] == "job":
        console.print(f"written to {record['path']}; run:\n{record['command']}", markup=False)
        return
    console.print(
        f"{counted(record['steps'], 'step')}, {record['tokens']:,} tokens: loss {record['first_loss']:.4f} ─► "
        f"{record['final_loss']:.4f}\nmodel: {record['model']}\nnext:  tokenmill evaluate {quote(record['path'])}",
        markup=False,
        soft_wrap=True,
    )


def sentence(event: Event) -> str:
    """Return an event as a sentence."""
    if isinstance(event, TrainStep):
        row = step_rows([event])[0]
        return ", ".join(f"{name} {value}" for name, value in row.items())
    if isinstance(event, Started):
        where = f"{event.processes} process(es) on {event.device}"
        return f"{event.engine}: {event.parameters:,} parameters, {where}, from step {event.step} to {event.steps}"
    if isinstance(event, Validated):
        return f"step {event.step}: loss {event.loss:.4f} on the validation split"
    return f"{event.event}: {getattr(event, 'path', '') or getattr(event, 'reason', '')}"


def step_rows(steps: Sequence[TrainStep]) -> list[dict[str, Any]]:
    """One row per step, for tables."""
    return [
        {
            "step": step.step, "loss": round(step.loss, 4), "gradient norm": round(step.gradient_norm, 3),
            "tokens/s": round(step.tokens / step.seconds), "MFU": "-" if step.mfu is None else f"{step.mfu:.1%}",
            "waited": f"{step.waited / step.seconds:.1%}", "memory": f"{step.memory / 1e9:.1f} GB",
        }
        for step in steps
    ]  # fmt: skip
