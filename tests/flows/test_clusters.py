"""The whole flow on clusters that are made of several hosts, one of which is lost, and on one that speaks TLS.

Hosts are network namespaces, so that a cable can be cut: no connection is closed, packets just do not arrive any more.
"""

import asyncio
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed import Client, Security
from distributed.comm.core import connect

from tests.flows.prefect_commands import serving, wait_until
from tests.flows.preparation_runs import DEADLINE, finish, start_small, wait_for_receipts
from tests.flows.standing_clusters import network, scheduler, worker
from tests.preparing import tree

pytestmark = [pytest.mark.slow, pytest.mark.weekly]

HOSTS = [2, 3]
TCP_SECONDS = 12
"""What Dask waits for a peer that does not answer, 30 s by default and 11 at least."""

HEARTBEAT_SECONDS = 15
"""After which a worker without a heartbeat is given up: some seconds more than a healthy one is silent on busy cores, as
four that were given up fail their batch.
"""


@pytest.fixture(scope="module")
def hosts():
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command ip")
    with network(HOSTS) as found:
        yield found


@pytest.fixture(scope="module")
def server(hosts, tmp_path_factory):
    """A Prefect server that the hosts reach, as workers report to it."""
    with serving(tmp_path_factory.mktemp("home"), host=hosts.address) as found:
        yield found


def start(blend, out, server, address):
    return start_small(blend, out, server, "--cluster", address)


def names(address):
    with Client(address, set_as_default=False) as client:
        return {worker["name"] for worker in client.scheduler_info()["workers"].values()}


@pytest.fixture
def cluster(hosts, tmp_path):
    """A scheduler here, and a worker on each host; their addresses and processes."""
    patience = {
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": f"{TCP_SECONDS}s",
        "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": f"{HEARTBEAT_SECONDS}s",
    }
    with ExitStack() as stack:
        address, _ = stack.enter_context(scheduler(tmp_path, hosts.address, settings=patience))
        processes = [
            stack.enter_context(
                worker(address, tmp_path, f"host-{host}", hosts.host(host), hosts.on(host), settings=patience)
            )
            for host in HOSTS
        ]
        yield address, processes


def test_workers_without_a_prefect_address_are_rejected(cluster, blend, tmp_path, prefect_server, hosts):
    address, _ = cluster
    process = start(blend, tmp_path / "out", prefect_server, address)
    _, complaint = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2
    assert f"PREFECT_API_URL: 2 of 2 workers, tcp://{hosts.subnet}." in complaint
    assert "Traceback" not in complaint
    assert not list((tmp_path / "out").rglob("receipt.json"))


@pytest.mark.weekly
def test_late_workers_without_prefect_are_named(hosts, blend, tmp_path, prefect_server):
    with scheduler(tmp_path, hosts.address) as (address, _):
        process = start(blend, tmp_path / "out", prefect_server, address)
        wait_until((tmp_path / "out/shards/index.json").exists, DEADLINE)  # planned
        with worker(address, tmp_path, "late", hosts.host(2), hosts.on(2)):
            _, complaint = process.communicate(timeout=2 * DEADLINE)
    assert process.returncode == 2
    assert f"PREFECT_API_URL: 1 of 1 workers, tcp://{hosts.subnet}.2:" in complaint
    assert "Traceback" not in complaint


@pytest.mark.weekly
def test_cut_cable_only_costs_time(cluster, blend, expected, tmp_path, server, hosts):
    address, _ = cluster
    process = start(blend, tmp_path / "out", server, address)
    wait_for_receipts(tmp_path / "out", 5, lambda: process.poll() is None)
    hosts.cut(2)
    finish(process)
    assert names(address) == {"host-3"}
    found = tree(tmp_path / "out")
    assert expected.items() <= found.items()
    # A lost host may leave files of the shard that it was building, and no others.
    assert len({Path(name).parent for name in found.keys() - expected.keys()}) <= 1


def test_tls_by_dasks_environment_and_nobody_without_a_certificate(
    certificates, blend, expected, tmp_path, prefect_server
):
    with (
        scheduler(tmp_path, "tls://127.0.0.1", settings=certificates) as (address, _),
        worker(address, tmp_path, "safe", "tls://127.0.0.1", settings=certificates),
    ):
        trusted = SimpleNamespace(environment=prefect_server.environment | certificates)
        finish(start(blend, tmp_path / "out", trusted, address))
        assert tree(tmp_path / "out") == expected

        stranger = start(blend, tmp_path / "other", prefect_server, address)
        _, complaint = stranger.communicate(timeout=DEADLINE)
        assert stranger.returncode == 2
        assert "DASK_DISTRIBUTED__COMM__TLS" in complaint
        assert "Traceback" not in complaint
        for way, security in {"tls": Security.temporary(), "tcp": Security()}.items():
            with pytest.raises(OSError, match=r"TLS|certificate|SSL|Timed out|closed"):
                asyncio.run(connect(f"{way}{address[3:]}", timeout=2, **security.get_connection_args("client")))
