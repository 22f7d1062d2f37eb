"""What commands share: the terminal, and the artifact piped into them."""

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from cyclopts import Parameter
from rich.console import Console
from tokenmill.tasks.artifact import Artifact, read_artifact
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import absolute, is_writable, join, temporary_folder

QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "DO_NOT_TRACK": "1",
    "DASK_LOGGING__DISTRIBUTED": "error",
}
"""Settings for use at a terminal: a progress line instead of two log streams, and no telemetry."""

terminal = Console(stderr=True)

OutputDir = Annotated[str, Parameter(name=["--output-dir", "-o"], help="Output folder or URI.")]

TextFormat = Literal["json", "text"]
"""How a command prints its result: one line of JSON for programs, text for people."""

Format = Literal[TextFormat, "table"]
"""The same, and a table for people."""


def be_quiet() -> None:
    """Keep log streams off the terminal. Variables that are already set are kept."""
    chosen = QUIET | _prefect_home()
    os.environ.update({name: value for name, value in chosen.items() if name not in os.environ})


def _prefect_home() -> dict[str, str]:
    """Return a temporary home for Prefect if the user's isn't writable; its profiles remain in use."""
    home = absolute("~/.prefect")
    if is_writable(home):
        return {}
    profiles = join(home, "profiles.toml")
    kept = {"PREFECT_PROFILES_PATH": profiles} if Path(profiles).exists() else {}
    return {"PREFECT_HOME": join(temporary_folder(), "prefect"), **kept}


def piped(command: str, kinds: Collection[str] = ()) -> Artifact:
    """The artifact printed by the previous command. Raises InputError unless there is one of these `kinds`."""
    if sys.stdin.isatty():
        raise InputError(f"{command}: name an output folder, or pipe a command into this one")
    return read_artifact(sys.stdin.buffer.read(), kinds, command)


def print_json(record: Mapping[str, Any]) -> None:
    """Print a record as one line for the next program."""
    sys.stdout.write(orjson.dumps(record).decode() + "\n")
