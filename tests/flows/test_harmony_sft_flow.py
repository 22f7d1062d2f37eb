"""Harmony text and chat become packs by one command, and what does not fit Harmony is told before anything starts."""

import json
from pathlib import Path

import pytest

from tests.flows.preparation_runs import called
from tests.peers.conversations import assistant, talk, thinking, user
from tests.preparing_sft import chat_vocabulary, write_rows

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


def packed(blend, out, *words):
    """The record of packs."""
    done = called("sft", blend, "--output-dir", out, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["sft"]


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
