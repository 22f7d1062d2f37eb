"""Waiting on real Dask clusters that are lost in one way or another."""

import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from dask import config
from distributed import Client, LocalCluster
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards import pool, wait
from tokenmill.tasks.shards.pool import wait_for
from tokenmill.tasks.shards.wait import ClusterWatch


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(pool, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(wait, "CHECK_SECONDS", 0.0)


@contextmanager
def cluster(workers):
    """A cluster in this process, whose threads take no time to start."""
    settings = {"processes": False, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(n_workers=workers, **settings) as found:
        yield found


@contextmanager
def watching(place, resources=None, adaptive=False):
    """A client, a watch of it, and the list of what it tells; `place` is a cluster of ours or the address of another."""
    told = []
    with Client(place, set_as_default=False) as client:
        yield client, ClusterWatch(client, resources or {}, adaptive, told.append), told


def double(number):
    return 2 * number


def test_the_wait_ends_with_the_last_future_whether_it_did_well_or_not():
    with cluster(1) as found, watching(found) as (client, watch, told):
        futures = [client.submit(double, 21), client.submit(double, None)]
        wait_for(futures, watch.check, lambda: None)
        assert [future.status for future in futures] == ["finished", "error"]
        assert not told


def test_a_cluster_of_our_own_whose_workers_have_ended_is_not_waited_for():
    with cluster(1) as found, watching(found) as (client, watch, _):
        future = client.submit(time.sleep, 0.5)
        found.sync(found.workers[0].close)
        with pytest.raises(RunError, match=r"all Dask workers of this run have ended; finished shards are kept"):
            wait_for([future], watch.check, lambda: None)


def test_a_cluster_that_grows_as_needed_is_waited_for():
    with cluster(0) as found, watching(found, adaptive=True) as (client, watch, _):
        future = client.submit(double, 21)
        found.adapt(minimum=0, maximum=1, interval="10ms")
        wait_for([future], watch.check, lambda: None)
        assert future.result() == 42


def test_a_standing_cluster_has_time_to_get_a_worker_and_says_so_once():
    with cluster(0) as found, watching(found.scheduler_address) as (client, watch, told):
        future = client.submit(double, 21)
        for _ in range(3):
            watch.check()
        assert len(told) == 1
        assert f"waiting up to 600 s for a worker of the Dask cluster at {found.scheduler_address}" in told[0]
        found.scale(1)
        wait_for([future], watch.check, lambda: None)
        assert future.result() == 42


def test_a_standing_cluster_without_workers_is_given_up_when_dasks_own_setting_says_so():
    with (
        config.set({"distributed.scheduler.no-workers-timeout": "50ms"}),
        cluster(0) as found,
        watching(found.scheduler_address) as (client, watch, _),
        pytest.raises(RunError, match=r"has not had a worker for .*NO_WORKERS_TIMEOUT"),
    ):
        wait_for([client.submit(double, 21)], watch.check, lambda: None)


def test_workers_without_the_resources_do_not_count():
    with (
        config.set({"distributed.scheduler.no-workers-timeout": "50ms"}),
        cluster(1) as found,
        watching(found.scheduler_address, {"GPU": 1}) as (client, watch, _),
        pytest.raises(RunError, match="has not had a worker with the resources GPU=1"),
    ):
        wait_for([client.submit(double, 21, resources={"GPU": 1})], watch.check, lambda: None)


LOST_THREAD = """
import sys, time
from prefect_dask.task_runners import DaskTaskRunner
from tokenmill.tasks.shards import pool, wait
from tokenmill.tasks.shards.cluster import LOCAL, started
wait.CHECK_SECONDS = 1.0
shown = []
with started(DaskTaskRunner(cluster_kwargs={**LOCAL, "processes": False, "n_workers": 1})) as runner:
    future = runner.client.submit(time.sleep, 3600)
    runner.client.loop.add_callback(sys.exit)
    watch = wait.ClusterWatch(runner.client, {}, False, print)
    try:
        pool.wait_for([future], watch.check, lambda: shown.append(future))
    finally:
        print(len(shown))
"""


@pytest.mark.slow
def test_a_thread_of_dask_that_has_ended_ends_the_wait_and_the_process():
    ended = subprocess.run(
        [sys.executable, "-c", LOST_THREAD], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith(
        "ClusterLostError: the connection to the Dask cluster of this run is lost; finished shards are kept: run the same "
        "command again to continue"
    ), ended.stderr
    assert int(ended.stdout) < 10, "it sleeps between looks"
