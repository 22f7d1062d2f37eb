"""The deduplication flow on a real Prefect server and real Dask workers: the same bytes whatever happens to it on the
way, and no pair of likes left, across datasets and splits.
"""

import json
import random
from contextlib import nullcontext
from itertools import combinations

import pyarrow.parquet as pq
import pytest
import yaml
from prefect.client.schemas.objects import StateType
from tokenmill.flows.dedup import deduplicate_blend

from tests.dedup.test_near import corpus, prose, truth
from tests.flows import preparation_runs
from tests.flows.preparation_runs import DEADLINE, finish, receipts, wait_for_receipts
from tests.preparing import tree
from tests.preparing_dedup import prepare
from tests.preparing_rl import write_rows

pytestmark = pytest.mark.slow

BAD = [b"{broken", b'{"text": null}', b""]
COPIES, COPIED = 40, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Versions and copies of texts, shuffled over two training sets and one for validation, and an evaluation that some
    hold; and the settings for them.
    """
    folder, generator = tmp_path_factory.mktemp("data"), random.Random(0)
    texts = corpus(11, originals=90)
    texts += [f" {text} " for text in generator.sample(texts, COPIES)]
    exam = [prose(generator, 30) for _ in range(COPIED)]
    texts += [f"{prose(generator, 40)} {question}" for question in exam]
    generator.shuffle(texts)
    rows = [{"text": text, "at": number, "topic": number % 5} for number, text in enumerate(texts)]
    third = len(rows) // 3
    write_rows(folder / "one.jsonl", [*rows[:third], *BAD])
    write_rows(folder / "two.jsonl", rows[third : 2 * third])
    write_rows(folder / "three.jsonl", rows[2 * third :])
    write_rows(folder / "exam.jsonl", [{"question": question} for question in exam])
    train = [{"name": name, "path": str(folder / f"{name}.jsonl"), "weight": 2.0} for name in ("one", "two")]
    (folder / "blend.json").write_text(
        json.dumps({"train": train, "valid": [{"name": "three", "path": str(folder / "three.jsonl")}]})
    )
    exams = [{"name": "exam", "path": str(folder / "exam.jsonl"), "text_field": "question"}]
    settings = {"shard_size": 15_000, "max_bad_row_fraction": 0.1, "evaluations": {"datasets": exams}}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return folder


def settings_of(folder):
    return yaml.safe_load((folder / "settings.yaml").read_text())


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """The output of one undisturbed run in this process."""
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare(str(folder / "blend.json"), out, **settings_of(folder))
    return tree(out)


def run(folder, out, **changed):
    """The flow in this process; its final state."""
    return deduplicate_blend(
        str(folder / "blend.json"), str(out), return_state=True, **{**settings_of(folder), **changed}
    )


def start(folder, out, server):
    """The flow as a command with one worker."""
    arguments = ["--workers", "1", "--config", str(folder / "settings.yaml")]
    return preparation_runs.start("dedup", folder / "blend.json", out, server, *arguments)


def rows_in(paths):
    return [
        json.loads(line) for path in paths for line in path.read_bytes().splitlines() if line.startswith(b'{"text": "')
    ]


def test_no_likes_are_left_and_nothing_else_is_gone(folder, tmp_path, prefect_api):
    """Built by one run in this process, published and recorded by a flow that builds nothing."""
    out = tmp_path / "out"
    decided, _ = prepare(str(folder / "blend.json"), out, **settings_of(folder))
    ((kind, record),) = run(folder, out).result().items()
    assert kind == record["type"] == "dedup"
    assert record["shards"] == {"total": len(decided.plan.shards), "built": 0, "reused": len(decided.plan.shards)}
    assert len(decided.plan.shards) > 10
    rows = {row["at"]: row for row in rows_in(folder / f"{name}.jsonl" for name in ("one", "two", "three"))}
    kept = {row["at"]: row for row in rows_in(sorted((out / "data").rglob("*.jsonl")))}
    assert kept.items() <= rows.items()
    numbers = sorted(rows)
    exactly = {
        (one, other)
        for one, other in combinations(numbers, 2)
        if rows[one]["text"].strip() == rows[other]["text"].strip()
    }
    alike = {(numbers[one], numbers[other]) for one, other in truth([rows[number]["text"] for number in numbers])}
    near = alike - exactly
    assert len(exactly) >= COPIES
    assert len(near) > 100
    assert not any({*pair} <= kept.keys() for pair in exactly)
    assert sum({*pair} <= kept.keys() for pair in near) <= 0.05 * len(near)
    dropped = record["dropped"]
    assert (dropped["exact_duplicate"], dropped["contaminated"]) == (COPIES, COPIED)
    assert {name: dropped[name] for name in ("malformed_json", "null_text", "blank_line")} == {
        "malformed_json": 1, "null_text": 1, "blank_line": 1,
    }  # fmt: skip
    assert record["documents"] == len(kept)
    assert record["rows"] == len(rows) + len(BAD) == len(kept) + sum(dropped.values())
    edges = pq.read_table(out / "edges.parquet").to_pylist()
    places = named(folder)
    found = {tuple(sorted((places[edge["dropped"]], places[edge["kept"]]))) for edge in edges}
    assert found <= alike, "every edge is a pair of likes"
    assert len(edges) == dropped["exact_duplicate"] + dropped["near_duplicate"]
    across = {(edge["dropped"].rpartition("/")[0], edge["kept"].rpartition("/")[0]) for edge in edges}
    assert {("train/one", "train/two"), ("valid/three", "train/one"), ("train/two", "valid/three")} <= across


def named(folder):
    """The number of each row by the name that edges call it, which counts from the row where its slice begins."""
    found = {}
    for split, name in (("train", "one"), ("train", "two"), ("valid", "three")):
        place = first = row = 0
        for line in (folder / f"{name}.jsonl").read_bytes().splitlines(keepends=True):
            if place // 15_000 > first // 15_000 or (place and place % 15_000 == 0):
                first, row = place - place % 15_000, 0
            if line.startswith(b'{"text": "'):
                found[f"{split}/{name}/{name}.jsonl@{first}#{row}"] = json.loads(line)["at"]
            place, row = place + len(line), row + 1
    return found


def test_a_killed_run_is_finished_by_the_same_command_even_twice_at_once(folder, expected, tmp_path, prefect_server):
    out = tmp_path / "out"
    process = start(folder, out, prefect_server)
    wait_for_receipts(out, 14, lambda: process.poll() is None)
    process.kill()
    process.communicate(timeout=DEADLINE)
    assert not (out / "blend.json").exists()
    before = {path: path.stat().st_ino for path in out.glob("shards/*/*/receipt.json")}
    assert receipts(out) >= 14
    for record in map(finish, [start(folder, out, prefect_server) for _ in range(2)]):
        assert (record["type"], record["path"]) == ("dedup", str(out))
    assert {path: path.stat().st_ino for path in before} == before, "what was proven is not written again"
    assert tree(out) == expected


def test_a_run_with_gaps_after_its_rounds_cannot_end_completed(folder, tmp_path, prefect_api, monkeypatch):
    out = tmp_path / "out"
    prepare(str(folder / "blend.json"), out, **settings_of(folder))
    for path in out.glob("shards/dedup/*/all.jsonl"):
        path.unlink()
    for name in ("blend.json", "manifest.json"):
        (out / name).unlink()
    monkeypatch.setattr("tokenmill.flows.preparation.shard_workers", lambda *_: nullcontext(lambda *_, **__: ()))
    state = run(folder, out)
    assert state.type == StateType.FAILED
    assert "don't have a receipt" in str(state.result(raise_on_failure=False))
    assert not (out / "blend.json").exists()
