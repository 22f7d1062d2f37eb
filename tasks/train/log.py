"""The log of a training: one line for each that its processes write, and for each event, in a file that grows.

    OUT/training.log    all starts of a training, one after the other

A person whose training failed wants its last lines first, so they are part of the error, with the place of all the others.
torchrun ends with a report of thirty lines on itself, which would hide them.
"""

import re
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from io import FileIO

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.publish import open_log

LOG = "training.log"
LAST = 20
"""Lines that an error shows. A traceback of a trainer takes about fifteen."""

REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed \(exitcode")
"""How torchrun begins its report."""


class Log:
    """The open log in a local file, which it appends to. `last` are its last lines before torchrun's report."""

    def __init__(self, path: str, file: FileIO) -> None:
        self.path, self._file = path, file
        self.last: deque[str] = deque(maxlen=LAST)
        self._reported = False

    def write(self, line: str) -> None:
        """Append a line. Raises OSError."""
        self._file.write(f"{line}\n".encode())
        self._reported |= REPORT.search(line) is not None
        if not self._reported:
            self.last.append(line)


@contextmanager
def logged(path: str) -> Generator[Log]:
    """The log in the file `path`. A RunError that is raised within is raised again with the last lines of the log."""
    with open_log(path) as file:
        log = Log(path, file)
        try:
            yield log
        except RunError as error:
            raise RunError(f"{error}\n{_ending(log)}") from error


def _ending(log: Log) -> str:
    if not log.last:
        return f"It wrote nothing to its log, {log.path}"
    return "\n".join([f"The last lines of its log, {log.path}:", *(f"  {line}" for line in log.last)])
