"""A person's terminals: commands of pages, run one after the other, beside servers and workers that keep running."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.flows.prefect_commands import clean_environment, running, wait_until
from tests.flows.preparation_runs import ran
from tests.flows.standing_clusters import network

START_SECONDS = 120
RUN_SECONDS = 240


@contextmanager
def lonely_host():
    """What a command is put after to run on a host on which nothing listens."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command ip")
    with network([2]) as found:
        yield found.on(2)


class Terminal:
    """A shell in a folder, on a host if `host` is what a command is put after to run there, with the virtual environment active."""

    def __init__(self, host, folder, home, **variables):
        self.host, self.folder, self.home = host, folder, home
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = (
            clean_environment() | {"HOME": str(home), "PREFECT_HOME": str(home / ".prefect"), "PATH": path} | variables
        )

    def run(self, line):
        """What a command printed on stdout and stderr that ended well."""
        place = {"cwd": self.folder, "env": self.environment, "stdin": subprocess.DEVNULL}
        done = ran(*self.host, "bash", "-c", line, seconds=RUN_SECONDS, **place)
        assert done.returncode == 0, f"{line}:\n{done.stdout}{done.stderr}"
        return f"{done.stdout}\n{done.stderr}"

    def keep_running(self, line):
        """The context of a command that runs until it is stopped, and its log."""
        log = self.home / f"{'-'.join(line.split()[:2])}.log"
        return running([*self.host, "bash", "-c", f"exec {line}"], self.environment, self.folder, log), log

    def get(self, url):
        """The body at a URL of the host, or None where nobody answers."""
        asking = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
        done = ran(*self.host, sys.executable, "-c", asking, url)
        return done.stdout if done.returncode == 0 else None


URL = "http://127.0.0.1:4200"


def started(terminal, line, process, log):
    """Wait until the server answers, or the worker is ready."""
    if line.startswith("prefect server"):
        wait_until(lambda: process.poll() is None and terminal.get(f"{URL}/api/health"), START_SECONDS, log)
    else:
        wait_until(lambda: "started!" in log.read_text(), START_SECONDS, log)
