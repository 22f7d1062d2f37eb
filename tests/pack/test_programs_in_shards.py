"""Shards built with programs are those built without them, also when a program turns out to be wrong."""

import logging
from pathlib import Path

from tokenmill.tasks.chat import programs
from tokenmill.tasks.chat.programs import Programs

from tests.peers.conversations import assistant, system, talk, thinking, user
from tests.preparing import blend_of
from tests.preparing_sft import prepare, write_rows

ROWS = [
    talk(*([system("Be brief.")] if number % 3 else []), user(f"{number}?"), thinking(f"Is it {number}?", f" {number}!\n"))
    if number % 2
    else talk(user(f"What is {number}?"), assistant(f"It is {number}."), user("Sure?"), assistant("</think>" if number % 8 else "Yes."))
    for number in range(400)
]  # fmt: skip


def built(folder, vocabulary, name):
    source = write_rows(folder / "rows.jsonl", ROWS)
    prepare(blend_of(source), folder / name, tokenizer={"model": str(vocabulary)}, pack_size=512)
    files = sorted(path for path in Path(folder / name / "shards").rglob("*") if path.is_file())
    return {path.relative_to(folder / name): path.read_bytes() for path in files if path.suffix != ".json"}


def rendered(self, conversation):
    return self.renderer.sequences(conversation)


def test_a_shard_is_the_same_with_and_without_programs(tmp_path, vocabulary, monkeypatch):
    filled = []
    original = programs.Program.filled
    monkeypatch.setattr(programs.Program, "filled", lambda self, texts: filled.append(1) or original(self, texts))
    ours = built(tmp_path, vocabulary, "ours")
    assert len(filled) > 100
    monkeypatch.setattr(Programs, "sequences", rendered)
    assert ours == built(tmp_path, vocabulary, "rendered")


def test_wrong_program_is_detected_and_not_used(tmp_path, vocabulary, monkeypatch, caplog):
    original, calls = programs.Program.filled, []

    def wrong(self, texts):
        calls.append(1)
        return original(self, texts if len(calls) < 20 else ["wrong"] * len(texts))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(programs.Program, "filled", wrong)
        patched.setattr(programs, "ONE_IN", 5)
        ours = built(tmp_path, vocabulary, "ours")
    assert "the whole shard is rendered instead" in caplog.text
    monkeypatch.setattr(Programs, "sequences", rendered)
    assert ours == built(tmp_path, vocabulary, "rendered")
