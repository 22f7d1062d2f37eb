"""A whole normalization: rows of every source in, strict Parquet out, with every row accounted for."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import openai_harmony
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenmill.flows.cli import run
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony import shard
from tokenmill.tasks.harmony.columns import SCHEMA
from tokenmill.tasks.harmony.grammar import Fault, parse
from tokenmill.tasks.harmony.planning import splits_of
from tokenmill.tasks.harmony.shard import inspect_harmony_shard
from tokenmill.tasks.harmony.vocabulary import encoding
from tokenmill.tasks.report.cards import card
from tokenmill.tasks.report.measured import measured

from tests.harmony import rows
from tests.peers.harmony_tokens import encode
from tests.preparing_harmony import plan, prepare
from tests.preparing_rl import write_rows

TAGGED = {"messages": [{"role": "user", "content": "a <|end|> b"}, {"role": "assistant", "content": "c"}]}
SILENT = {"messages": [{"role": "user", "content": "hello?"}]}
BAD = [TAGGED, SILENT, b"{broken", {"messages": "no"}]


def source(tmp_path, name, converter, *given, split=None, **keys):
    path = write_rows(tmp_path / f"{split or name}.jsonl", given)
    return {"name": name, "path": str(path), "converter": converter, **keys}


def every_source(tmp_path):
    """A dataset for each converter and split, with two good rows of each and, in one, all the bad ones."""
    found = []
    for converter, given in rows.GOOD.items():
        for split in {split for _, split in given}:
            good = [row for row, of in given if of == split] * 2
            folder = tmp_path / converter
            found.append(source(folder, f"{converter}-{split}", converter, *good, split=split))
    return [*found, source(tmp_path, "messy", "openai_messages", *BAD, *rows_of_messages(3))]


def rows_of_messages(count):
    return [
        {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}!"}]}
        for number in range(count)
    ]


def published(out):
    """The rows of a normalization, by split."""
    return {
        split.name: pa.concat_tables([pq.read_table(file) for file in sorted(split.glob("*.parquet"))]).to_pylist()
        for split in sorted((Path(out) / "data").iterdir())
    }


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The output folder of a normalization of all sources, its manifest, and its rows."""
    folder = tmp_path_factory.mktemp("every_source")
    datasets = every_source(folder)
    datasets[0]["languages"] = ["no", "en"]
    _, manifest = prepare({"datasets": datasets}, folder / "out")
    return folder / "out", manifest, [row for split in published(folder / "out").values() for row in split]


@pytest.mark.slow
def test_every_row_of_every_source_is_read_by_the_reference_and_counted(everything):
    out, manifest, found = everything
    for row in found:
        ids = encoding().encode(row["text"], allowed_special="all")
        assert encoding().decode(ids) == row["text"]
        spoken = parse(row["text"])
        sizes = np.diff(encode(spoken).offsets)
        by_assistant = [size for size, message in zip(sizes, spoken, strict=True) if message.author == "assistant"]
        assert len(ids) == row["stats_token_len"] == sum(sizes)
        assert row["stats_completion_tokens"] == sum(by_assistant) > 0
        messages = encoding().parse_messages_from_completion_tokens(ids, strict=True)
        assert [message.author.role for message in messages][-1] == openai_harmony.Role.ASSISTANT
        assert row["quality_valid_harmony"] is True
        assert row["quality_error_code"] is None
    assert len({row["row_id"] for row in found}) == len(found) == manifest["totals"]["documents"]
    assert manifest["totals"]["tokens"] == sum(row["stats_token_len"] for row in found)
    assert manifest["totals"]["rows"] == len(found) + sum(manifest["totals"]["dropped"].values())
    assert sum(manifest["totals"]["dropped"].values()) == len(BAD)
    assert {split: facts["rows"] for split, facts in manifest["splits"].items()} == {
        split: len(rows) for split, rows in published(out).items()
    }


