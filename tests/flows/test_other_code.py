"""Workers of a standing cluster with other code, other libraries or no tokenmill are refused before anything is built."""

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import tokenmill
from distributed import Client
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards import executor, workers
from tokenmill.tasks.shards.kind import Needs
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.settings import ClusterSettings

from tests.building import plan_here
from tests.flows.standing_clusters import scheduler, worker
from tests.preparing import blend_of, write_lines

ROOT = Path(tokenmill.__file__).parent
LIBRARIES = ("tokenmill", "pyarrow")


def other_code(folder):
    """This tokenmill, but for one line of the kind."""
    copied(folder, "flows", "tasks")
    with (folder / "tokenmill/tasks/filter/rules.py").open("a") as file:
        file.write("\n# another rule\n")


def older(folder):
    """A tokenmill of before there was a check."""
    copied(folder, "flows", "tasks")
    (folder / "tokenmill/tasks/shards/code.py").unlink()


def copied(folder, *packages):
    ignored = shutil.ignore_patterns("__pycache__")
    for name in packages:
        shutil.copytree(ROOT / name, folder / "tokenmill" / name, ignore=ignored)
    shutil.copy(ROOT / "__init__.py", folder / "tokenmill")


def missing(folder):
    (folder / "tokenmill.py").write_text("raise ModuleNotFoundError('No module named tokenmill', name='tokenmill')\n")


def other_library(folder):
    (folder / "pyarrow-0.1.dist-info").mkdir()
    (folder / "pyarrow-0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: pyarrow\nVersion: 0.1\n")


@pytest.fixture
def planned(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", ["hello world"] * 3)
    return plan_here("filter", blend_of(file), tmp_path / "out", rules=[])


def built(planned):
    return planned.plan.store.proven(planned.plan.keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (other_code, r"would build other data: tokenmill \S+\+\w+ \(here \S+\+\w+\); install the same"),
        (older, r"have a different tokenmill, without this check; here is \S+\+\w+; install the same"),
        (missing, r"have no tokenmill, which the run has as \S+\+\w+; install the same"),
        (other_library, r"would build other data: pyarrow 0\.1 \(here \d+\S+\); install the same"),
        (None, None),
    ],
)
def test_workers_with_other_code_are_rejected(tmp_path, planned, environment, words):
    paths = tmp_path / "there"
    paths.mkdir()
    if environment:
        environment(paths)
    with ExitStack() as stack:
        address, _ = stack.enter_context(scheduler(tmp_path))
        settings = {"PYTHONPATH": str(paths), "PYTHONSAFEPATH": "1"}
        stack.enter_context(worker(address, tmp_path, "other", settings=settings))
        client = stack.enter_context(Client(address))

        def build():
            with workers.pool_for(ClusterSettings(cluster=address), Needs(None)) as pool:
                preparation("filter").build(planned, executor.building_on(pool, LIBRARIES))

        if words is None:
            build()
            assert built(planned)
        else:
            with pytest.raises(InputError, match=rf"^cluster: 1 of 1 workers, on 127\.0\.0\.1, {words}"):
                build()
            assert not built(planned)
            assert len(client.scheduler_info()["workers"]) == 1


def test_late_worker_with_other_code_does_not_build(planned):
    kind, (shard,) = preparation("filter"), planned.plan.pending
    store = replace(planned.plan.store, built_with={"tokenmill": "0.0.1+1234abcd"})
    build = executor.build_work
    with pytest.raises(
        RunError, match=r"this worker would build other data: tokenmill \S+ \(in the run 0\.0\.1\+1234abcd\)"
    ):
        build([shard], {}, "", kind.stages[0], store, kind.stages[0].arguments(planned), rebuild=False)
    assert not built(planned)


def test_a_receipt_records_what_built_it(planned):
    kind = preparation("filter")
    stage, plan = kind.stages[0], planned.plan
    build = executor.building_on(executor.here, LIBRARIES)
    build(stage, plan.pending, plan.store, stage.arguments(planned), rebuild=False)
    (receipt,) = built(planned).values()
    assert receipt.volatile["built_with"].keys() == {"tokenmill", "pyarrow"}
    assert receipt.volatile["built_with"]["pyarrow"] == pa.__version__
