"""Printing and logging: a failed write never ends the process, and errors for users are logged without a traceback.

Writes fail if a terminal is closed, a disk is full, or the reader of a pipe is killed, such as a run's `prefect worker`. rich,
which Prefect logs with, then raises SystemExit in the thread that prints. In the thread of a Dask cluster that ends the
cluster, and the run would wait for it forever.
"""

import logging
import os

from rich.console import Console
from tokenmill.tasks.errors import InputError, RunError

PREFECT_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")


def never_end_by_printing() -> None:
    """Drop messages that cannot be printed, in this process and its children. Call again after closing streams."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file opened would get its number, and messages would be written into it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
    Console.on_broken_pipe = _silence
    logging.raiseExceptions = False  # as the manual of `logging` advises for production


def _silence(self: Console) -> None:
    self.quiet = True


def log_errors_as_sentences() -> None:
    """Omit tracebacks of InputError and RunError from Prefect's logs of flows and tasks."""
    for name in PREFECT_LOGGERS:
        logging.getLogger(name).addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], InputError | RunError):
        record.exc_info = None
    return True
