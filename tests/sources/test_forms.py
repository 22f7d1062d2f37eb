"""What users give a command by mistake: rows of another form, or a file of rows instead of a blend."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.flows import cli
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.sources.forms import is_rows, read_blend, require_form

from tests.preparing import blend_of, prepare
from tests.preparing_sft import chat_vocabulary

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
ROWS = {"documents": {"text": "some words"}, "conversations": CHAT}


@pytest.fixture
def plan(tmp_path):
    def plan(kind, *rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = preparation(kind)
        model = {"tokenizer": {"model": str(chat_vocabulary(tmp_path))}} if kind != "dedup" else {}
        template = {"chat_template": "nano3"} if kind == "sft" else {}
        return found.plan(found.read_blend(str(path)), found.settings(**model, **template), str(tmp_path / "out"))

    return plan


@pytest.mark.parametrize(
    ("kind", "form", "command"),
    [
        ("pretrain", "conversations", "tokenmill sft or tokenmill harmony"),
        ("dedup", "conversations", "tokenmill sft or tokenmill harmony"),
        ("sft", "documents", "tokenmill pretrain or tokenmill dedup"),
    ],
)
def test_rows_in_a_different_form_name_their_command(plan, kind, form, command):
    with pytest.raises(InputError, match=f"rows.jsonl holds {form}, without a .*; prepare it with {command}"):
        plan(kind, ROWS[form], ROWS[form])


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("pretrain", [*ROWS.values()]),
        ("pretrain", [{"text": "a", **CHAT}]),
        ("pretrain", [{"prompt": "a", "text": 1}]),
        ("sft", [{"text": "a", "input_ids": [1, 2], "labels": [1, 2]}]),
    ],
    ids=str,
)
def test_rows_that_may_be_of_either_form_are_left_to_the_check_of_bad_rows(plan, kind, rows):
    assert plan(kind, *rows).plan.pending


@pytest.mark.parametrize(
    "keys", [{"messages_field": "chat.turns"}, {"fields": {"prompt": "chat.ask", "response": "say"}}]
)
def test_rows_with_texts_are_conversations_where_their_fields_are_named(tmp_path, keys):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"text": "t", "chat": {"turns": CHAT["messages"], "ask": "q"}, "say": "a"})
    )
    source, place = DataSource(name="a", path="a", **keys), SourceFile(str(tmp_path / "rows.jsonl"), 1, "jsonl")
    require_form(source, "conversations", Slice(place, 0, 1 << 20))
    with pytest.raises(InputError, match="holds documents"):
        require_form(DataSource(name="a", path="a"), "conversations", Slice(place, 0, 1 << 20))


@pytest.mark.parametrize("name", ["some rows.jsonl", "some rows.jsonl.gz", "some rows.parquet"])
def test_a_file_of_rows_is_a_blend_of_it(tmp_path, name):
    (only,) = read_blend(str(tmp_path / name)).datasets
    assert (only.name, only.path) == ("some-rows", str(tmp_path / name))


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("hf://org/my.name", "hf://org/my.name"),
        ("hf://my.name", "hf://my.name"),
        ("hf://datasets/org/my.name@v1/data/en", "hf://datasets/org/my.name@v1/data/en"),
        ("https://huggingface.co/datasets/org/my.name/", "hf://org/my.name"),
        ("https://huggingface.co/datasets/my.name/tree/main/data", "hf://my.name@main/data"),
    ],
)
def test_a_dataset_of_the_hub_is_a_blend_of_it(written, path):
    (only,) = read_blend(written).datasets
    assert (only.name, only.path) == ("my.name", path)


ARRAY = json.dumps([ROWS["documents"]] * 3)


ROWS_AND_BLENDS = {
    True: [
        ARRAY, "\ufeff \n" + ARRAY, "[]", '{"text": "a"}\n{"text": "b"}\n', '{"text": "a"}', json.dumps(CHAT, indent=2),
        json.dumps({"text": "word " * 300_000}) + "\n", json.dumps([{"text": "word " * 300_000}]), '{"id": 1, "body": "a"}',
    ],
    False: [
        '{"datasets": []}', '{"datasts": [{"name": "a", "path": "b"}]}', '{"train": ["1", "out/a"]}',
        '{"_comment": "no rows"}', "{}", "", "not JSON",
        json.dumps({"datasets": [{"name": f"d{number}", "path": "x" * 99} for number in range(20_000)]}),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("rows", "content"), [(rows, each) for rows, some in ROWS_AND_BLENDS.items() for each in some])
def test_a_json_file_is_rows_or_a_blend(tmp_path, rows, content):
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    assert is_rows(str(tmp_path / "a.json")) is rows


def test_missing_json_file_is_not_a_row_file(tmp_path):
    assert not is_rows(str(tmp_path / "a.json"))
    assert is_rows(str(tmp_path / "*.json"))


def test_json_rows_are_prepared_with_the_keys_of_a_dataset(tmp_path, capsys):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"content": "one"}, {"content": "two"}]))
    command = ["pretrain", str(rows), "--output-dir", str(tmp_path / "out"), "--dry-run"]
    assert cli.run([*command, "text_field=content"]) == 0
    (tmp_path / "blend.json").write_text(json.dumps({"datasets": [{"name": "a", "path": "rows.json"}]}))
    capsys.readouterr()
    assert cli.run(["plan", str(tmp_path / "blend.json"), "text_field=content"]) == 2
    assert "text_field: is a key of a dataset, not a setting; write it into its entry in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        {"datasets": [{"name": "a", "path": 7, "filters": {"x": [1.5] * 10_000}}]},
        {"datasets": "word " * 100_000},
        {"datasets": [{f"key{number}": 1 for number in range(10_000)}]},
        {"datasets": [{"name": "n" * 100_000, "path": "b"}]},
    ],
    ids=["list", "text", "keys", "name"],
)
def test_a_mistake_is_shown_in_lines(tmp_path, content):
    with pytest.raises(InputError) as error:
        read_blend(content)
    lines = str(error.value).splitlines()
    assert len(lines) <= 21
    assert max(map(len, lines)) < 400


def test_rows_that_are_not_utf8_are_left_to_the_reader_that_counts_them(tmp_path):
    """Arrow reads no batch of records with a dictionary of such texts; documents are read one by one."""
    spoiled = pa.DictionaryArray.from_arrays(
        pa.array([0, 1], pa.int16()), pa.array([b"rye", b"\xff"]).view(pa.string())
    )
    pq.write_table(pa.table({"text": spoiled}), tmp_path / "a.parquet", write_statistics=False)
    _, manifest = prepare(blend_of(tmp_path / "a.parquet"), tmp_path / "out", holdout={"valid": 0, "test": 0})
    assert manifest["totals"]["dropped"] == {"invalid_utf8": 1}
