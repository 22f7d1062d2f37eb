"""Incremental SFT: a plan asks for the shards whose bytes would be others, says why, and for nothing else."""

import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.report.plan import pending_reasons

from tests.building import plan_here, prepare_here
from tests.peers.conversations import assistant, talk, thinking, user
from tests.preparing import blend_of, in_two_files, of_two_files, pending
from tests.preparing_sft import CHATML, START, chat_vocabulary, plan, prepare, write_rows

ROWS = [
    {
        **talk(user(f"Question {number}?"), thinking("Hm.", f"Answer {number * 7919 % 1000}."), user("?"), assistant("!")),
        "used_in": ["train", "tiny"],
        "quality": "good",
    }
    for number in range(60)
]  # fmt: skip


@pytest.fixture(scope="module")
def given(vocabulary):
    """The settings of all tests: a small tokenizer, small packs, and shards of some five rows."""
    return {"tokenizer": {"model": str(vocabulary)}, "pack_size": 256, "shard_size": 1500}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, given):
    """A corpus and its preparation, which the tests that take this leave as it is."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(of_two_files(in_two_files(folder / "corpus", ROWS)), folder / "out", **given)
    return folder


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"filters": {"quality": "good"}}, "recipe.filters.quality changed: None -> ['good']"),
        ({"used_in": "tiny"}, "recipe.filters.used_in changed: None -> ['tiny']"),
        ({"messages_field": "messages"}, "recipe.messages_field changed: None -> 'messages'"),
        ({"fields": {"system": "rules"}}, "recipe.fields.system changed: None -> 'rules'"),
        ({"tools_field": "functions"}, "recipe.tools_field changed: 'tools' -> 'functions'"),
    ],
    ids=str,
)
def test_read_fields_rebuild_a_dataset_and_are_named(prepared, given, fields, reason):
    planned = plan(of_two_files(prepared / "corpus", **fields), prepared / "out", **given)
    assert pending_reasons(planned) == {reason: len(planned.plan.shards)}


def test_the_same_tokenizer_and_template_in_other_places_rebuild_nothing(prepared, given, vocabulary, tmp_path):
    moved = shutil.copytree(vocabulary, tmp_path / "moved")
    (tmp_path / "chat.jinja").write_text(CHATML, "utf-8")
    changed = {"tokenizer": {"model": str(moved)}, "chat_template": str(tmp_path / "chat.jinja")}
    assert pending(plan(of_two_files(prepared / "corpus"), prepared / "out", **given | changed)) == []
    (moved / "chat_template.jinja").write_text(CHATML, "utf-8")
    changed |= {"chat_template": "tokenizer"}
    assert pending(plan(of_two_files(prepared / "corpus"), prepared / "out", **given | changed)) == []


def test_read_parquet_columns_are_part_of_the_key(given, tmp_path):
    path = tmp_path / "some.parquet"
    filtered = {"datasets": [{**source, "used_in": "train"} for source in blend_of(path)["datasets"]]}

    def written(seconds, **columns):
        rows = [
            {**row, **{name: values[number] for name, values in columns.items()}} for number, row in enumerate(ROWS)
        ]
        pq.write_table(pa.Table.from_pylist(rows), path)
        os.utime(path, (seconds, seconds))

    written(1_000_000_000)
    prepare(filtered, tmp_path / "out", **given)
    written(1_000_000_001, quality=[f"{number}" for number in range(60)])
    assert pending(plan(filtered, tmp_path / "out", **given)) == []
    written(1_000_000_002, used_in=[["draft"]] + [["train", "tiny"]] * 59)
    assert pending_reasons(plan(filtered, tmp_path / "out", **given)) == {"source content changed": 1}


def test_a_date_in_yaml_is_the_text_that_templates_take():
    given = yaml.safe_load("template_variables: {date: 2026-03-01, enable_thinking: true}")
    assert SftSettings(**given).template_variables == {"date": "2026-03-01", "enable_thinking": True}


@pytest.mark.parametrize("key", ["template_variables", "chat_template_kwargs"])
def test_variables_of_one_dataset(tmp_path, given, key):
    rows, keeping = of_two_files(in_two_files(tmp_path / "rows", ROWS)), {"keep_reasoning": True}
    own = {"datasets": [rows["datasets"][0], {**rows["datasets"][1], key: keeping}]}

    def keys(blend, **settings):
        found = plan(blend, tmp_path / "planned", **given, **settings).plan
        return {
            name: [key for key, of in zip(found.keys, found.shards, strict=True) if of.dataset == name]
            for name in ("a", "b")
        }

    mixed, plain, kept = keys(own), keys(rows), keys(rows, template_variables=keeping)
    assert mixed == {"a": plain["a"], "b": kept["b"]}
    assert plain["b"] != kept["b"]
    _, manifest = prepare(own, tmp_path / "out", **given)
    sequences = dict.fromkeys(("a", "b"), 0)
    for entry in manifest["shards"]:
        sequences[entry["dataset"]] += entry["facts"]["all"]["sequences"]
    assert sequences == {"a": 2 * 40, "b": 20}


@pytest.mark.parametrize(
    ("tokenizer", "chosen"),
    [({}, "harmony"), ({"chat_template": CHATML}, "tokenizer")],
    ids=["of Harmony", "with a template"],
)
def test_the_default_template_fits_the_tokenizer(tmp_path, tokenizer, chosen):
    file = write_rows(tmp_path / "a.jsonl", [talk(user("Hello?"), assistant("World."))])
    settings = {}
    if tokenizer:
        config = chat_vocabulary(tmp_path / "model") / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | tokenizer))
        settings = {"tokenizer": {"model": str(config.parent)}}
    manifest = prepare_here("sft", blend_of(file), tmp_path / "out", **settings)[1]
    assert manifest["settings"]["chat_template"] == chosen
    assert manifest["template"]["controls"].keys() >= {"<|call|>" if chosen == "harmony" else START}


def test_markers_that_are_plain_text_need_leave(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [talk(user("Hello?"), assistant("World."))])
    with pytest.raises(
        InputError, match=r"none of its markers is a control token of o200k_harmony.*allow_text_markers=true"
    ):
        plan_here("sft", blend_of(file), tmp_path / "out", chat_template="nano3")
    allowed = plan_here("sft", blend_of(file), tmp_path / "out", chat_template="nano3", allow_text_markers=True)
    assert allowed.found.checked.warnings
