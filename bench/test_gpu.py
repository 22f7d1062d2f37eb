"""Every part of the benchmark for GPUs runs on a CPU at toy size, so that no minute of a GPU is spent on finding out."""

import json
import math

import pytest

from bench import gpu


@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_each_part_measures_or_gives_its_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_FOLDER", str(tmp_path))
    monkeypatch.setattr(gpu, "DRY", tmp_path / "gpu.json")
    assert gpu.main(["--dry-run"]) == 0
    parts = json.loads(gpu.DRY.read_bytes())["parts"]
    assert [name for name, part in parts.items() if part["measures"]] == ["train", "scores", "loading"]
    assert [name for name, part in parts.items() if part["skipped"]] == ["train", "server", "trainers", "loading"]
    assert all(math.isfinite(each["result"]) for part in parts.values() for each in part["measures"])


@pytest.mark.slow
def test_a_part_is_stopped_at_its_limit():
    assert gpu.run_part("server", 0.01, dry=True)["failed"] == "failed: stopped after 0.01 s"
