"""A training at the terminal: one line with the loss, tokens a second and the time that is left."""

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tasks.train.events import Event, Started, Step


class TrainingProgress:
    """A context that shows a training on stderr where that is a terminal, and nothing elsewhere: the log says it there."""

    def __init__(self) -> None:
        console = Console(stderr=True)
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

    def hear(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, Started):
            self._progress.update(self._task, total=event.steps, completed=event.step)
        if isinstance(event, Step):
            facts = f"loss {event.loss:.4f}  {event.tokens / event.seconds:,.0f} tokens/s"
            mfu = "" if event.mfu is None else f"  MFU {event.mfu:.0%}"
            self._progress.update(self._task, completed=event.step, description=facts + mfu)


def print_training(record: Mapping[str, Any], console: Console) -> None:
    """What came of a training, and what to do next; or how one is started that is another program's to run."""
    if record["type"] == "job":
        console.print(f"written to {record['path']}; run:\n{record['command']}", markup=False)
        return
    console.print(
        f"{record['steps']:,} steps, {record['tokens']:,} tokens: loss {record['first_loss']:.4f} ─► "
        f"{record['final_loss']:.4f}\nmodel: {record['model']}\nnext:  tokenmill evaluate {record['path']}",
        markup=False,
    )
