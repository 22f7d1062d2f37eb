import json
import os
import random
import signal
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterFlowRunId
from prefect.client.schemas.objects import StateType
from tokenmill.flows.pretrain import pretrain_data_prep
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.kind import Needs, Stage
from tokenmill.tasks.shards.settings import ClusterSettings
from tokenmill.tasks.shards.stage import shard_workers
from tokenmill.tasks.tokenize.kind import PRETRAIN
from tokenmill.tasks.tokenize.settings import PretrainSettings

from tests.flows.prefect_commands import wait_until
from tests.flows.preparation_runs import DEADLINE, finish, wait_for_receipts
from tests.flows.preparation_runs import start_small as start
from tests.preparing import blend_of, build_pending, prepare, tree, write_lines

pytestmark = pytest.mark.slow

SETTINGS = {"shard_size": 20_000}


def words(seed):
    source = random.Random(seed)
    return " ".join(source.choice(["mill", "grain", "stone", "water", "wheel", "flour", "sack"]) for _ in range(40))


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    grain = write_lines(folder / "grain.jsonl", [words(number) for number in range(6_000)] + [b"{broken", b""])
    flour = write_lines(folder / "flour.jsonl", [words(-number) for number in range(1, 800)])
    for number in range(20):  # small files, in bundles
        write_lines(folder / "bran" / f"{number:02}.jsonl", [words(10_000 + number), b"{broken"][: 1 + number % 2])
    path = folder / "blend.json"
    blend = blend_of(grain, flour, folder / "bran", grain=2.0)
    path.write_text(json.dumps(blend))
    return path


@pytest.fixture(scope="module")
def expected(blend, tmp_path_factory):
    """The output of one undisturbed preparation in this process."""
    out = tmp_path_factory.mktemp("expected") / "out"
    planned, _ = prepare(str(blend), out, **SETTINGS)
    assert any(shard.part.members for shard in planned.plan.shards)
    return tree(out)


def test_a_killed_run_is_finished_by_the_same_command_even_twice_at_once(blend, expected, tmp_path, prefect_server):
    out = tmp_path / "out"
    process = start(blend, out, prefect_server, "--workers", "1")
    wait_for_receipts(out, 5, lambda: process.poll() is None)
    process.kill()
    process.communicate(timeout=DEADLINE)
    assert not (out / "blend.json").exists()
    before = {path: path.stat().st_ino for path in out.glob("shards/pretrain/*/receipt.json")}
    assert len(before) >= 5
    for record in map(finish, [start(blend, out, prefect_server, "--workers", "1") for _ in range(2)]):
        assert (record["type"], record["path"]) == ("pretrain", str(out))
    assert {path: path.stat().st_ino for path in before} == before, "what was proven is not written again"
    assert tree(out) == expected


def test_a_profile_names_any_cluster_class(blend, expected, tmp_path, prefect_api):
    profile = Path(__file__).parents[2] / "deployments" / "clusters" / "laptop.yaml"
    pretrain_data_prep(str(blend), str(tmp_path / "out"), cluster=str(profile), **SETTINGS)
    assert tree(tmp_path / "out") == expected


def planned(blend, out):
    return PRETRAIN.plan(load_blend(str(blend)), PretrainSettings(**SETTINGS, workers=1), str(out))


def test_a_batch_whose_shards_are_all_proven_shows_as_cached(blend, tmp_path, prefect_api):
    plan = planned(blend, tmp_path / "out")
    build_pending(plan)
    pending, store, arguments = plan.plan.pending, plan.plan.store, PRETRAIN.stages[0].arguments(plan)

    @flow(name="again")
    def again():
        with shard_workers(ClusterSettings(), Needs(1)) as build_shards:
            build_shards(PRETRAIN.stages[0], pending, store, arguments, rebuild=False)

    state = again(return_state=True)
    assert state.is_completed()
    of_run = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[state.state_details.flow_run_id]))

    def states():
        """Task runs reach the server's database a moment after the flow has ended."""
        runs = prefect_api.client().read_task_runs(task_run_filter=of_run)
        return all(run.state and run.state.is_final() for run in runs) and {run.state.name for run in runs}

    assert wait_until(states, DEADLINE) == {"Cached"}


def kill(shard, store):
    os.kill(os.getpid(), signal.SIGKILL)


def test_run_fails_after_repeated_worker_deaths(blend, tmp_path, prefect_api):
    plan = planned(blend, tmp_path / "out").plan
    pending, store = plan.pending[:1], plan.store  # the flow travels to workers, with what it names

    @flow(name="mapped")
    def mapped():
        with shard_workers(ClusterSettings(), Needs(1)) as build_shards:
            build_shards(Stage("kill", kill), pending, store, {}, rebuild=False)

    state = mapped(return_state=True)
    assert state.type == StateType.FAILED
    error = state.result(raise_on_failure=False)
    assert isinstance(error, RunError)
    assert "KilledWorker" in str(error)
    assert "run the same command again" in str(error)
