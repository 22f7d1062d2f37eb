"""A real Prefect server for the tests that need one: started once (some 10 s), on a free loopback port, stopped at the end.

Tests that run commands pass `prefect_server.environment` to them. Tests that call a flow in this process ask for
`prefect_api`, and then a flow run costs about a second instead of a server of its own.
"""

from dataclasses import dataclass

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, PREFECT_HOME, temporary_settings
from prefect_commands import PREFECT, clean_environment, free_port, healthy, running, wait_until

START_SECONDS = 120


@dataclass(frozen=True)
class PrefectServer:
    """Where the server is, and the environment of commands that are to use it."""

    url: str
    environment: dict[str, str]

    def client(self):
        return SyncPrefectClient(api=self.url)


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory):
    return tmp_path_factory.mktemp("prefect-home")


@pytest.fixture(scope="session")
def prefect_server(prefect_home):
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = clean_environment() | {
        "PREFECT_HOME": str(prefect_home),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_API_PORT": str(port),  # the option --port alone leaves the UI calling another port
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = [PREFECT, "server", "start", "--host", "127.0.0.1"]
    with running(command, environment, prefect_home, prefect_home / "server.log") as process:
        wait_until(lambda: process.poll() is None and healthy(url), START_SECONDS, prefect_home / "server.log")
        yield PrefectServer(url, environment)
        # What flows of this process still have to say is sent while there is somebody to listen.
        APILogWorker.drain_all()
        EventsWorker.drain_all()


@pytest.fixture
def prefect_api(prefect_server, prefect_home, monkeypatch):
    """Flows called in this process report to the test server; without heartbeats a flow run ends 0.9 s sooner."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_server.url)
    monkeypatch.setenv("PREFECT_HOME", str(prefect_home))
    settings = {
        PREFECT_API_URL: prefect_server.url,
        PREFECT_HOME: prefect_home,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
    }
    with temporary_settings(settings):
        yield prefect_server
