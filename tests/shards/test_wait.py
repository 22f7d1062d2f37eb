"""Waiting on real Dask clusters that are lost in one way or another."""

import re
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from dask_jobqueue import SLURMCluster
from distributed import Client, KilledWorker, LocalCluster
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards import executor, wait
from tokenmill.tasks.shards.executor import submitted, wait_for
from tokenmill.tasks.shards.wait import ClusterWatch, job_queue


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(executor, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(wait, "CHECK_SECONDS", 0.0)


@contextmanager
def cluster(workers):
    """A cluster in this process, whose threads take no time to start."""
    settings = {"processes": False, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(n_workers=workers, **settings) as found:
        yield found


@contextmanager
def watching(place, resources=None, adaptive=False, timeout=None):
    """A client, a watch of it, and the list of what it tells; `place` is a cluster of ours or the address of another."""
    told = []
    with Client(place, set_as_default=False) as client:
        yield client, ClusterWatch(client, resources or {}, adaptive, told.append, timeout), told


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


def test_standing_cluster_gets_time_for_a_worker():
    with cluster(0) as found, watching(found.scheduler_address) as (client, watch, told):
        future = client.submit(double, 21)
        for _ in range(3):
            watch.check()
        assert len(told) == 1
        assert f"waiting up to 600 s for a worker of the Dask cluster at {found.scheduler_address}" in told[0]
        found.scale(1)
        wait_for([future], watch.check, lambda: None)
        assert future.result() == 42


def test_workers_that_join_and_end_are_counted():
    with cluster(0) as found, watching(found.scheduler_address) as (client, watch, told):
        found.scale(1)
        client.wait_for_workers(1)
        found.sync(found.workers[0].close)
        watch.check()
    assert re.search(r"; 1 worker has joined, on \S+, and ended: the log there shows why", told[0])


def test_repeated_worker_deaths_are_explained():
    killed = Future()
    killed.set_exception(KilledWorker("key", SimpleNamespace(address="tcp://10.0.0.7:1"), 3))
    assert re.match(
        "KilledWorker: 4 workers in a row ended while they worked on it, the last at tcp://10.0.0.7:1; its log",
        submitted(killed).failure(),
    )


def test_a_standing_cluster_without_workers_is_given_up_after_the_timeout():
    with (
        cluster(0) as found,
        watching(found.scheduler_address, timeout=0.05) as (client, watch, _),
        pytest.raises(RunError, match=r"has not had a worker for .*cluster_timeout"),
    ):
        wait_for([client.submit(double, 21)], watch.check, lambda: None)


def test_workers_without_the_resources_do_not_count():
    with (
        cluster(1) as found,
        watching(found.scheduler_address, {"GPU": 1}, timeout=0.05) as (client, watch, _),
        pytest.raises(RunError, match="has not had a worker with the resources GPU=1"),
    ):
        wait_for([client.submit(double, 21, resources={"GPU": 1})], watch.check, lambda: None)


def test_adaptive_cluster_has_a_minute_and_job_queues_no_limit():
    with cluster(0) as found, watching(found, adaptive=True) as (_, watch, told):
        watch.check()
        assert told[0].startswith("waiting up to 60 s for a worker")
    with slurm_cluster() as found, watching(found) as (_, watch, told):
        watch.check()
        assert told[0].startswith("waiting for a worker")
        assert told[0].endswith("its jobs: none submitted yet")


@contextmanager
def slurm_cluster(**chosen):
    """A cluster of Slurm jobs, on a machine without Slurm."""
    options = {"dashboard_address": None, "host": "127.0.0.1"}
    with job_queue(SLURMCluster)(cores=1, memory="1GB", scheduler_options=options, **chosen) as found:
        yield found


def test_rejected_job_ends_the_wait_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(SLURMCluster.job_cls, "submit_command", "cat /nowhere")
    with slurm_cluster(n_workers=1) as found, watching(found) as (client, watch, _):
        future = client.submit(double, 21)
        with pytest.raises(RunError, match="rejects worker jobs: cat: /nowhere: No such file or directory; correct"):
            wait_for([future], watch.check, lambda: None)


LOST_THREAD = """
import sys, time
from prefect_dask.task_runners import DaskTaskRunner
from tokenmill.tasks.shards import executor, wait
from tokenmill.tasks.shards.cluster import LOCAL, started
wait.CHECK_SECONDS = 1.0
shown = []
with started(DaskTaskRunner(cluster_kwargs={**LOCAL, "processes": False, "n_workers": 1})) as runner:
    future = runner.client.submit(time.sleep, 3600)
    runner.client.loop.add_callback(sys.exit)
    watch = wait.ClusterWatch(runner.client, {}, False, print)
    try:
        executor.wait_for([future], watch.check, lambda: shown.append(future))
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
