"""`tokenmill doctor`: what is there, what is not, and what a broken thing is."""

import http.server
import json
import threading

import pytest
from tokenmill.tasks.report.doctor import examine

from tests.flows.preparation_runs import called


def states(place, server=None):
    return {check.name: check for check in examine(str(place), server)}


@pytest.fixture
def server():
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_server_is_there_broken_or_optional(tmp_path, server):
    assert states(tmp_path, f"{server}/api")["Prefect server"].state == "ok"
    assert states(tmp_path, f"{server}/other")["Prefect server"].state == "broken"
    assert "http://127.0.0.1:9" in states(tmp_path, "http://127.0.0.1:9/api")["Prefect server"].found
    assert states(tmp_path)["Prefect server"].state == "optional"


def test_gpus_are_listed_by_the_driver(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states(tmp_path)["CUDA"].state == "optional"
    for script, state, found in [
        ("echo 'GPU 0: H100 (UUID: GPU-1)'; echo 'GPU 1: H100 (UUID: GPU-2)'", "ok", "GPU 0: H100; GPU 1: H100"),
        ("exit 9", "broken", "9"),
        ("echo No devices found", "optional", "no GPU"),
    ]:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        check = states(tmp_path)["CUDA"]
        assert check.state == state
        assert found in check.found
        assert bool(check.remedy) == (state != "ok")


def test_a_token_is_found_and_never_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert states(tmp_path)["Hub token"].state == "ok"
    shown = called("doctor", tmp_path)
    assert shown.returncode == 0
    assert "Hub token" in shown.stdout
    assert "hf_secret" not in shown.stdout + shown.stderr


def test_each_check_that_is_not_ok_has_a_remedy_in_every_format(tmp_path):
    checks = json.loads(called("doctor", tmp_path, "--format", "json").stdout)["doctor"]["checks"]
    assert {"Python", "Prefect server", "Dask", "disk", "Hub token", "CUDA"} <= {check["name"] for check in checks}
    assert all(bool(check["remedy"]) == (check["state"] != "ok") for check in checks)
    table = called("doctor", tmp_path).stdout
    assert all(check["name"] in table and check["remedy"] in table for check in checks)
