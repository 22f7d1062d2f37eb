"""The sample rows of docs/data-formats.md: each is prepared as the section says, and every shape that is read has one."""

import json
import re
from pathlib import Path

import pytest
from tokenmill.tasks.chat.shapes import ANSWERS, QUESTIONS, SHAPES, shape_name
from tokenmill.tasks.rl.targets import TARGETS
from tokenmill.tasks.train.launchers.nemo_rl import RECIPES

from tests import preparing, preparing_harmony, preparing_rl, preparing_sft
from tests.tokenize.small_vocabularies import byte_level_bpe

PAGE = (Path(__file__).parents[1] / "docs/data-formats.md").read_text("utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTHING = {"valid": 0, "test": 0}


def section(heading):
    level = heading.partition(" ")[0]
    return re.search(rf"^{heading}\n(.*?)(?=^#{{2,{len(level)}}} |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def rows_of(text):
    return [
        json.loads(line)
        for language, block in BLOCK.findall(text)
        if language == "jsonl"
        for line in block.splitlines()
    ]


def prepared(module, text, folder, keys=None, **settings):
    """The totals of a preparation of the files of a section, and how many rows they have."""
    blocks = [
        (folder / f"{number}.{language}", block)
        for number, (language, block) in enumerate(BLOCK.findall(text))
        if '"datasets"' not in block
    ]
    for path, block in blocks:
        path.write_text(block)
    datasets = [{"name": path.stem, "path": str(path), **(keys or {})} for path, _ in blocks]
    _, manifest = module.prepare({"datasets": datasets}, folder / "out", **settings)
    return manifest["totals"]


def test_samples_of_pretraining_are_documents(tmp_path):
    vocabulary = {"model": str(byte_level_bpe(tmp_path / "vocabulary", 300))}
    totals = prepared(preparing, section("## Pretraining"), tmp_path, holdout=NOTHING, tokenizer=vocabulary)
    assert (totals["rows"], totals["documents"]) == (7, 7)


@pytest.mark.slow
def test_samples_of_conversations_are_packed_without_drops(tmp_path):
    text = section("## SFT")
    totals = prepared(
        preparing_sft, text, tmp_path, holdout=NOTHING, tokenizer={"model": "o200k_harmony"}, chat_template="harmony"
    )
    assert totals["dropped"] == {}
    assert totals["rows"] == len(rows_of(text)) > 30


def test_every_shape_of_a_conversation_has_a_sample():
    pairs = {f"{question} and {answer}" for question in QUESTIONS for answer in ANSWERS}
    shown = {shape_name(row) for row in rows_of(section("## SFT"))}
    assert {shape.name for shape in SHAPES} - pairs <= shown
    assert shown & pairs


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"none"}))
def test_samples_of_a_target_are_accepted_and_its_program_is_named(target, tmp_path):
    text = section(f"### {target}")
    rows = rows_of(text)
    assert rows
    assert [TARGETS[target].check(row) for row in rows] == [None] * len(rows)
    assert f"`{RECIPES[target].program}`" in text


def test_preference_samples_become_dpo_rows(tmp_path):
    text = section("### Preferences")
    totals = prepared(preparing_rl, text, tmp_path, {"transforms": ["preference"]}, target="nemo_rl_dpo")
    assert (totals["rows"], totals["dropped"]) == (5, {})


def test_samples_of_harmony_are_normalized(tmp_path):
    totals = prepared(preparing_harmony, section("## Harmony"), tmp_path)
    assert (totals["rows"], totals["dropped"]) == (2, {})
