"""A preload of Dask's processes on the hosts of an SSH cluster: end with the run.

SSH does not end a remote command whose connection is lost, so a killed run would leave its scheduler and workers behind. But
it closes the command's standard input, which the run keeps open as long as it lives. Nothing but the standard library is
imported: each host imports this first, to show that it has this installation.
"""

import os
import signal
from functools import cache
from threading import Thread


def dask_setup(_server: object) -> None:
    """Called by Dask for each scheduler and nanny."""
    _watch()


@cache
def _watch() -> None:
    Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
