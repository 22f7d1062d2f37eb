"""A real Prefect server for the tests that need one: started once (some 5 s), on a free loopback port, stopped at the end.

All processes of pytest-xdist share it, so that tests ask for their own runs, by id or name, and not for all; a file that deploys
everything has one of its own. Tests that run commands pass `prefect_server.environment` to them. Tests that call
a flow in this process ask for `prefect_api`, and then a flow run costs about a second instead of a server of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from distributed import LocalCluster, Security
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker

from tests.flows.cloning import REPOSITORY
from tests.flows.prefect_commands import reporting, shared_server
from tests.preparing import blend_of, prepare, tree, write_lines


@pytest.fixture(scope="session")
def prefect_server():
    yield shared_server(Path(os.environ["TOKENMILL_TEST_SHARED"], "prefect"))
    # What flows of this process still have to say is sent while there is somebody to listen.
    APILogWorker.drain_all()
    EventsWorker.drain_all()


@pytest.fixture
def prefect_api(prefect_server):
    with reporting(prefect_server):
        yield prefect_server


@pytest.fixture(scope="module")
def dask_cluster(prefect_server):
    """The address of a Dask scheduler with two workers that reach the test server, which restarts those that are killed. It
    takes 5 CPU seconds to start, and as many in each minute that it stands idle.
    """
    with (
        patch.dict(os.environ, prefect_server.environment),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", host="127.0.0.1") as cluster,
    ):
        yield cluster.scheduler_address


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """Dask's environment variables for TLS, with files of an authority of their own."""
    folder, made = tmp_path_factory.mktemp("tls"), Security.temporary()
    variables = {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true"}
    for part in [
        "ca_file",
        *(f"{role}_{kind}" for role in ("scheduler", "worker", "client") for kind in ("cert", "key")),
    ]:
        (folder / part).write_text(getattr(made, f"tls_{part}"))
        role, _, kind = part.partition("_")
        variable = "CA_FILE" if part == "ca_file" else f"{role}__{kind}".upper()
        variables[f"DASK_DISTRIBUTED__COMM__TLS__{variable}"] = str(folder / part)
    return variables


@pytest.fixture(scope="session")
def blend(tmp_path_factory):
    """A blend that makes some 70 shards of 20 kB."""
    folder = tmp_path_factory.mktemp("rye")
    rye = write_lines(folder / "rye.jsonl", [f"rye {number} " + "grain " * 40 for number in range(5_000)])
    path = folder / "blend.json"
    path.write_text(json.dumps(blend_of(rye, write_lines(folder / "oats.jsonl", ["oats " * 9] * 99))))
    return path


@pytest.fixture(scope="session")
def expected(blend, tmp_path_factory):
    """The output of one undisturbed preparation of it in this process."""
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare(str(blend), out, shard_size=20_000)
    return tree(out)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A wheel that is built from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    clone = shutil.copytree(REPOSITORY, folder / "source", ignore=shutil.ignore_patterns(".*", "build", "tests"))
    source = "import setuptools.build_meta as backend, sys; print(backend.build_sdist(sys.argv[1]))"
    made = subprocess.run([sys.executable, "-c", source, folder], cwd=clone, check=True, capture_output=True, text=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    archive = folder / made.stdout.split()[-1]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, archive], check=True)
    (found,) = folder.glob("*.whl")
    return found
