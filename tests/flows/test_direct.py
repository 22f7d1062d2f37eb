"""Preparations without a Prefect server: the same bytes, without Prefect, and without Dask for little work."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import pytest
from prefect.client.schemas.sorting import FlowRunSort
from tokenmill.flows.cli import run
from tokenmill.flows.direct import run_preparation
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.shards import executor, retry
from tokenmill.tasks.shards.kind import Needs, Stage
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.settings import ClusterSettings
from tokenmill.tasks.shards.store import locked
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.shards.workers import pool_for
from tokenmill.tasks.tokenize.kind import PRETRAIN, worker_arguments
from tokenmill.tasks.tokenize.settings import PretrainSettings

from tests.flows.cloning import REPOSITORY
from tests.flows.prefect_commands import clean_environment
from tests.flows.preparation_runs import called
from tests.peers.conversations import assistant, talk, user
from tests.preparing import blend_of, prepare, tree, write_lines
from tests.preparing_rl import write_rows

NAMES = ("rye", "oat", "barley")

LOADED = """
import sys
from tokenmill.flows.cli import run
code = run(sys.argv[1:])
loaded = {"prefect", "distributed"} & set(sys.modules)
print(*sorted(loaded), file=sys.stderr)
sys.exit(code)
"""
"""The command, which then says what it has imported."""


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    files = [write_lines(folder / f"{name}.jsonl", [f"{name} {number}" for number in range(500)]) for name in NAMES]
    path = folder / "blend.json"
    path.write_text(json.dumps(blend_of(*files)))
    return path


@pytest.fixture(scope="module")
def expected(blend, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare(str(blend), out)
    return tree(out)


def prepared(blend, out, *options, environment=None):
    """What a command has imported of Prefect and Dask."""
    command = [sys.executable, "-c", LOADED, "pretrain", str(blend), "--output-dir", str(out), *options]
    home = {"HOME": str(out.parent), "PREFECT_HOME": str(out.parent / "prefect")}
    given = clean_environment() | home | (environment or {})
    run = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, env=given, check=False)
    assert run.returncode == 0, run.stderr
    return run.stderr.splitlines()[-1].split()


@pytest.mark.slow
def test_little_work_needs_neither_prefect_nor_dask(blend, expected, tmp_path):
    assert prepared(blend, tmp_path / "out") == []
    assert tree(tmp_path / "out") == expected


@pytest.mark.slow
def test_engines_encode_in_threads_of_this_process(tmp_path):
    """Eight shards of 1 MB: more than is built without workers by kinds whose work is in Python."""
    data = write_lines(tmp_path / "a.jsonl", [f"{number} rye " * 100 for number in range(7_000)])
    path = tmp_path / "blend.json"
    path.write_text(json.dumps(blend_of(data)))
    assert prepared(path, tmp_path / "threads", "shard_size=1MB") == []
    assert prepared(path, tmp_path / "workers", "--workers", "2", "shard_size=1MB") == ["distributed"]
    assert tree(tmp_path / "threads") == tree(tmp_path / "workers")


@pytest.mark.slow
def test_workers_without_prefect_make_the_same_bytes(blend, expected, tmp_path):
    assert prepared(blend, tmp_path / "out", "--workers", "2") == ["distributed"]
    assert tree(tmp_path / "out") == expected
    assert prepared(blend, tmp_path / "out", "--workers", "2") == [], "nothing is to be built"


@pytest.mark.slow
def test_configured_server_sees_little_work_too(blend, expected, tmp_path, prefect_server):
    client, output = prefect_server.client(), str(tmp_path / "out")
    assert "prefect" in prepared(blend, tmp_path / "out", environment=prefect_server.environment)
    latest = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC)  # other processes use this server
    runs = [run for run in latest if run.parameters.get("output_dir") == output]
    assert [run.state.name for run in runs] == ["Completed"]
    assert tree(tmp_path / "out") == expected


ACTIVE, OTHER = (f'active = "{name}"\n[profiles.a]\n[profiles.b]\nPREFECT_API_URL = "http://two/api"' for name in "ba")
NAMED = {"prefect.toml": 'profiles_path = "mine.toml"', "mine.toml": ACTIVE}
CONFIGURED = {
    "nowhere": ({}, {}, None),
    "in the environment": ({"prefect_api_url": "http://one/api"}, {}, "http://one/api"),
    "in the active profile": ({}, {"home/profiles.toml": ACTIVE}, "http://two/api"),
    "in another profile": ({}, {"home/profiles.toml": OTHER}, None),
    "in a profile that is chosen": ({"PREFECT_PROFILE": "b"}, {"home/profiles.toml": OTHER}, "http://two/api"),
    "in profiles elsewhere": ({"PREFECT_PROFILES_PATH": "mine.toml"}, {"mine.toml": ACTIVE}, "http://two/api"),
    "in profiles that prefect.toml names": ({}, NAMED, "http://two/api"),
    "in prefect.toml": ({}, {"prefect.toml": '[api]\nurl = "http://three/api"'}, "http://three/api"),
    "in pyproject.toml": ({}, {"pyproject.toml": '[tool.prefect]\napi.url = "http://four/api"'}, "http://four/api"),
    "in .env": ({}, {".env": "PREFECT_API_URL=http://five/api"}, "http://five/api"),
}

ASKED = """
import json, os, sys
from tokenmill.flows.direct import is_shown
from tests.forking import fork
for folder, variables in json.load(sys.stdin):
    def ask():
        os.chdir(folder)
        os.environ.update(variables)
        shown = is_shown()
        from prefect.settings import PREFECT_API_URL
        print(json.dumps([shown, PREFECT_API_URL.value()]), flush=True)
    os.waitpid(fork(ask), 0)