def test_broken_up_strings_and_other_choices_reach_the_rows(tmp_path):
    messy = source(tmp_path, "messy", "openai_messages", TAGGED, split="train")
    _, manifest = prepare({"datasets": [messy]}, tmp_path / "out", special_strings="escape", messages_json=True)
    ((row,),) = published(tmp_path / "out").values()
    assert manifest["totals"]["dropped"] == {}
    assert row["meta_escaped_strings"] == 1
    assert "<|\u200bend|>" in row["text"]
    assert [each["author"] for each in json.loads(row["messages_json"])][-2:] == ["user", "assistant"]


def test_proofs_are_read_in_the_ways_that_are_asked_for(tmp_path):
    folder = tmp_path / "Nemotron-Math-Proofs-v1"
    path = write_rows(folder / "lean.jsonl", [rows.PROOF, {**rows.PROOF, "messages": "[]"}])
    blend = {"datasets": [{"name": "proofs", "path": str(folder)}]}
    found = {}
    for proofs in ("proof", "formalize", "both"):
        _, manifest = prepare(blend, tmp_path / proofs, proofs=proofs)
        found[proofs] = Counter(row["dataset"] for row in published(tmp_path / proofs)["lean"])
        assert manifest["totals"]["rows"] == (4 if proofs == "both" else 2)
    assert path.exists()
    assert found == {"proof": {"proofs": 1}, "formalize": {"proofs": 2}, "both": {"proofs": 1, "proofs-1": 2}}


@pytest.mark.parametrize(("share", "asked"), [(0.0, 0), (1.0, 40)])
def test_the_reference_is_asked_of_the_share_that_is_wanted(tmp_path, monkeypatch, share, asked):
    texts = []
    monkeypatch.setattr(shard, "cross_check", lambda text, messages: texts.append(text))
    one = source(tmp_path, "chat", "openai_messages", *rows_of_messages(40))
    prepare({"datasets": [one]}, tmp_path / "out", cross_check=share)
    assert len(texts) == asked


def test_reference_check_depends_on_the_row_only(tmp_path, monkeypatch):
    found = []
    for given in (rows_of_messages(200), rows_of_messages(200)[::-1]):
        texts = []
        monkeypatch.setattr(shard, "cross_check", lambda text, messages, texts=texts: texts.append(text))
        one = source(tmp_path / str(len(found)), "chat", "openai_messages", *given)
        prepare({"datasets": [one]}, tmp_path / f"out{len(found)}", cross_check=0.3)
        found.append(sorted(texts))
    assert found[0] == found[1]
    assert 30 < len(found[0]) < 90


def test_of_long_rows_the_reference_is_asked_of_fewer(tmp_path, monkeypatch):
    texts = []
    monkeypatch.setattr(shard, "cross_check", lambda text, messages: texts.append(text))
    long = [
        {"messages": [{"role": "user", "content": f"{number}?" * 4000}, {"role": "assistant", "content": "!"}]}
        for number in range(200)
    ]
    one = source(tmp_path, "chat", "openai_messages", *rows_of_messages(200), *long)
    prepare({"datasets": [one]}, tmp_path / "out", cross_check=0.5, dedup={"mode": "off"})
    asked_long = sum(len(text) > shard.CHECKED_CHARACTERS for text in texts)
    assert 70 < len(texts) - asked_long < 130
    assert 0 < asked_long < 25


def test_rejected_by_the_reference_is_not_written(tmp_path, monkeypatch):
    fault = Fault("R02", "reference_differs", 7, "it reads something else")
    monkeypatch.setattr(shard, "cross_check", lambda text, messages: fault if "3?" in text else None)
    one = source(tmp_path, "chat", "openai_messages", *rows_of_messages(5))
    _, manifest = prepare({"datasets": [one]}, tmp_path / "out", cross_check=1.0)
    assert manifest["totals"]["dropped"] == {"invalid_harmony_R02": 1}


