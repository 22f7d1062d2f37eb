"""The Prefect server that a run starts if none is configured.

Prefect starts one in the run's own process group, where Ctrl-C ends the server first and the run then waits minutes for
an answer. This one runs in a separate session. Prefect finds it by asking its class for the server of the process.
"""

import atexit
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, get_current_settings
from tokenmill.tasks.errors import RunError

LOOPBACK = "127.0.0.1"
PATIENCE = 120
"""Seconds. The first start builds a database: 10 s on an idle laptop; Prefect's default gives up after 20."""

PROGRAM = Path(__file__).with_name("server_process.py")

DEFAULTS = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
"""No analytics unless the user asks for them."""

ENVIRONMENT = {
    "PREFECT_SERVER_UI_ENABLED": "false",
    "PREFECT_PLUGINS_ENABLED": "false",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}
"""No UI and no plugins; the last two are Prefect's own marks of a temporary server."""


class TemporaryServer(SubprocessASGIServer):
    """Prefect's temporary server, in a separate session, which ends with this process."""

    def start(self, timeout: int | None = None) -> None:
        """Start the server once, and wait until it answers: `timeout` seconds, by default PATIENCE or Prefect's setting.

        Raises RunError when it ends, or does not answer in time.
        """
        if self.running:
            return
        with socket.create_server((LOOPBACK, 0)) as listening:  # requests queue until the server accepts them
            self.port = listening.getsockname()[1]
            chosen = get_current_settings().to_environment_variables(exclude_unset=True)
            self.server_process = subprocess.Popen(  # noqa: S603 - this Python, no shell
                [sys.executable, "-P", str(PROGRAM), str(listening.fileno())],
                env={**DEFAULTS, **os.environ, **chosen, **ENVIRONMENT},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
        self.running = True
        atexit.register(self.stop)
        seconds = timeout or max(PATIENCE, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value())
        try:
            httpx.get(f"{self.api_url}/health", timeout=seconds, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            self.stop()
            raise RunError(
                f"the temporary Prefect server did not start ({type(error).__name__}: {error}); run `prefect server start` "
                "to see why, or set PREFECT_API_URL to the address of a server"
            ) from error
