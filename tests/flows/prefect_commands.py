"""Commands of the installed Prefect, started, waited for and stopped as a person at a terminal would."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, PREFECT_HOME, temporary_settings

PREFECT = str(Path(sys.executable).with_name("prefect"))
DATABASE = Path(__file__).parents[2] / "build" / f"prefect-{version('prefect')}.db"
START_SECONDS = 120
STOP_SECONDS = 20


def clean_environment():
    """This process's environment without settings of Prefect and Dask, which a command in this process may have changed."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DASK_"))}


def add_database(home):
    """Copy an empty database into a new home of Prefect: creating one takes 8 of the 13 s of a server's first start."""
    if (home / "prefect.db").exists():
        return
    if not DATABASE.exists():
        DATABASE.parent.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=DATABASE.parent) as folder:
            environment = clean_environment() | {"PREFECT_HOME": folder}
            upgrade = [PREFECT, "server", "database", "upgrade", "--yes"]
            subprocess.run(upgrade, env=environment, check=True, capture_output=True)
            Path(folder, "prefect.db").replace(DATABASE)
    home.mkdir(exist_ok=True)
    shutil.copyfile(DATABASE, home / "prefect.db")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def healthy(url):
    try:
        with urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (URLError, OSError):
        return False


@dataclass(frozen=True)
class PrefectServer:
    """Where a server is, and the environment of commands that are to use it."""

    url: str
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def home(self):
        return Path(self.environment["PREFECT_HOME"])

    def client(self):
        return SyncPrefectClient(api=self.url)

    def command(self, *, host="127.0.0.1", **own):
        """What starts it, with further variables that it alone is given."""
        return running(
            [PREFECT, "server", "start", "--host", host], self.environment | own, self.home, self.home / "server.log"
        )

    def answering(self, process):
        """The same, once it answers."""
        wait_until(lambda: process.poll() is None and healthy(self.url), START_SECONDS, self.home / "server.log")
        return replace(self, process=process)


def server_of(home, port, host="127.0.0.1"):
    """A server to be started that keeps its data in the folder `home`."""
    add_database(home)
    url = f"http://{host}:{port}/api"
    environment = clean_environment() | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_API_PORT": str(port),  # the option --port alone leaves the UI calling another port
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    return PrefectServer(url, environment)


@contextmanager
def serving(home, host="127.0.0.1", port=None, **own):
    """A Prefect server that keeps its data in the folder `home`; `own` are further variables that it alone is given."""
    server = server_of(home, port or free_port(), host)
    with server.command(host=host, **own) as process:
        yield server.answering(process)


def shared_server(home):
    """The server of all processes that name the same folder: the first one starts it, and `tests/conftest.py` ends it."""
    home.mkdir(exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        place = home / "server.json"
        if place.exists():
            return server_of(home, json.loads(place.read_text())["port"])
        port = free_port()
        server = server_of(home, port)
        process = server.command().__enter__()  # it outlives this process
        place.write_text(json.dumps({"port": port, "pid": process.pid}))
        return server.answering(process)


@contextmanager
def reporting(server):
    """Flows called in this process report to a server; without heartbeats a flow run ends 0.9 s sooner."""
    named = {"PREFECT_API_URL": server.url, "PREFECT_HOME": str(server.home)}
    settings = {PREFECT_API_URL: server.url, PREFECT_HOME: server.home, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with patch.dict(os.environ, named), temporary_settings(settings):
        yield server


@dataclass
class running:  # noqa: N801 - used as `with running(...)`
    """A command in a session of its own, interrupted at the end as Ctrl-C would, and killed if that is not enough.

    The end of its log is then printed, which pytest shows beside a test that has failed.
    """

    command: list[str]
    environment: dict[str, str]
    folder: Path
    log: Path

    def __enter__(self):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.process

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        print(f"{self.log}:\n{end_of(self.log)}")


def end_of(log: Path):
    return log.read_text(errors="replace")[-4000:]


def wait_until(condition: Callable[[], object], seconds: float, log: Path | None = None):
    """Ask `condition` five times a second until it holds; its value. Fails with the end of `log` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s" + (f":\n{end_of(log)}" if log else ""))
        time.sleep(0.2)
    return value