def test_drop_names_rule_and_location(tmp_path):
    calling = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    undeclared = {
        "messages": [
            {"role": "user", "content": "q"},
            calling,
            {"role": "tool", "content": "r"},
            {"role": "assistant", "content": "a"},
        ]
    }
    one = source(tmp_path, "chat", "openai_messages", undeclared, *rows_of_messages(5))
    _, manifest = prepare({"datasets": [one]}, tmp_path / "out")
    assert manifest["totals"]["dropped"] == {"invalid_harmony_S14_call_to_undeclared_tool": 1}
    (bad,) = [json.loads(line) for file in (tmp_path / "out/quarantine").rglob("*.jsonl") for line in file.open()]
    assert "functions.f is called and not declared" in bad["detail"]


@pytest.mark.slow
def test_the_tools_of_every_row_are_in_a_catalog(everything):
    out, _, found = everything
    catalog = {}
    for file in (out / "tools").iterdir():
        catalog |= json.loads(file.read_bytes())
    offered = {row["source_tools_id"]: row["source_tools_count"] for row in found if row["source_tools_id"]}
    assert offered
    assert {name: len(tools) for name, tools in catalog.items()} == offered
    for tools in catalog.values():
        assert all(tool.get("function", tool)["name"] for tool in tools)
    assert rows.AGENTIC["tools"] in catalog.values()


def test_a_catalog_is_in_the_order_of_ids():
    content = shard.catalog_bytes({"b": b'[{"name": "g"}]', "a": b'[{"name": "f"}]', "c": b"[]"})
    assert list(json.loads(content).items()) == [("a", [{"name": "f"}]), ("b", [{"name": "g"}]), ("c", [])]


@pytest.mark.slow
def test_the_card_of_every_source(everything):
    out, manifest, found = everything
    text = card(measured(str(out)))
    front = yaml.safe_load(text.split("---")[1])
    assert front["language"] == ["no", "en"]
    assert manifest["licences"] == Counter(row["source_license"] or "none named" for row in found)
    assert f"{len(found):,} documents" in text
    assert {each["split"] for each in front["configs"][0]["data_files"]} == set(published(out))
    assert all([*out.glob(each["path"][0])] for each in front["configs"][0]["data_files"])
    assert str(out.parent) not in text


def test_file_without_harmony_text_is_found(tmp_path):
    one = source(tmp_path, "chat", "openai_messages", *rows_of_messages(3))
    planned, _ = prepare({"datasets": [one]}, tmp_path / "out")
    (key,) = planned.plan.keys
    receipt = planned.plan.store.receipt(key)
    place = planned.plan.store.path(key, "all.parquet")
    table = pq.read_table(place)
    assert table.schema.equals(SCHEMA)
    texts = pa.array([*table["text"].to_pylist()[:2], "no tags"])
    pq.write_table(table.set_column(table.schema.get_field_index("text"), SCHEMA.field("text"), texts), place)
    (problem,) = inspect_harmony_shard(planned.plan.store, receipt)
    assert "row 2 is not valid Harmony: E02" in problem
    pq.write_table(table.slice(1), place)
    (problem,) = inspect_harmony_shard(planned.plan.store, receipt)
    assert "holds 2 rows" in problem


