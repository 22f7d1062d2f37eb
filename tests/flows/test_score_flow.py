"""The scoring flow on a real Prefect server and real Dask workers: the same bytes whatever happens to it on the way."""

import asyncio
import json
import sys
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

from tests.flows.preparation_runs import called, ran
from tests.preparing_scores import RARE, confused_by_the_rare_word, harmony_model, normalization, rows_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A normalization in some twelve slices."""
    folder = tmp_path_factory.mktemp("scored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenmill.tasks.harmony.shard.GROUP_CHARACTERS", 1)  # many row groups, hence many slices
        normalization(folder, count=24, rare=16)
    return folder


@pytest.mark.slow
def test_nan_fails_the_command_without_publishing(prefect_api, folder, tmp_path):
    out = tmp_path / "out"
    model = harmony_model(tmp_path / "confused", confused_by_the_rare_word)
    chosen = ["shard_size=1kB", f"model={model}", "--workers", 1]
    failed = called("score", "nll", folder / "out", "--output-dir", out, *chosen)
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
    result = ran(sys.executable, "-c", code, cwd=Path(__file__).parents[2])
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
    assert worker_number() == 0, "outside of a cluster"


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
