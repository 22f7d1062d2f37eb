"""What Kubernetes and Slurm say of workers that do not come."""

import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.wait import PodQueue, slurm_jobs

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
