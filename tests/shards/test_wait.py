"""Waiting on real Dask clusters that are lost in one way or another."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from dask_jobqueue import SLURMCluster
from distributed import Client, KilledWorker, LocalCluster
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards import executor, wait
from tokenmill.tasks.shards.executor import submitted, wait_for
from tokenmill.tasks.shards.wait import ClusterWatch, PodQueue, job_queue, slurm_jobs


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


@pytest.mark.parametrize(
    ("workers", "resources", "words"),
    [
        (0, {}, "has not had a worker for .*cluster_timeout"),
        (1, {"GPU": 1}, "has not had a worker with the resources GPU=1"),
    ],
)
def test_a_standing_cluster_without_suitable_workers_is_given_up(workers, resources, words):
    with (
        cluster(workers) as found,
        watching(found.scheduler_address, resources, timeout=0.05) as (client, watch, _),
        pytest.raises(RunError, match=words),
    ):
        wait_for([client.submit(double, 21, resources=resources)], watch.check, lambda: None)


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


# What Kubernetes and Slurm say of workers that do not come.

UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient cpu.",
        }
    ],
}  # fmt: skip
UNPULLED = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "True"}],
    "containerStatuses": [
        {"state": {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "nowhere/image"'}}}
    ],
}


DISCOVERY = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": {
        "kind": "APIResourceList", "groupVersion": "v1",
        "resources": [{"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": ["list"]}],
    },
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
}  # fmt: skip
"""What a client asks first of an API (https://kubernetes.io/docs/concepts/overview/kubernetes-api/)."""


@pytest.fixture(scope="module")
def statuses(tmp_path_factory):
    """The statuses of the pods of the cluster `mill`, which a server of the Kubernetes API lists."""
    statuses = []

    class Api(BaseHTTPRequestHandler):
        def do_GET(self):
            asked = urlsplit(self.path)
            answer = DISCOVERY.get(asked.path.rstrip("/"))
            if asked.path == "/api/v1/namespaces/training/pods":
                assert parse_qs(asked.query)["labelSelector"] == ["dask.org/cluster-name=mill"]
                found = [
                    {"kind": "Pod", "metadata": {"name": f"mill-{number}", "namespace": "training"}, "status": status}
                    for number, status in enumerate(statuses)
                ]
                answer = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found}
            body = json.dumps(answer).encode()
            self.send_response(503 if statuses == ["no answer"] and asked.path.endswith("/pods") else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_): ...

    server = HTTPServer(("127.0.0.1", 0), Api)
    Thread(target=server.serve_forever, daemon=True).start()
    named = {"cluster": {"server": f"http://127.0.0.1:{server.server_port}"}, "name": "here"}
    configuration = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here", "clusters": [named],
        "contexts": [{"context": {"cluster": "here", "user": "me"}, "name": "here"}],
        "users": [{"name": "me", "user": {}}],
    }  # fmt: skip
    path = tmp_path_factory.mktemp("kubernetes") / "config"
    path.write_text(yaml.safe_dump(configuration))
    with patch.dict(os.environ, {"KUBECONFIG": str(path)}):
        yield statuses
    server.shutdown()


@pytest.fixture
def pods(statuses):
    statuses.clear()
    return statuses


def queue():
    return PodQueue(SimpleNamespace(name="mill", namespace="training"))


@pytest.mark.slow
def test_pods_that_no_node_has_room_for_are_waited_for_in_kubernetes_words(pods):
    assert queue().waiting_for() == "its pods: none created yet"
    pods += [UNSCHEDULABLE, UNSCHEDULABLE, {"phase": "Running", "conditions": []}]
    assert (
        queue().waiting_for() == "its pods: 2 Unschedulable (0/3 nodes are available: 3 Insufficient cpu.), 1 Running"
    )


def test_a_pod_that_cannot_start_ends_the_run(pods):
    pods += [UNSCHEDULABLE, UNPULLED]
    with pytest.raises(RunError, match=r"cannot start pod mill-1 \(ImagePullBackOff: Back-off pulling .*correct image"):
        queue().waiting_for()


def test_a_kubernetes_that_does_not_answer_does_not_end_the_run(pods):
    pods.append("no answer")
    assert queue().waiting_for().startswith("its pods are not known: ")


def test_silent_slurm_gives_empty_job_states(tmp_path, monkeypatch):
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert slurm_jobs(["7"]) == {"7": ("UNKNOWN", "slurm_load_jobs error: Unable to contact slurm controller")}
    squeue.write_text("#!/bin/sh\necho '7|PENDING|Resources'\necho '8|RUNNING|None'\n")
    assert slurm_jobs(["7", "9"]) == {"7": ("PENDING", "Resources"), "9": ("GONE", "None")}
