"""What stands beside a run is killed in the middle of it, the Dask scheduler or the Prefect server: the run fails and
says so, and the same command finishes with the same bytes. (Killed workers and runs: test_pretrain_flow.py.)
"""

import json
import os
import signal
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from prefect_commands import free_port, serving

from tests.flows import preparation_runs
from tests.flows.preparation_runs import DEADLINE, finish, wait_for_receipts
from tests.flows.standing_clusters import scheduler, worker
from tests.preparing import blend_of, prepare, tree, write_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rye = write_lines(folder / "rye.jsonl", [f"rye {number} " + "grain " * 40 for number in range(5_000)])
    path = folder / "blend.json"
    path.write_text(json.dumps(blend_of(rye, write_lines(folder / "oats.jsonl", ["oats " * 9] * 99))))
    return path


@pytest.fixture(scope="module")
def expected(blend, tmp_path_factory):
    """The output of one undisturbed preparation in this process."""
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare(str(blend), out, shard_size=20_000)
    return tree(out)


def start(blend, out, server, *arguments):
    return preparation_runs.start("pretrain", blend, out, server, "shard_size=20kB", *arguments)


def failed(process):
    """What a run that has ended with exit code 1 complained of."""
    _, complaint = process.communicate(timeout=2 * DEADLINE)
    assert process.returncode == 1, complaint
    return complaint


@contextmanager
def standing(folder, port):
    with ExitStack() as stack:
        address, process = stack.enter_context(scheduler(folder, port=port))
        for name in ("one", "two"):
            stack.enter_context(worker(address, folder, name))
        yield address, process


def test_a_killed_scheduler_fails_the_run_and_another_finishes_it(blend, expected, tmp_path, prefect_server):
    out, port = tmp_path / "out", free_port()
    with standing(tmp_path, port) as (address, process):
        run = start(blend, out, prefect_server, "--scheduler", address)
        wait_for_receipts(out, 5, lambda: run.poll() is None)
        process.kill()
        complaint = failed(run)
    assert "lost the connection to the scheduler" in complaint
    assert "Traceback" not in complaint
    with standing(tmp_path, port) as (address, _):
        record = finish(start(blend, out, prefect_server, "--scheduler", address))
    assert record["shards"]["reused"] >= 1
    assert tree(out) == expected


def test_a_killed_prefect_server_fails_the_run_and_the_same_command_finishes_it(blend, expected, tmp_path):
    out, home, port = tmp_path / "out", tmp_path / "home", free_port()
    home.mkdir()
    with serving(home, port=port) as server:
        hasty = SimpleNamespace(environment=server.environment | {"PREFECT_CLIENT_MAX_RETRIES": "1"})
        run = start(blend, out, hasty, "--workers", "2")
        wait_for_receipts(out, 5, lambda: run.poll() is None)
        os.killpg(server.process.pid, signal.SIGKILL)
        complaint = failed(run)
    assert f"tokenmill: the Prefect server at {server.environment['PREFECT_API_URL']} was lost" in complaint
    assert "Traceback" not in complaint
    assert not (out / "blend.json").exists()
    with serving(home, port=port) as server:
        record = finish(start(blend, out, server, "--workers", "2"))
    assert record["shards"]["reused"] >= 1
    assert tree(out) == expected


def test_a_prefect_server_that_is_back_in_time_is_not_missed(blend, expected, tmp_path):
    out, home, port = tmp_path / "out", tmp_path / "home", free_port()
    home.mkdir()
    with serving(home, port=port) as server:
        run = start(blend, out, server, "--workers", "2")
        wait_for_receipts(out, 5, lambda: run.poll() is None)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with serving(home, port=port):
        finish(run)
    assert tree(out) == expected
