"""Engines in processes of their own: whether workers may start them, and which GPU those see."""

import os
import subprocess
import sys
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed import Client, LocalCluster
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.score import machine, processes
from tokenmill.tasks.score.preparation import build_score_shard
from tokenmill.tasks.score.processes import device_for_good, require_children, workers_fit_for
from tokenmill.tasks.shards.cluster import LOCAL
from tokenmill.tasks.shards.worker import worker_number

from tests.preparing_rl import write_rows
from tests.preparing_scores import plan
from tests.score.test_embed import tokenizer
from tests.score.tiny_models import llama

REPOSITORY = Path(__file__).parents[2]
DEADLINE = 120


def what_its_child_returns():
    """The number of this worker, and the exit status of a process that it starts."""
    require_children("vllm")
    child = get_context("spawn").Process(target=print)
    child.start()
    child.join()
    return worker_number(), child.exitcode


@pytest.mark.slow
def test_workers_of_a_local_cluster_start_processes_where_the_engine_does():
    with workers_fit_for("vllm"), LocalCluster(n_workers=1, **LOCAL) as cluster, Client(cluster) as client:
        assert client.submit(what_its_child_returns).result(timeout=DEADLINE) == (0, 0)


@pytest.mark.slow
def test_a_worker_that_may_not_start_processes_says_what_to_do():
    with workers_fit_for("transformers"), LocalCluster(n_workers=1, **LOCAL) as cluster, Client(cluster) as client:
        found = client.submit(what_its_child_returns).exception(timeout=DEADLINE)
    assert isinstance(found, RunError)
    assert "DASK_DISTRIBUTED__WORKER__DAEMON=False in the environment of `dask worker`" in str(found)


@pytest.mark.slow
def test_a_worker_that_is_started_as_it_is_written_starts_processes_and_has_a_number():
    arguments = ["--nthreads", "1", "--resources", "GPU=1", "--name", "gpu-3", "--no-dashboard"]
    importable = os.pathsep.join(map(str, (REPOSITORY, Path(__file__).parent)))
    environment = {**os.environ, "DASK_DISTRIBUTED__WORKER__DAEMON": "False", "PYTHONPATH": importable}
    with LocalCluster(n_workers=0, **LOCAL) as cluster, Client(cluster) as client:
        dask = str(Path(sys.executable).with_name("dask"))
        worker = subprocess.Popen([dask, "worker", cluster.scheduler_address, *arguments], env=environment)
        try:
            found = client.submit(what_its_child_returns, resources={"GPU": 1}).result(timeout=DEADLINE)
        finally:
            worker.terminate()
            worker.wait()
    assert found == (3, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "cuda:2", "2"),
        ("5,7,9", "cuda:2", "9"),
        ("GPU-a, GPU-b", "cuda:1", "GPU-b"),
        ("5,7,9", "cuda", "5,7,9"),
        (None, None, "None"),
    ],
)
def test_what_a_process_starts_sees_the_gpu_that_it_was_dealt(visible, device, expected):
    child = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    code = (
        "import subprocess, sys\n"
        "from tokenmill.tasks.score.processes import see_only\n"
        f"see_only({device!r})\n"
        f"see_only({device!r})\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY, env=environment
    )
    assert found.stdout.strip() == expected, found.stderr


@pytest.fixture
def of_four_gpus(monkeypatch):
    """A process that sees four GPUs, until it is let see fewer."""
    for each in (device_for_good, processes._seen_at_first):  # noqa: SLF001 - this process has had its first look
        each.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(machine, "gpus", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    yield
    for each in (device_for_good, processes._seen_at_first):  # noqa: SLF001 - see above
        each.cache_clear()


def test_an_engine_is_made_once_for_all_slices_on_the_gpu_of_its_worker(of_four_gpus, tmp_path, monkeypatch):
    made = []

    class Engine:
        def __init__(self, **_):
            made.append(os.environ["CUDA_VISIBLE_DEVICES"])
            self.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer())

        def encode(self, texts):
            return [{"embedding": [1.0, 2.0]} for _ in texts]

    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=Engine))
    llama().save_pretrained(tmp_path / "model")
    rows = [{"row_id": str(number), "text": "w1 " * 30} for number in range(60)]
    source = str(write_rows(tmp_path / "rows.jsonl", rows))
    planned = plan("embed", source, tmp_path / "out", engine="sglang", model=str(tmp_path / "model"))
    assert len(planned.plan.pending) > 1
    for shard in planned.plan.pending:
        build_score_shard(shard, planned.plan.store, asdict(planned.found), "fail")
    assert made == ["6"]
