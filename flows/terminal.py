"""What all commands have in common: the terminal they print to, and the artifact that is piped into them."""

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

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
"""For a person at a terminal: the progress line instead of two log streams, and no call home."""

terminal = Console(stderr=True)

OutputDir = Annotated[str, Parameter(help="Folder or URI to publish in.")]
Overrides = Annotated[str, Parameter(help="Settings as key.sub=value, for example tokenizer.model=o200k_base.")]


def be_quiet() -> None:
    """Leave the terminal to progress lines and summaries; what somebody set in the environment stays."""
    chosen = QUIET | _prefect_home()
    os.environ.update({name: value for name, value in chosen.items() if name not in os.environ})


def _prefect_home() -> dict[str, str]:
    """Another home for Prefect where the user's cannot be written; the profiles in it stay in use."""
    home = absolute("~/.prefect")
    if is_writable(home):
        return {}
    profiles = join(home, "profiles.toml")
    kept = {"PREFECT_PROFILES_PATH": profiles} if Path(profiles).exists() else {}
    return {"PREFECT_HOME": join(temporary_folder(), "prefect"), **kept}


def piped(command: str, kinds: Collection[str] = ()) -> Artifact:
    """The artifact that the command before this one printed. Raises InputError when there is none of these `kinds`."""
    if sys.stdin.isatty():
        raise InputError(f"{command}: name the output folder of a command, or pipe one into this command")
    return read_artifact(sys.stdin.buffer.read(), kinds, command)
