"""The scoring flow on a real Prefect server and real Dask workers: the same bytes whatever happens to it on the way."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from distributed import Client, Scheduler, Worker
from prefect import task
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from tokenmill.flows.score import score_candidates
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.cluster import asking_for
from tokenmill.tasks.shards.executor import worker_number
from tokenmill.tasks.shards.runner import task_runner
from tokenmill.tasks.shards.stage import holding

from tests.flows import preparation_runs
from tests.flows.preparation_runs import TOKENMILL, called, wait_for_receipts
from tests.preparing import tree
from tests.preparing_scores import (
    RARE,
    confused_by_the_rare_word,
    harmony_model,
    normalization,
    prepare,
    rows_of,
    table_of,
)

FOLDERS = {"nll": "nll", "embed": "embeddings"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A normalization in some twelve slices."""
    folder = tmp_path_factory.mktemp("scored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenmill.tasks.harmony.shard.GROUP_CHARACTERS", 1)  # many row groups, hence many slices
        normalization(folder, count=24, rare=16)
    return folder


MODELS = {"random": [], "confused": [confused_by_the_rare_word]}


def settings(folder, what, model="random"):
    """The settings of a score; makes the model that NLL needs."""
    if what == "embed":
        return {"shard_size": 1_000}
    if not (folder / model).exists():
        harmony_model(folder / model, *MODELS[model])
    return {"shard_size": 1_000, "model": str(folder / model)}


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """What comes out of a score without a flow."""

    @cache
    def found(what):
        out = tmp_path_factory.mktemp("expected") / "out"
        prepare(what, str(folder / "out"), out, **settings(folder, what))
        return tree(out)

    return found


def start(folder, what, out, server, workers):
    """The flow as a command."""
    chosen = [f"{name}={value}" for name, value in settings(folder, what).items()]
    words = [
        TOKENMILL,
        "score",
        what,
        str(folder / "out"),
        "--output-dir",
        str(out),
        "--workers",
        str(workers),
        *chosen,
    ]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(words, env=server.environment, **quiet)


@pytest.mark.slow
def test_a_killed_run_of_two_workers_is_finished_by_one_with_the_same_bytes(prefect_server, folder, expected, tmp_path):
    out, what = tmp_path / "out", "embed"
    process = start(folder, what, out, prefect_server, 2)
    wait_for_receipts(out, 3, lambda: process.poll() is None)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    record = preparation_runs.finish(start(folder, what, out, prefect_server, 1))
    assert record["shards"]["reused"] >= 3
    assert tree(out) == expected(what)
    ids = table_of(out / FOLDERS[what])["row_id"].to_pylist()
    assert sorted(ids) == sorted(rows_of(folder / "out")["row_id"].to_pylist())


@pytest.mark.slow
def test_nan_fails_the_command_without_publishing(prefect_api, folder, tmp_path):
    out = tmp_path / "out"
    chosen = [f"{name}={value}" for name, value in settings(folder, "nll", "confused").items()]
    failed = called("score", "nll", folder / "out", "--output-dir", out, "--workers", 1, *chosen)
    stderr = failed.stderr
    assert failed.returncode == 1, stderr
    assert failed.stdout == ""
    (rare,) = [row["row_id"] for row in rows_of(folder / "out").to_pylist() if RARE in row["text"]]
    assert f"(row_id {rare}): the NLL of a token is nan" in stderr.replace("\n", " ")
    assert "Traceback" not in stderr
    assert {path.name for path in out.iterdir()} == {"manifest.json", "shards"}
    note = json.loads((out / "manifest.json").read_bytes())
    assert note["status"] == "failed"
    assert f"(row_id {rare})" in note["error"]
    checked = called("verify", out)
    assert checked.returncode == 1
    assert "the run failed and didn't publish" in checked.stderr.replace("\n", " ")


