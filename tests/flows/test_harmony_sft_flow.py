"""Harmony text and chat become packs by one command, and what does not fit Harmony is told before anything starts."""

import json
from pathlib import Path

import pytest

from tests import preparing_harmony
from tests.flows.preparation_runs import called
from tests.peers.conversations import assistant, talk, thinking, user
from tests.preparing import tree
from tests.preparing_sft import chat_vocabulary, prepare, write_rows

ROWS = 40


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    """Chat, half of it with thoughts in its only turn."""
    folder = tmp_path_factory.mktemp("chat")
    rows = [
        talk(user(f"What is {number} squared?"), thinking("Multiply.", f"{number**2}.") if number % 2 else assistant(f"{number**2}."))
        for number in range(ROWS)
    ]  # fmt: skip
    sources = [{"name": "chat", "path": str(write_rows(folder / "train.jsonl", rows))}]
    (folder / "blend.json").write_text(json.dumps({"datasets": sources}))
    return folder / "blend.json"


@pytest.fixture(scope="module")
def normal(blend, tmp_path_factory):
    """The blend in Harmony."""
    out = tmp_path_factory.mktemp("normal") / "out"
    preparing_harmony.prepare(str(blend), out)
    return out


def packed(blend, out, *words):
    """The record of packs."""
    done = called("sft", blend, "--output-dir", out, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["sft"]


@pytest.mark.slow
def test_one_command_packs_a_normalization(normal, tmp_path):
    arguments = ["chat_template=harmony", "shard_size=2KB", "holdout.valid=0.1", "holdout.test=0"]
    record = packed(normal / "blend.json", tmp_path / "out", *arguments)
    assert (record["rows"], record["documents"], record["dropped"]) == (ROWS, ROWS, {})
    settings = {
        "shard_size": 2000,
        "holdout": {"valid": 0.1, "test": 0},
        "max_bad_row_fraction": 0.001,
        "allow_text_markers": False,
    }
    prepare(str(normal / "blend.json"), tmp_path / "expected", chat_template="harmony", **settings)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


@pytest.mark.slow
def test_chat_works_without_normalization(blend, tmp_path):
    assert packed(blend, tmp_path / "out", "chat_template=harmony")["documents"] == ROWS
    viewed = called("view", tmp_path / "out", "--format", "json")
    (pack,) = json.loads(viewed.stdout)["view"]["packs"]
    assert {passage["role"] for each in pack["sequences"] for passage in each["passages"]} == {"system", "user", "assistant"}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["chat_template=harmny"], "did you mean 'harmony'?"),
        (["chat_template=harmony", "template_variables.efort=low"], "did you mean 'effort'?"),
        (["chat_template=harmony", "tokenizer.model=SMALL"], "set tokenizer.model=o200k_harmony"),
        (["chat_template=nano3", "loss_on=assistant_bodies"], "set loss_on=assistant_all"),
    ],
    ids=str,
)
def test_wrong_call_fails_before_the_start(blend, tmp_path, arguments, remedy):
    model = str(chat_vocabulary(tmp_path / "small"))
    given = [argument.replace("SMALL", model) for argument in arguments]
    done = called("sft", blend, "--output-dir", tmp_path / "out", *given)
    assert done.returncode == 2
    assert remedy in done.stderr
    assert not Path(tmp_path / "out").exists()
