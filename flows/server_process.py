"""The temporary Prefect server of a run, as a process: it serves on an inherited socket and ends with its parent.

Its stdin is an empty pipe. The pipe closes when the parent ends, even when it is killed, and then the server
ends too. `python -P server_process.py DESCRIPTOR`; it doesn't import modules from this project.
"""

import os
import socket
import sys
from threading import Thread

import uvicorn

STDIN = 0


def serve(listening: socket.socket) -> None:
    """Serve Prefect's API on a socket until SIGTERM, or until the parent is gone."""
    Thread(target=_end_with_parent, daemon=True).start()
    from prefect.server.api.server import create_app  # takes seconds; the parent is watched meanwhile

    config = uvicorn.Config(create_app, factory=True, log_level="error", lifespan="on")
    uvicorn.Server(config).run(sockets=[listening])


def _end_with_parent() -> None:
    os.read(STDIN, 1)
    os._exit(1)  # SQLite rolls back what was not committed


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
