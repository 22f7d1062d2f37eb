"""Incremental RL preparation: a plan asks for the shards whose bytes would be others, says why, and for nothing else."""

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.plan import pending_reasons

from tests.building import publish_here
from tests.preparing import blend_of, in_two_files, of_two_files, pending
from tests.preparing_rl import build, plan, prepare, write_rows
from tests.tokenize.small_vocabularies import byte_level_bpe

ROWS = [
    {"input": f"Question {number}?", "output": f"Answer {number * 7919 % 1000}.", "quality": "good", "used_in": "tiny"}
    for number in range(60)
]
GIVEN = {"shard_size": 600, "target": "nemo_rl_sft"}
"""The settings of all tests: shards of some six rows."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A corpus and its preparation, which the tests that take this leave as it is."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(of_two_files(in_two_files(folder / "corpus", ROWS)), folder / "out", **GIVEN)
    return folder


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return byte_level_bpe(tmp_path_factory.mktemp("vocabulary"), size=400)


def test_rows_that_are_counted_hang_on_the_limit_and_the_tokenizer(prepared, vocabulary, tmp_path):
    out, chosen = tmp_path / "out", GIVEN | {"tokenizer": {"model": str(vocabulary)}, "allow_shrink": ["a", "b"]}
    prepare(of_two_files(prepared / "corpus"), out, max_tokens=15, **chosen)
    assert pending(plan(of_two_files(prepared / "corpus"), out, max_tokens=15, **chosen)) == []
    other = plan(of_two_files(prepared / "corpus"), out, max_tokens=16, **chosen)
    assert pending_reasons(other) == {"recipe.max_tokens changed: 15 -> 16": len(other.plan.shards)}
    chosen |= {"tokenizer": {"model": str(byte_level_bpe(tmp_path / "other", size=401))}}
    ((reason, count),) = pending_reasons(plan(of_two_files(prepared / "corpus"), out, max_tokens=15, **chosen)).items()
    assert reason == f"recipe.tokenizer changed: {vocabulary} -> {tmp_path / 'other'}"
    assert count == len(other.plan.shards)
    moved = Path(shutil.copytree(vocabulary, tmp_path / "moved"))
    chosen |= {"tokenizer": {"model": str(moved)}}
    assert pending(plan(of_two_files(prepared / "corpus"), out, max_tokens=15, **chosen)) == []


def test_the_last_rows_held_out_cost_the_shards_that_hold_them(prepared):
    planned = plan(of_two_files(prepared / "corpus"), prepared / "out", val_holdout=3, **GIVEN)
    assert [name for name, _ in pending(planned)] == ["a.jsonl", "b.jsonl"]
    for name, start in pending(planned):
        assert start == max(shard.part.start for shard in planned.plan.shards if shard.part.file.uri.endswith(name))


def test_the_splits_of_the_source_take_training_data_as_it_is(tmp_path):
    write_rows(tmp_path / "in/train.jsonl", ROWS[:40])
    write_rows(tmp_path / "in/test.jsonl", ROWS[40:])
    only = blend_of(tmp_path / "in")
    first, _ = prepare(only, tmp_path / "out", **GIVEN)
    second, manifest = prepare(only, tmp_path / "out", splits="source", **GIVEN)
    assert first.plan.pending
    assert second.plan.pending == []
    assert len(Path(manifest["test"]).read_bytes().splitlines()) == 20


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"filters": {"quality": "good"}}, "recipe.filters.quality changed: None -> ['good']"),
        ({"used_in": "tiny"}, "recipe.filters.used_in changed: None -> ['tiny']"),
        ({"transforms": ["sft"]}, "recipe.transforms changed: [] -> ['sft']"),
    ],
    ids=str,
)
def test_read_parts_rebuild_only_their_dataset(prepared, fields, reason):
    changed = of_two_files(prepared / "corpus")
    changed["datasets"][1] |= fields
    planned = plan(changed, prepared / "out", **GIVEN)
    assert {name for name, _ in pending(planned)} == {"b.jsonl"}
    (count,) = pending_reasons(planned).values()
    assert pending_reasons(planned) == {reason: sum(shard.dataset == "b" for shard in planned.plan.shards)}
    assert count > 2


@pytest.mark.parametrize("key", ["text_field", "messages_field", "tools_field"])
def test_fields_that_other_preparations_read_mean_nothing_here(prepared, key):
    assert pending(plan(of_two_files(prepared / "corpus", **{key: "other"}), prepared / "out", **GIVEN)) == []


def test_of_parquet_every_column_counts(tmp_path):
    """All of a row is written, so all of it is what a shard is made from."""
    path = tmp_path / "some.parquet"

    def written(seconds, **columns):
        rows = [{**row, **{name: values[at] for name, values in columns.items()}} for at, row in enumerate(ROWS)]
        pq.write_table(pa.Table.from_pylist(rows), path)
        os.utime(path, (seconds, seconds))

    written(1_000_000_000)
    prepare(blend_of(path), tmp_path / "out", **GIVEN)
    written(1_000_000_001)
    assert pending(plan(blend_of(path), tmp_path / "out", **GIVEN)) == []
    written(1_000_000_002, quality=["bad"] + ["good"] * 59)
    assert pending_reasons(plan(blend_of(path), tmp_path / "out", **GIVEN)) == {"source content changed": 1}
    written(1_000_000_003)
    renamed = pq.read_table(path).rename_columns(["input", "output", "grade__", "used_in"])
    pq.write_table(renamed, path)
    assert pending_reasons(plan(blend_of(path), tmp_path / "out", **GIVEN)) == {"source content changed": 1}


# Tables that placeholders point into.

QUESTIONS = [("How many?", "Ten"), ("How few?", "Two"), ("How far?", "Far")]


def table(path, questions=QUESTIONS, seconds=1_000_000_000, **more):
    rows = [
        {"prompt": [{"role": "user", "content": question}], "reward_model": {"ground_truth": answer}, **more}
        for question, answer in questions
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    os.utime(path, (seconds, seconds))
    return path


@pytest.fixture
def resolving(tmp_path):
    """A blend of a dataset that is filled in from a table and of one that is as it is, prepared."""
    fill = [
        {"dataset": "some", "_hf_placeholder": {"row": at % 3, "question_template": "{question}"}} for at in range(9)
    ]
    path = table(tmp_path / "table.parquet")
    paths = [write_rows(tmp_path / "fill.jsonl", fill), write_rows(tmp_path / "plain.jsonl", ROWS[:9])]
    one, other = blend_of(*paths)["datasets"]
    one["transforms"] = [{"resolve_placeholders": {"some": {"path": str(path), "style": "skywork"}}}]
    both = {"datasets": [one, other]}
    prepare(both, tmp_path / "out")
    return both


def answers(manifest):
    rows = [json.loads(line) for line in Path(manifest["train"]).read_bytes().splitlines()]
    return [row["expected_answer"] for row in rows if "expected_answer" in row]


def test_changed_table_rebuilds_only_its_rows(tmp_path, resolving):
    table(tmp_path / "table.parquet", [("How many?", "All"), *QUESTIONS[1:]], seconds=1_000_000_001)
    planned, manifest = prepare(resolving, tmp_path / "out")
    assert {name for name, _ in pending(planned)} == {"fill.jsonl"}
    assert answers(manifest) == ["All", "Two", "Far"] * 3
    assert manifest["mode"] == "resolve"


def test_touched_moved_or_extended_table_does_not_rebuild(tmp_path, resolving):
    os.utime(tmp_path / "table.parquet")
    assert pending(plan(resolving, tmp_path / "out")) == []
    table(tmp_path / "table.parquet", note="some column more")
    assert pending(plan(resolving, tmp_path / "out")) == []
    moved = (tmp_path / "table.parquet").rename(tmp_path / "moved.parquet")
    resolving["datasets"][0]["transforms"][0]["resolve_placeholders"]["some"]["path"] = str(moved)
    planned, manifest = prepare(resolving, tmp_path / "out", force=True)
    assert len(planned.plan.pending) == 2
    assert answers(manifest) == ["Ten", "Two", "Far"] * 3
    assert pending(plan(resolving, tmp_path / "out")) == []


def test_new_style_or_table_name_rebuilds_its_rows(tmp_path, resolving):
    tables = resolving["datasets"][0]["transforms"][0]["resolve_placeholders"]
    tables["some"]["style"] = "dapo"
    assert {name for name, _ in pending(plan(resolving, tmp_path / "out"))} == {"fill.jsonl"}
    tables["some"]["style"] = "skywork"
    assert pending(plan(resolving, tmp_path / "out")) == []
    tables["other"] = dict(tables["some"])
    assert {name for name, _ in pending(plan(resolving, tmp_path / "out"))} == {"fill.jsonl"}


def test_tables_that_settings_name_lie_where_the_command_is_given(tmp_path, resolving, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = [{"resolve_placeholders": {"some": {"path": "table.parquet", "style": "skywork"}}}]
    del resolving["datasets"][0]["transforms"]
    planned = plan(resolving, tmp_path / "other", transforms=here)
    monkeypatch.chdir("/")
    build(planned, planned.plan.pending)
    assert answers(publish_here("rl", planned, 0.0)) == ["Ten", "Two", "Far"] * 3


def test_missing_table_is_rejected_by_its_name_in_rows(tmp_path, resolving):
    (tmp_path / "table.parquet").unlink()
    with pytest.raises(InputError, match=r"table 'some': .*table\.parquet does not exist"):
        plan(resolving, tmp_path / "out")
