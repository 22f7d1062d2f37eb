"""PostgreSQL for a Prefect server: Debian's, as processes of whoever asks, with its data in a temporary folder.

PostgreSQL refuses to run as root, so there it runs as `nobody`.
"""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from shutil import chown, which
from tempfile import TemporaryDirectory

from tests.flows.prefect_commands import clean_environment, free_port, running, wait_until

START_SECONDS = 60


def _program(name):
    """Debian keeps the server's programs off the path, in a folder for each version."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    return str(found[-1]) if found else which(name)


INITDB, POSTGRES = _program("initdb"), _program("postgres")
MISSING = None if INITDB and POSTGRES else "PostgreSQL is not installed: apt-get install postgresql"
"""Why there can be no PostgreSQL here, or None."""


@contextmanager
def postgresql(*options):
    """The variable that sends a Prefect server to a new, empty database; `options` are settings of PostgreSQL."""
    with TemporaryDirectory(prefix="postgresql-") as name:
        folder, data, port = Path(name), Path(name, "data"), free_port()
        as_user = []
        if os.geteuid() == 0:
            chown(folder, "nobody", "nogroup")
            as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        create = [*as_user, INITDB, "-D", data, "-U", "prefect", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N"]
        subprocess.run(create, check=True, capture_output=True, cwd=folder)
        listen = ["-D", data, "-k", folder, "-p", str(port), "-c", "listen_addresses=127.0.0.1"]
        chosen = [word for option in options for word in ("-c", option)]
        log = folder / "postgresql.log"
        serve = [*as_user, POSTGRES, *map(str, listen), *chosen]
        with running(serve, clean_environment(), folder, log) as process:
            wait_until(
                lambda: process.poll() is not None or "ready to accept connections" in log.read_text(),
                START_SECONDS, log,
            )  # fmt: skip
            assert process.poll() is None, log.read_text()
            address = f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
            yield {"PREFECT_SERVER_DATABASE_CONNECTION_URL": address}
