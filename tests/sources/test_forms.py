"""What users give a command by mistake: rows of another form, or a file of rows instead of a blend."""

import json

import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.sources.forms import read_blend

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
def test_rows_of_another_form_are_told_their_command(plan, kind, form, command):
    with pytest.raises(InputError, match=f"rows.jsonl holds {form}, without a .*; prepare it with {command}"):
        plan(kind, ROWS[form], ROWS[form])


@pytest.mark.parametrize("rows", [[*ROWS.values()], [{"text": "a", **CHAT}], [{"prompt": "a", "text": 1}]], ids=str)
def test_rows_that_may_be_of_either_form_are_left_to_the_check_of_bad_rows(plan, rows):
    assert plan("pretrain", *rows).plan.pending


@pytest.mark.parametrize("name", ["some rows.jsonl", "some rows.jsonl.gz", "some rows.parquet"])
def test_a_file_of_rows_is_a_blend_of_it(tmp_path, name):
    (only,) = read_blend(str(tmp_path / name)).datasets
    assert (only.name, only.path) == ("some-rows", str(tmp_path / name))
