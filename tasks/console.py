"""What a process prints: it never ends the process, and an error that teaches is one sentence.

A terminal is closed, a disk is full, or whoever read a pipe is killed, as when `prefect worker` dies under the runs that
print into it. rich, by which Prefect logs, then ends the thread that prints with SystemExit; in the thread that holds a
Dask cluster together, that ends the cluster, and whoever waits for it would wait for ever.
"""

import logging
import os

from rich.console import Console
from tokenmill.tasks.errors import InputError, RunError

PREFECT_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")


def never_end_by_printing() -> None:
    """Let this process, and those it starts, run on when nothing can be printed any more; messages are dropped then.

    May be called again, after streams were closed.
    """
    for number in range(3):
        _open(number)
    Console.on_broken_pipe = _fall_silent
    logging.raiseExceptions = False  # messages that cannot be written are no error, as the manual of `logging` advises


def _open(number: int) -> None:
    """Open /dev/null in place of a standard stream that is closed: the next file would get its number, and the messages."""
    try:
        os.fstat(number)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free


def _fall_silent(self: Console) -> None:
    self.quiet = True


def log_errors_as_sentences() -> None:
    """Log errors that teach without tracebacks, in what Prefect logs of flows and tasks: they say what to do."""
    for name in PREFECT_LOGGERS:
        logging.getLogger(name).addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], InputError | RunError):
        record.exc_info = None
    return True
