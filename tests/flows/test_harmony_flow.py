"""The Harmony flow on a real Prefect server and real Dask workers."""

import json

import pytest
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.shards.verify import verify

from tests.flows.preparation_runs import called
from tests.preparing_rl import write_rows

pytestmark = pytest.mark.slow


def talk(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


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
