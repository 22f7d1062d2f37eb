"""Preparation on hosts that are reached by a real OpenSSH server."""

import asyncio
import re
from types import SimpleNamespace

import psutil
import pytest
import yaml
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.runner import task_runner

from tests.flows import ssh
from tests.flows.prefect_commands import free_port, wait_until
from tests.flows.preparation_runs import DEADLINE, finish, receipts, start_small
from tests.preparing import tree
from tests.test_deployments_folder import FOLDER

pytestmark = [pytest.mark.weekly, pytest.mark.skipif(bool(ssh.MISSING), reason=str(ssh.MISSING))]


@pytest.fixture(scope="module")
def sshd():
    with ssh.ssh_server() as found:
        yield found


def profile(folder, options, **chosen):
    """The profile of deployments/clusters with hosts that are here."""
    shipped = yaml.safe_load((FOLDER / "clusters/ssh.yaml").read_text())
    arguments = shipped["cluster_kwargs"]
    arguments |= {"hosts": ["localhost", "localhost", "127.0.0.1"], "connect_options": options, **chosen}
    arguments["worker_options"]["n_workers"] = 1
    path = folder / "ssh.yaml"
    path.write_text(yaml.safe_dump(shipped))
    return str(path)


def start(blend, out, environment, profile):
    return start_small(blend, out, SimpleNamespace(environment=environment), "--cluster", profile)


def on_hosts(program="distributed.cli.dask_spec"):
    """The processes that SSH has started."""
    processes = psutil.process_iter(["cmdline"])
    return [each.pid for each in processes if program in (each.info["cmdline"] or [])]


def test_quiet_ssh_run_publishes_the_same_bytes_and_cleans_up(
    sshd, blend, expected, prefect_server, certificates, tmp_path
):
    quiet = prefect_server.environment | certificates | {"DASK_LOGGING__DISTRIBUTED": "warning"}
    finish(start(blend, tmp_path / "out", quiet, profile(tmp_path, sshd.options)), 2 * DEADLINE)
    assert tree(tmp_path / "out") == expected
    wait_until(lambda: not on_hosts(), DEADLINE)


def test_the_hosts_of_a_killed_run_are_left_by_its_scheduler_and_workers(sshd, blend, prefect_server, tmp_path):
    process = start(blend, tmp_path / "out", prefect_server.environment, profile(tmp_path, sshd.options))
    wait_until(lambda: receipts(tmp_path / "out") > 2 or process.poll() is not None, DEADLINE)
    assert len(on_hosts()) == 3
    process.kill()
    process.communicate()
    wait_until(lambda: not on_hosts(), DEADLINE)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda sshd: {"client_keys": [sshd.stranger]}, r"hosts that cannot be used: localhost: Permission denied for user .* 127.0.0.1: Perm"),
        (lambda _: {"port": free_port()}, r"localhost: .*Connect call failed .*check that `ssh HOST` works without a question"),
        (lambda _: {"known_hosts": "/dev/null"}, "localhost: Host key is not trusted"),
    ],
)  # fmt: skip
def test_hosts_that_ssh_does_not_reach_are_all_named(change, complaint, sshd, blend, prefect_server, tmp_path):
    options = {**sshd.options, **change(sshd)}
    process = start(blend, tmp_path / "out", prefect_server.environment, profile(tmp_path, options))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(complaint, said), said
    assert "Traceback" not in said


def test_host_without_installation_is_named(sshd, tmp_path):
    runner = task_runner(profile(tmp_path, sshd.options, remote_python="/nowhere/python"), None, {})

    async def cell():
        with pytest.raises(RunError, match=r"localhost: .*/nowhere/python: No such file.* remote_python"):
            _ = runner.client

    asyncio.run(cell())


def test_a_host_that_never_answers_is_given_up(sshd, tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.tasks.shards.runner.REACH_SECONDS", 2.0)
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nsleep 3600\n")
    sleeper.chmod(0o755)
    runner = task_runner(profile(tmp_path, sshd.options, remote_python=str(sleeper)), None, {})
    with pytest.raises(RunError, match="no answer within 2 s"):
        _ = runner.client