"""
"""Prefect finds its settings when it is imported, so each place has a process: a fork of one that has what Prefect imports."""


@pytest.mark.slow
def test_a_server_counts_as_configured_where_prefect_finds_it(tmp_path):
    asked = []
    for where, (variables, files, _) in CONFIGURED.items():
        (tmp_path / where / "home").mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / where / name).write_text(content)
        asked.append((str(tmp_path / where), {"PREFECT_HOME": str(tmp_path / where / "home")} | variables))
    run = subprocess.run(
        [sys.executable, "-c", ASKED], cwd=REPOSITORY, env=clean_environment(), input=json.dumps(asked),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = dict(zip(CONFIGURED, map(json.loads, run.stdout.splitlines()), strict=True))
    assert found == {where: [url is not None, url] for where, (*_, url) in CONFIGURED.items()}


# Errors.


@pytest.fixture
def planned(blend, tmp_path):
    settings = PretrainSettings(shard_size=20_000)
    return PRETRAIN.plan(load_blend(str(blend)), settings, str(tmp_path / "out"))


def failing(shard, store, marker, failures, error, **arguments):
    """A shard whose first builds fail; each attempt leaves a letter."""
    attempts = Path(marker, shard.key)
    made = attempts.read_text() if attempts.exists() else ""
    attempts.write_text(made + "x")
    if "rye" in shard.part.file.uri and len(made) < failures:
        raise {"reset": ConnectionResetError, "defect": ZeroDivisionError, "gone": FileNotFoundError}[error]("told")
    return PRETRAIN.stages[0].build(shard, store, **arguments)


def build(planned, tmp_path, failures, error):
    marker = tmp_path / "attempts"
    marker.mkdir()
    arguments = worker_arguments(planned) | {"marker": str(marker), "failures": failures, "error": error}
    try:
        stage, plan = Stage("failing", failing), planned.plan
        build = executor.building_on(executor.here, ())
        build(stage, plan.pending, plan.store, arguments, rebuild=False)
    finally:
        attempts = [len((marker / shard.key).read_text()) for shard in planned.plan.pending]
    return attempts


@pytest.mark.slow
def test_an_error_that_may_pass_is_tried_again(planned, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "RETRY_SECONDS", (0, 0, 0))
    assert sorted(build(planned, tmp_path, 3, "reset")) == [1, 1, 4]


@pytest.mark.parametrize(
    ("failures", "error", "told"),
    [(4, "reset", "ConnectionReset"), (1, "defect", "ZeroDivision"), (1, "gone", "FileNotFound")],
)
def test_lasting_error_is_reported_and_other_shards_kept(failures, error, told, planned, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "RETRY_SECONDS", (0, 0, 0))
    with pytest.raises(
        RunError, match=rf"1 of 3 batches failed: batch \d: {told}Error: told; finished shards are kept"
    ):
        build(planned, tmp_path, failures, error)
    assert sum(planned.plan.store.receipt(shard.key) is not None for shard in planned.plan.pending) == 2


@pytest.mark.slow
def test_workers_are_as_many_as_the_shards_of_the_largest_step(planned):
    def workers():
        found = psutil.Process(os.getpid()).children(recursive=True)
        return sum("spawn_main" in " ".join(each.cmdline()) for each in found)

    first, *others = planned.plan.pending
    store, arguments = planned.plan.store, worker_arguments(planned)
    with pool_for(ClusterSettings(), Needs(workers=2)) as pool:
        build_shards = executor.building_on(pool, ())
        build_shards(PRETRAIN.stages[0], [], store, arguments, rebuild=False)
        assert workers() == 0
        build_shards(PRETRAIN.stages[0], [first], store, arguments, rebuild=False)
        assert workers() == 1
        build_shards(PRETRAIN.stages[0], others, store, arguments, rebuild=False)
        assert workers() == 2
    assert workers() == 0


def test_a_run_that_waited_reuses_the_shards_of_the_first(blend, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    out, waits = str(tmp_path / "out"), Event()
    monkeypatch.setattr("tokenmill.flows.direct.say", lambda sentence: waits.set() if "waiting" in sentence else None)
    kind, found = preparation("pretrain"), load_blend(str(blend))
    with ThreadPoolExecutor(1) as second, locked(out):
        run = second.submit(run_preparation, kind, found, out, PretrainSettings())
        assert waits.wait(60)
        prepare(str(blend), out)
    assert run.result()["pretrain"]["shards"] == {"total": 3, "built": 0, "reused": 3}
    assert tree(out) == expected


def test_each_phase_prints_a_line_and_finished_work_prints_none(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    Path("texts.jsonl").write_text('{"text": "Rye bread keeps."}\n')
    phases = []
    for _ in range(2):
        assert run(["pretrain", "texts.jsonl", "-o", "out"]) == 0
        phases.append(re.findall(r"^tokenmill: ((?:\w+ )*\w+): ", capsys.readouterr().err, re.MULTILINE))
    assert phases == [["tokenize shards", "join prefixes", "publish"], ["publish"]]


def test_collapsed_behaviors_fail_the_command_after_publishing(tmp_path):
    rows = [talk(user(f"{number} times {number}?"), assistant(f"{number**2}.")) for number in range(300)]
    data, out = write_rows(tmp_path / "chats.jsonl", rows), tmp_path / "out"
    failed = called("harmony", data, "--output-dir", out, "selection.view=behavior", "dedup.mode=off")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "1 distinct structures in 300 rows are 0.333%" in " ".join(failed.stderr.split())
    assert verify(str(out), inspector_of(str(out))).problems == []