@pytest.mark.parametrize(
    ("keys", "settings", "words"),
    [
        ({"converter": "math_v3"}, {}, "unknown converter 'math_v3'; did you mean 'math_v2'?"),
        ({}, {"disabled_rules": ["S99"]}, "disabled_rules: 'S99' is not a rule"),
        ({}, {"holdout": {"valid": 0.1}}, "holdout does not apply"),
        ({"transforms": ["passthrough"]}, {}, "'transforms' doesn't affect Harmony"),
    ],
)
def test_wrong_choice_fails_before_reading(tmp_path, keys, settings, words):
    one = {**source(tmp_path, "chat", "openai_messages", *rows_of_messages(1)), **keys}
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        plan({"datasets": [one]}, tmp_path / "out", **settings)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("data/chat-00000-of-00003.parquet data/code-00001-of-00002.parquet", ["chat", "code"]),
        ("chat-00000-of-00003.parquet chat-00001-of-00003.parquet", ["chat", "chat"]),
        ("train_0001.jsonl dev.jsonl.gz other.jsonl", ["train", "validation", "other"]),
        ("en/training/x.jsonl en/eval/x.jsonl", ["train", "test"]),
        ("chat_if.jsonl high.part_00.jsonl high.part_01.jsonl medium.jsonl", ["chat_if", "high", "high", "medium"]),
    ],
)
def test_splits_of_files(names, splits):
    source = DataSource(name="rows", path="/nowhere")
    assert splits_of(source, names.split()) == dict(zip(names.split(), splits, strict=True))
    named = source.model_copy(update={"split": "held_out"})
    assert {*splits_of(named, names.split()).values()} == {"held_out"}


def test_no_two_rows_have_one_name_though_files_do(tmp_path):
    for folder in ("x", "y"):
        write_rows(tmp_path / "chats" / folder / "train.jsonl", rows_of_messages(3))
    chats = {"name": "chats", "path": str(tmp_path / "chats"), "converter": "openai_messages"}
    prepare({"train": [chats], "valid": [chats]}, tmp_path / "out")
    found = [row for rows in published(tmp_path / "out").values() for row in rows]
    assert len({row["row_id"] for row in found}) == len(found) == 12
    assert {row["source_file"] for row in found} == {"x/train.jsonl", "y/train.jsonl"}
    assert [row["dup_of"] for row in found if row["dup_of"] == row["row_id"]] == []


def test_blend_splits_are_kept_apart(tmp_path):
    sources = {}
    for split, count in (("train", 5), ("valid", 2)):
        write_rows(tmp_path / split / "chats.jsonl", rows_of_messages(5)[:count])
        path = str(tmp_path / split / "chats.jsonl")
        sources[split] = [{"name": "chats", "path": path, "converter": "openai_messages"}]
    prepare(sources, tmp_path / "out", dedup={"mode": "tag"})
    assert {split: len(found) for split, found in published(tmp_path / "out").items()} == {
        "train-chats": 5,
        "valid-chats": 2,
    }
    blend = load_blend(str(tmp_path / "out/blend.json"))
    assert {split: [source.path for source in of] for split, of in blend.parts().items() if of} == {
        split: [f"{tmp_path}/out/data/{split}-chats"] for split in sources
    }


@pytest.mark.parametrize("name", ["a b.jsonl", "x[1].jsonl", "-é.jsonl"])
def test_a_file_of_any_name_becomes_a_blend_that_can_be_read(tmp_path, name):
    path = str(write_rows(tmp_path / "rows" / name, rows_of_messages(3)))
    prepare(
        {"datasets": [{"name": "rows", "path": str(tmp_path / "rows"), "converter": "openai_messages"}]},
        tmp_path / "out",
    )
    (source,) = load_blend(str(tmp_path / "out/blend.json")).datasets
    ((split, found),) = published(tmp_path / "out").items()
    assert (source.name, source.path) == (split, f"{tmp_path}/out/data/{split}")
    assert {row["split"] for row in found} == {Path(path).stem}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("dedup.evaluations=missing.json", "missing.json"),
        ("selection.pools=missing.yaml", "missing.yaml"),
        ("selection.require=meta_domian is null", "meta_domain"),
    ],
)
def test_later_stage_errors_are_reported_early(tmp_path, capsys, wrong, said):
    one = source(tmp_path, "chat", "openai_messages", *rows_of_messages(3))
    (tmp_path / "blend.json").write_text(json.dumps({"datasets": [one]}))
    assert (
        run(["harmony", str(tmp_path / "blend.json"), wrong, "--output-dir", str(tmp_path / "out"), "--dry-run"]) == 2
    )
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