def test_dry_run_only_counts(folder, expected, tmp_path):
    prepare("embed", str(folder / "out"), tmp_path / "out", **settings(folder, "embed"))
    for place, pending in (
        (tmp_path / "out", 0),
        (tmp_path / "other", len(json.loads(expected("embed")["manifest.json"])["shards"])),
    ):
        result = called("score", "embed", folder / "out", "shard_size=1kB", "--output-dir", place, "--dry-run")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["plan"]["shards"]["pending"] == pending
    assert not (tmp_path / "other/embeddings").exists()


@pytest.mark.parametrize(
    ("what", "arguments", "words"),
    [
        ("nll", [], "model: missing"),
        ("nll", ["model=./nowhere"], "file or folder not found: './nowhere'"),
        ("embed", ["engine=hsh"], "engine"),
        ("embed", ["engine=server", "model=a/b"], "engine=server needs server"),
        ("embed", ["loss_on=final_only"], "loss_on: unknown key"),
    ],
)
def test_wrong_score_call_prints_one_line_and_writes_no_files(folder, tmp_path, what, arguments, words):
    result = called("score", what, folder / "out", "--output-dir", tmp_path / "out", *arguments)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_settings_for_the_other_score_are_rejected(prefect_api, folder, tmp_path):
    state = score_candidates(str(folder / "out"), str(tmp_path), "embed", loss_on="final_only", return_state=True)
    with pytest.raises(InputError, match="loss_on: unknown key"):
        state.result()


@pytest.mark.slow
def test_torch_is_not_needed_to_embed_by_hashing():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import tokenmill.flows.score, tokenmill.tasks.score.kind, tokenmill.tasks.score.shard\n"
        "from tokenmill.tasks.score.embed import HashEmbedder\n"
        "print(HashEmbedder().encode(['a']).shape)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert result.stdout.strip() == "(1, 256)", result.stderr


# GPUs: who may use one, and which.


@task
def numbered(number):
    return worker_number()


@pytest.mark.slow
def test_local_workers_have_resources_and_numbers(prefect_api):
    with task_runner("local", 2, {"GPU": 1}) as runner, asking_for(runner.client, {"GPU": 1}):
        futures = [runner.submit(numbered, {"number": number}) for number in range(8)]
        assert {future.result() for future in futures} <= {0, 1}
        resources = [worker["resources"] for worker in runner.client.scheduler_info()["workers"].values()]
        assert resources == [{"GPU": 1}] * 2


@pytest.mark.slow
def test_cluster_without_declared_gpu_is_rejected(prefect_api):
    command = "`CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS --nthreads 1 --resources GPU=1 --name gpu-0`"
    with task_runner("local", 1, {}) as runner, pytest.raises(InputError, match=command):  # noqa: SIM117
        with asking_for(runner.client, {"GPU": 1}):
            pass


def test_outside_of_a_cluster_a_process_is_number_0():
    assert worker_number() == 0


@pytest.mark.parametrize(("name", "number"), [("gpu-3", 3), (2, 2), ("gpu", None), (None, None)])
def test_the_number_of_a_worker_is_of_its_name_and_never_of_its_address(name, number):
    async def asked():
        async with (
            Scheduler(port=0, dashboard=False) as scheduler,
            Worker(scheduler.address, name=name, nthreads=1) as worker,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            assert worker.address[-1].isdecimal()
            return await client.submit(worker_number)

    assert asyncio.run(asked()) == number


@pytest.mark.slow
def test_runs_take_turns_on_declared_gpus(prefect_api):
    with holding("gpu"):
        pass  # nobody has, and nothing waits
    client = prefect_api.client()
    limit = client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="gpu", limit=1))
    try:
        with holding("gpu"):
            assert client.read_global_concurrency_limit_by_name("gpu").active_slots == 1
        assert client.read_global_concurrency_limit_by_name("gpu").active_slots == 0
        with holding(None):
            assert client.read_global_concurrency_limit_by_name("gpu").active_slots == 0
    finally:
        client.delete_global_concurrency_limit_by_name("gpu")
    assert limit
