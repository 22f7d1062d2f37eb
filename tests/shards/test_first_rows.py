"""What a plan says about the first rows of each dataset is what a run makes of them."""

import gzip
import io
import json

import pytest
from rich.console import Console
from tokenmill.flows.cli import run
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.report.plan import print_plan
from tokenmill.tasks.shards.first_rows import MOST_ROWS, look
from tokenmill.tasks.shards.kinds import preparation

from tests.building import plan_here, prepare_here
from tests.preparing import blend_of, tree, write_lines
from tests.preparing_rl import write_rows
from tests.preparing_sft import chat_vocabulary

CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]}
GOOD = {"id": "1", "text": "hello world", **CHAT}


@pytest.fixture(scope="module")
def settings_of(tmp_path_factory):
    """The settings with which a kind needs nothing from elsewhere."""
    tokenizer = {"tokenizer": {"model": str(chat_vocabulary(tmp_path_factory.mktemp("chats")))}}
    chat = tokenizer | {"chat_template": "nano3"}
    return {"pretrain": tokenizer, "sft": chat, "rl": {"target": "nemo_gym"}, "embeddings": {"engine": "hash"}}


def look_at(kind, blend, out, **settings):
    planned = plan_here(kind, blend, out, **settings)
    return look(preparation(kind), planned)


KINDS = [
    ("pretrain", {"content": "hello"}, "missing_field: the row doesn't have the field 'text'; known: content"),
    ("filter", {"content": "hello"}, "missing_field: the row doesn't have the field 'text'; known: content"),
    ("dedup", {"content": "hello"}, "missing_field: the row doesn't have the field 'text'; known: content"),
    ("sft", {"messages": "hello"}, "no_messages: "),
    ("harmony", {"content": "hello"}, "no_messages: "),
    ("rl", {"content": "hello"}, "missing_field: there is no responses_create_params"),
    ("embeddings", {"content": "hello"}, "no_id: "),
]


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize(("kind", "bad", "reason"), KINDS, ids=[kind for kind, *_ in KINDS])
def test_plan_and_run_reject_the_same_rows(tmp_path, settings_of, kind, bad, reason, count):
    file = write_rows(tmp_path / "a.jsonl", [bad] * count)
    chosen = settings_of.get(kind, {})
    seen, refused = look_at(kind, blend_of(file), tmp_path / "out", **chosen)
    (first,) = seen.values()
    assert (first.rows, first.documents, first.every) == (count, 0, True)
    assert f"{file}:1: {reason}" in first.bad
    assert str(bad["messages" if kind == "sft" else "content"]) in first.bad.partition("The row begins: ")[2]
    with pytest.raises(RunError) as of_run:
        prepare_here(kind, blend_of(file), tmp_path / "out", **chosen)
    assert str(refused) == str(of_run.value)
    assert first.bad in str(refused)


@pytest.mark.parametrize(
    ("rows", "settings", "refused"),
    [
        ([GOOD] * 5, {}, False),
        ([GOOD, {}], {}, False),
        ([{}, GOOD], {"on_bad_row": "fail"}, True),
        ([GOOD] * 80 + [{}] * 19, {}, True),
        ([GOOD] * 80 + [{}] * 20 + [GOOD], {}, False),
        ([{}] * MOST_ROWS + [GOOD], {}, True),
        ([{}] * 9, {"allow_shrink": ["a"]}, False),
        ([{"text": "short"}] * 9, {"min_doc_chars": 10}, True),
        ([{"text": "short"}] * MOST_ROWS + [GOOD], {"min_doc_chars": 10}, False),
    ],
)
def test_only_certain_failures_are_rejected(tmp_path, settings_of, rows, settings, refused):
    blend = blend_of(write_rows(tmp_path / "a.jsonl", rows))
    _, error = look_at("pretrain", blend, tmp_path / "out", **settings_of["pretrain"], **settings)
    assert bool(error) == refused


def test_first_look_opens_one_file_per_dataset_read_only(tmp_path, settings_of):
    write_lines(tmp_path / "a/1.jsonl", ["hello world"] * 500)
    (tmp_path / "a/2.jsonl.gz").write_bytes(b"not gzip")
    first = gzip.compress(write_lines(tmp_path / "b.jsonl", ["hello world"] * 200_000).read_bytes())
    (tmp_path / "b.jsonl.gz").write_bytes(first[: len(first) // 2])
    blend = blend_of(tmp_path / "a", tmp_path / "b.jsonl.gz")
    kind = preparation("filter")
    planned = plan_here("filter", blend, tmp_path / "out")
    before = tree(tmp_path)
    seen, error = look(kind, planned)
    assert (tree(tmp_path), error) == (before, None)
    assert {name: (each.rows, each.documents, each.every) for name, each in seen.items()} == {
        "datasets/a": (MOST_ROWS, 0, False),
        "datasets/b": (MOST_ROWS, 0, False),
    }


@pytest.mark.parametrize(
    ("kind", "row", "shape"),
    [
        ("pretrain", GOOD, "documents in 'text'"),
        ("sft", {"instruction": "a", "input": "b", "output": "c"}, "Alpaca pairs"),
        ("sft", {"messages": "hello", **CHAT}, "messages"),
        ("harmony", {"instruction": "a", "input": "b", "output": "c"}, "Alpaca pairs"),
        ("sft", {"body": "a"}, None),
        ("filter", GOOD, None),
    ],
)
def test_a_shape_is_named(tmp_path, settings_of, kind, row, shape):
    blend = blend_of(write_rows(tmp_path / "a.jsonl", [row]))
    seen, _ = look_at(kind, blend, tmp_path / "out", **settings_of.get(kind, {}))
    assert [each.shape for each in seen.values()] == [shape]


def test_built_shards_are_not_looked_at(tmp_path):
    blend = blend_of(write_rows(tmp_path / "a.jsonl", [GOOD] * 3))
    prepare_here("harmony", blend, tmp_path / "out")
    assert look_at("harmony", blend, tmp_path / "out") == ({}, None)


def test_a_plan_shows_first_rows_and_fails_as_a_run_would(tmp_path, capsys):
    rows = [GOOD, {"text": None}, {"text": "[bold]hello"}]
    write_rows(tmp_path / "good.jsonl", rows), write_rows(tmp_path / "bad.jsonl", [{"body": 1}] * 11)
    planned = plan_here("filter", blend_of(tmp_path / "good.jsonl"), tmp_path / "out", rules=[])
    console = Console(file=io.StringIO(), width=500)
    print_plan(planned, console, (), look(preparation("filter"), planned)[0])
    assert "  good: all 3 rows: 2 documents, 1 dropped (null_text 1)\n" in console.file.getvalue()
    assert f"warning: good: {tmp_path}/good.jsonl:2: null_text: " in console.file.getvalue()
    assert run(["plan", str(tmp_path / "good.jsonl"), "--kind", "rl", "--format", "json"]) == 0
    first = json.loads(capsys.readouterr().out)["plan"]["first_rows"]["datasets/good"]
    assert (first["rows"], first["documents"], first["bad"]) == (3, 3, "")
    for command in (["plan", "--kind", "filter"], ["filter", "--dry-run", "--output-dir", str(tmp_path / "out")]):
        assert run([command[0], str(tmp_path / "bad.jsonl"), *command[1:]]) == 1
        shown = capsys.readouterr()
        assert "bad: all 11 rows: 0 documents" in shown.out + shown.err
        assert "a run of this plan would fail: dataset 'bad': 11 of 11 rows are bad" in shown.err
