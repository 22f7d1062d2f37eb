"""Nights as flow runs on a real Prefect server: what it is told of each blend, and how a night with a failure ends."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import StateType
from tokenmill.flows.nightly import reprep_changed_blends
from tokenmill.tasks.nightly.diff import diff
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.tokenize.kind import PRETRAIN

from tests.flows.prefect_commands import wait_until
from tests.flows.preparation_runs import called
from tests.preparing import write_lines
from tests.preparing_rl import write_rows
from tests.tokenize.small_vocabularies import word_piece

pytestmark = pytest.mark.slow

WEB, BOOKS, BAD, QUESTIONS, TYPO = "pretrain/web", "pretrain/books", "pretrain/bad", "rl/questions", "rl/typo"


class Blends:
    """Two blends of text with a dataset in common, one whose rows are bad, one of rows for RL, and settings of none."""

    def __init__(self, folder, cluster):
        self.folder, self.out = folder, folder / "out"
        self.text("common", "abc" * 300)
        self.text("more", "xyz" * 100)
        write_rows(folder / "questions.jsonl", [{"prompt": f"question {number}"} for number in range(50)])
        self.blend(WEB, "common", "more")
        self.blend(BOOKS, "common")
        self.text("bad", [b"{broken"] * 30)
        self.blend(BAD, "bad")
        self.blend(QUESTIONS, "questions")
        tokenizer = {"tokenizer": {"model": str(word_piece(folder / "vocabulary"))}, "cluster": cluster}
        (folder / "blends/pretrain/defaults.yaml").write_text(yaml.safe_dump(tokenizer))
        (folder / "blends/rl/typo.yaml").write_text("")
        (folder / "blends/rl/questions.yaml").write_text(f"transforms: [{{select: [prompt]}}]\ncluster: {cluster}\n")

    def text(self, name, words):
        os.utime(write_lines(self.folder / f"{name}.jsonl", list(words)), (1_000_000_000, 1_000_000_000))

    def blend(self, name, *datasets):
        path = self.folder / "blends" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        sources = [{"name": each, "path": f"../../{each}.jsonl"} for each in datasets]
        path.write_text(json.dumps({"datasets": sources}))

    def run(self):
        """A night; its final state."""
        return reprep_changed_blends(str(self.folder / "blends"), str(self.out), return_state=True)

    def latest(self, name):
        ((_, record),) = json.loads((self.out / name / "latest.json").read_bytes()).items()
        return record


@pytest.fixture(scope="module")
def blends(tmp_path_factory, dask_cluster):
    return Blends(tmp_path_factory.mktemp("nightly"), dask_cluster)


def events(server, blends, since, count):
    """The first `count` events of `blends` from `since` on, oldest first, with their payloads. Other tests share the server."""
    wanted = {"event": {"prefix": ["tokenmill.blend."]}, "occurred": {"since": since.isoformat()}, "order": "ASC"}
    body = json.dumps({"filter": wanted}).encode()
    request = Request(f"{server.url}/events/filter", body, {"Content-Type": "application/json"})

    def enough():
        with urlopen(request, timeout=10) as response:
            found = json.load(response)["events"]
        own = [event for event in found if event["payload"]["blend"].startswith(f"{blends.folder}/")]
        return own if len(own) >= count else None

    found = wait_until(enough, 30)
    return [
        (event["event"].rpartition(".")[2], event["resource"]["prefect.resource.id"], event["payload"])
        for event in found
    ]


def table_of(server, flow_run):
    """The table that a night left with its run, by blend."""
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
    (table,) = (each for each in server.client().read_artifacts(artifact_filter=of_run) if each.type == "table")
    return {row["blend"]: row for row in json.loads(table.data)}


def test_failed_blends_do_not_stop_others_and_are_retried(blends, prefect_api):
    began = datetime.now(UTC)
    state = blends.run()
    assert state.type == StateType.FAILED
    error = str(state.result(raise_on_failure=False))
    assert error.startswith(
        "2 of 5 blends failed, all others are up to date: pretrain/bad: dataset 'bad': 30 of 30 rows are"
    )
    assert "rl/typo: " in error
    assert "known: questions.json" in error
    table = table_of(prefect_api, state.state_details.flow_run_id)
    assert {name: row["result"] for name, row in table.items()} == {
        WEB: "prepared", BOOKS: "prepared", QUESTIONS: "prepared", BAD: "failed", TYPO: "failed",
    }  # fmt: skip
    assert [(table[name]["built"], table[name]["reused"]) for name in (BOOKS, WEB)] == [(1, 0), (1, 1)]
    assert "30 of 30 rows are bad" in table[BAD]["why"]
    assert not (blends.out / BAD / "latest.json").exists()
    first = {name: blends.latest(name)["version"] for name in (WEB, BOOKS, QUESTIONS)}
    for name in (WEB, BOOKS):
        assert verify(blends.latest(name)["path"], PRETRAIN.inspect).problems == []

    blends.text("bad", "mno" * 100)
    blends.text("more", "xyz" * 200)
    (blends.folder / "blends/rl/typo.yaml").unlink()
    state = blends.run()
    assert state.is_completed()
    record = state.result()["nightly"]
    assert (record["prepared"], record["unchanged"], record["failed"]) == (2, 2, 0)
    assert {source["path"] for source in record["made_from"]} == {
        str(blends.folder / "blends" / f"{name}.json") for name in (WEB, BOOKS, QUESTIONS, BAD)
    }
    assert blends.latest(WEB)["before"] == first[WEB]
    assert {name: blends.latest(name)["version"] for name in (BOOKS, QUESTIONS)} == {
        name: first[name] for name in (BOOKS, QUESTIONS)
    }
    grown = ["more: 1 grown (more.jsonl: 4.2 kB -> 8.4 kB)"]
    assert record["blends"][WEB]["why"] == grown[0]
    before, after = record["blends"][WEB]["diff"].removeprefix("tokenmill diff ").split()
    assert [place.rpartition("/")[2] for place in (before, after)] == [first[WEB], record["blends"][WEB]["version"]]
    assert {(each.dataset, each.what) for each in diff(before, after).findings if each.what != "kept"} == {
        ("more", "new")
    }

    told = events(prefect_api, blends, began, 13)
    assert [(what, resource.removeprefix("tokenmill.blend.")) for what, resource, _ in told] == [
        ("changed", "pretrain.bad"), ("failed", "pretrain.bad"),
        ("changed", "pretrain.books"), ("prepared", "pretrain.books"),
        ("changed", "pretrain.web"), ("prepared", "pretrain.web"),
        ("changed", "rl.questions"), ("prepared", "rl.questions"), ("failed", "rl.typo"),
        ("changed", "pretrain.bad"), ("prepared", "pretrain.bad"),
        ("changed", "pretrain.web"), ("prepared", "pretrain.web"),
    ]  # fmt: skip
    *_, changed, prepared = (payload for *_, payload in told)
    assert changed["reasons"] == prepared["reasons"] == grown
    assert prepared["path"] == blends.latest(WEB)["path"]
    assert prepared["shards"] == {"total": 2, "built": 1, "reused": 1}
    assert Path(changed["blend"]) == blends.folder / "blends/pretrain/web.json"
    of_web = FlowRunFilter(name=FlowRunFilterName(any_=[f"{WEB}-{blends.latest(WEB)['version']}"]))
    runs = prefect_api.client().read_flow_runs(flow_run_filter=of_web)
    assert [run.state.name for run in runs] == ["Completed"], "its preparation is a run of its own"


def test_a_night_that_partly_failed_prints_what_became_of_each_blend_and_exits_with_one(
    prefect_api, dask_cluster, tmp_path
):
    blends = Blends(tmp_path, dask_cluster)
    for name in (WEB, BOOKS, BAD):
        (tmp_path / f"blends/{name}.json").unlink()
    done = called("nightly", tmp_path / "blends", "--output-dir", blends.out)
    assert done.returncode == 1
    assert "\ntokenmill: 1 of 2 blends failed, all others are up to date: rl/typo: " in done.stderr
    night = json.loads(done.stdout)["nightly"]
    assert (night["prepared"], night["failed"], night["prune_error"]) == (1, 1, None)
    assert {name: row["result"] for name, row in night["blends"].items()} == {QUESTIONS: "prepared", TYPO: "failed"}
    assert "known: questions.json" in night["blends"][TYPO]["why"]
    assert not (blends.out / "flow_run.json").exists()
