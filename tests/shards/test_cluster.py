"""What a `cluster` setting may be, and what a person is told when it cannot be used."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest
from dask import config
from distributed import Client, LocalCluster
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.cluster import LOCAL, STARTS, local_arguments, local_cluster, local_size
from tokenmill.tasks.shards.runner import task_runner


def profile(folder, text):
    path = folder / "cluster.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def nobody():
    """An address that nobody listens at, because it is taken by a socket that does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


SILENT = "no Dask scheduler answers at tcp://{} .*`dask scheduler`"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("tcp://{}", SILENT),
        ("address: tcp://{}", SILENT),
        ("tls://{}", "TLS configuration.*DASK_DISTRIBUTED__COMM__TLS"),
        ("http://{}", "unknown address scheme 'http'"),
    ],
)
def test_unusable_address_is_explained(place, words, nobody, tmp_path):
    """Also to a notebook, which asks from inside its event loop."""
    written = place.format(nobody)
    address = profile(tmp_path, written) if written.startswith("address") else written

    async def cell():
        task_runner(address, None, {})

    with config.set({"distributed.comm.timeouts.connect": "200ms"}):
        for ask in (lambda: task_runner(address, None, {}), lambda: asyncio.run(cell())):
            with pytest.raises(InputError, match=words.format(nobody)):
                ask()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("cluster_clas: distributed.LocalCluster", "unknown key; did you mean 'cluster_class'"),
        ("cluster_class: distributed.LocalCluster\ncluster_kwargs: 3", "cluster_kwargs: .*dictionary"),
        ("- distributed.LocalCluster", "must hold a mapping"),
        ("{", "not valid YAML"),
        ("adapt_kwargs: {maximum: 3}", "either a cluster_class"),
        ("cluster_class: distributed.LocalCluster\naddress: tcp://a:1", "either a cluster_class"),
        ("cluster_class: no_such_cloud.Cluster", "No module named 'no_such_cloud'.*pip install no-such-cloud"),
        ("cluster_class: distributed.LocalClutser", "LocalClutser.*check its name"),
    ],
)
def test_unusable_profile_is_explained(text, complaint, tmp_path):
    with pytest.raises(InputError, match=complaint):
        task_runner(profile(tmp_path, text), None, {})


def test_an_ssh_cluster_asks_for_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.tasks.shards.runner.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install asyncssh"):
        task_runner(profile(tmp_path, "cluster_class: distributed.SSHCluster"), None, {})


def test_a_profile_reaches_the_task_runner_whole(tmp_path):
    text = "cluster_class: distributed.LocalCluster\ncluster_kwargs: {n_workers: 3}\nadapt_kwargs: {maximum: 9}"
    runner = task_runner(profile(tmp_path, f"{text}\nclient_kwargs: {{timeout: 7s}}\n_why: a comment"), None, {})
    assert (runner.cluster_kwargs, runner.adapt_kwargs) == ({"n_workers": 3}, {"maximum": 9})
    assert runner.client_kwargs["timeout"] == "7s"


@pytest.mark.slow
def test_local_workers_disable_prefect_plugins():
    """They are for commands, and workers import Prefect where plugins cannot start."""
    with (
        LocalCluster(**LOCAL, n_workers=1, env={"OTHER": "kept"}, host="127.0.0.1") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        (environment,) = client.run(lambda: dict(os.environ)).values()
    assert environment["PREFECT_PLUGINS_ENABLED"] == "false"
    assert environment["OTHER"] == "kept"


@pytest.mark.parametrize(
    ("shards", "wanted", "memory", "size"),
    [
        (2, 100_000, 64 << 30, 2),
        (9, 4, 64 << 30, 4),
        (100, 100_000, 2 << 30, 5),
        (100, None, 1, 1),
        (1, None, 64 << 30, 1),
    ],
)
def test_local_clusters_are_as_large_as_shards_and_memory(monkeypatch, shards, wanted, memory, size):
    monkeypatch.setattr("tokenmill.tasks.shards.cluster.MEMORY_LIMIT", memory)
    assert local_size(shards, wanted) == size


@pytest.mark.slow
def test_workers_leave_failures_to_the_run(capfd):
    with local_cluster(**local_arguments(1, {})) as cluster, Client(cluster, set_as_default=False) as client:
        failed = client.submit(os.kill, "nobody", 0)
        with pytest.raises(TypeError):
            failed.result()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_profiles_leave_ctrl_c_unchanged(tmp_path):
    program = (
        "import signal; from tokenmill.tasks.shards.runner import task_runner; before = signal.getsignal(signal.SIGINT);"
        f"task_runner({str(tmp_path / 'slurm.yaml')!r}, None, {{}});"
        "assert signal.getsignal(signal.SIGINT) is before"
    )
    (tmp_path / "slurm.yaml").write_text("cluster_class: dask_jobqueue.SLURMCluster\ncluster_kwargs: {cores: 1}\n")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


DIES = """\
import os, pathlib, signal
for place in sorted(pathlib.Path({folder!r}).glob("death-*"))[:1]:
    place.unlink()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [STARTS - 1, STARTS])
def test_workers_that_are_killed_while_they_start_are_started_again_a_few_times(deaths, tmp_path):
    """Each worker runs a file first that kills it, as often as there are deaths in the folder."""
    (tmp_path / "dies.py").write_text(DIES.format(folder=str(tmp_path)))
    for number in range(deaths):
        (tmp_path / f"death-{number}").touch()
    arguments = {**LOCAL, "n_workers": 1, "preload": [str(tmp_path / "dies.py")]}
    if deaths < STARTS:
        with local_cluster(**arguments) as cluster, Client(cluster) as client:
            assert client.submit(sum, [1, 2]).result(60) == 3
        return
    with pytest.raises(RunError, match=f"died during startup {STARTS} times in a row .*more memory"):
        local_cluster(**arguments)
