"""The Harmony flow on a real Prefect server and real Dask workers: the same bytes whatever happens to it on the way."""

import json
import os
import signal
import time

import pytest
import yaml
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.shards.verify import verify

from tests.flows import preparation_runs
from tests.flows.preparation_runs import DEADLINE, called, finish
from tests.preparing import tree
from tests.preparing_harmony import left_behind, prepare
from tests.preparing_rl import write_rows

pytestmark = pytest.mark.slow


def talk(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations in some twenty shards, a few of them bad, some copied, some out of an evaluation; and settings."""
    folder = tmp_path_factory.mktemp("chats")
    rows = [talk(f"What is {number} times {number}?", f"It is {number**2}.") for number in range(110)]
    asked = [" ".join(f"word{number * place % 97}" for place in range(1, 16)) for number in range(2, 7)]
    guilty = [talk(f"Say: {question}", "No.") for question in asked]
    write_rows(folder / "train.jsonl", [*rows[:60], b"{broken", {"messages": []}, *guilty, *rows[60:], *rows[:20]])
    write_rows(folder / "exam.jsonl", [{"text": question} for question in asked])
    (folder / "blend.json").write_text(
        json.dumps({"datasets": [{"name": "chats", "path": str(folder / "train.jsonl")}]})
    )
    exam = {"datasets": [{"name": "exam", "path": str(folder / "exam.jsonl")}]}
    settings = {"shard_size": 1_000, "max_bad_row_fraction": 0.5, "dedup": {"cap": 2, "evaluations": exam}}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return folder


def settings_of(folder):
    return yaml.safe_load((folder / "settings.yaml").read_text())


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """What comes out without a flow."""
    out = tmp_path_factory.mktemp("expected") / "out"
    _, manifest = prepare(str(folder / "blend.json"), out, **settings_of(folder))
    assert left_behind(manifest) == {"contaminated": 5, "exact_duplicate": 20}
    return tree(out)


def start(folder, out, server):
    """The flow as a command with one worker."""
    arguments = ["--workers", "1", "--config", str(folder / "settings.yaml")]
    return preparation_runs.start("harmony", folder / "blend.json", out, server, *arguments)


def proven(out):
    """The receipts of the store by what they prove: rows that are normalized or marked, rounds, selections."""
    found = {}
    for path in out.glob("shards/*/*/receipt.json"):
        identity = json.loads(path.read_bytes())["identity"]
        name = "marked" if "decided" in identity else identity["recipe"].get("step") or identity["kind"]
        found.setdefault(name, set()).add(path)
    return found


def wait_for(out, name, count, runs):
    """Until so many shards of a kind are proven, or nothing `runs` any more, which the caller's own checks will tell."""
    deadline = time.monotonic() + DEADLINE
    while len(proven(out).get(name, ())) < count and runs():
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.01)


def test_a_run_that_is_killed_at_a_later_step_is_finished_by_the_next(prefect_server, folder, expected, tmp_path):
    out = tmp_path / "out"
    process = start(folder, out, prefect_server)
    wait_for(out, "marked", 2, lambda: process.poll() is None)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "blend.json").exists()
    before = {path: path.stat().st_mtime_ns for paths in proven(out).values() for path in paths}
    finish(start(folder, out, prefect_server))
    assert tree(out) == expected
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_behaviors_that_have_collapsed_are_published_and_the_command_fails(prefect_api, tmp_path):
    rows = [talk(f"What is {number} times {number}?", f"It is {number**2}.") for number in range(300)]
    write_rows(tmp_path / "train.jsonl", rows)
    (tmp_path / "blend.json").write_text(
        json.dumps({"datasets": [{"name": "chats", "path": str(tmp_path / "train.jsonl")}]})
    )
    (tmp_path / "settings.yaml").write_text("selection: {view: behavior}")
    out = tmp_path / "out"
    words = ["harmony", tmp_path / "blend.json", "--output-dir", out, "--config", tmp_path / "settings.yaml"]
    failed = called(*words, "--workers", 1)
    assert failed.returncode == 1
    assert "1 distinct structures in 300 rows are 0.333%" in " ".join(failed.stderr.split())
    assert failed.stdout == ""
    assert verify(str(out), inspector_of(str(out))).problems == []
