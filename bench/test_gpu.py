"""Every part of the benchmark for GPUs runs on a CPU at toy size, so that no minute of a GPU is spent on finding out."""

import json
import os
import subprocess
import sys
import time

import pytest

from bench import gpu
from bench.child import ROOT
from bench.record import Measure


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_part_holds_its_checks_or_gives_its_reason(tmp_path):
    command = [sys.executable, "-m", "bench.gpu", "--dry-run"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "BENCH_FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = json.loads(gpu.DRY.read_bytes())["parts"]
    assert [name for name, part in parts.items() if part["measures"]] == [*gpu.PARTS]
    assert [name for name, part in parts.items() if part["not_run"]] == ["train", "server", "trainers", "loading"]


def measured(result, *, check):
    return Measure("a loss", "2", "1", result, "nats", 0.5, at_least=False, check=check)


def hang(folder):
    yield measured(0.0, check=True)
    time.sleep(60)


def fail(folder):
    yield measured(0.25, check=True)
    raise ValueError("out of memory")


@pytest.mark.parametrize(
    ("work", "failed"),
    [
        (lambda folder: iter([measured(1.0, check=False), "no GPU"]), None),
        (lambda folder: iter([measured(1.0, check=True), measured(0.5, check=True)]), "a loss: 1 nats, not ≤ 0.5 nats"),
        (lambda folder: iter([measured(float("nan"), check=False)]), "a loss: nan nats, not ≤ 0.5 nats"),
        pytest.param(hang, "stopped after 2 s", marks=pytest.mark.slow),
        (fail, "ValueError: out of memory"),
    ],
    ids=["target missed", "check missed", "not a number", "hangs", "raises"],
)
def test_results_of_a_part(tmp_path, monkeypatch, work, failed):
    monkeypatch.setattr(gpu.child, "ROOT", tmp_path)
    found = gpu.Part("some", work).result(2 if work is hang else 30)
    assert found["measures"]
    assert (failed is None) == (not found["failed"])
    assert all(failed in reason for reason in found["failed"])
