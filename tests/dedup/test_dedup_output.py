"""A blend of text in, a blend without duplicates out, in this process: every row as it stood, and accounted for."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenmill.tasks.dedup.apply import tagged
from tokenmill.tasks.dedup.decisions import OUTCOMES, rows_decided
from tokenmill.tasks.dedup.kind import DEDUP, decided_plan, inspect_rows
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.report.summary import artifact_record, markdown, warnings
from tokenmill.tasks.shards.verify import verify

from tests.dedup.scripts import changed, unbroken, units, written
from tests.dedup.test_crowds import forms
from tests.dedup.test_near import VOCABULARY
from tests.kinds.preparations import PREPARATIONS
from tests.preparing import blend_of, tree, write_lines
from tests.preparing_dedup import build, decisions_of, plan, prepare
from tests.preparing_rl import lines_of, write_rows

TEXT = " ".join(f"word{number}" for number in range(60))
VERSION = TEXT.replace("word3 ", "other ")
ROWS = [
    b'\xef\xbb\xbf{"text": "one",   "n": 1.50, "n": 12345678901234567890123}',
    b'{"text":"two \\u00e9", "more": {"a": [1, 2]}}  \r',
    b'{"text": "one"}',
    b"",
    b"{broken",
    json.dumps({"text": TEXT, "kept": True}).encode(),
    json.dumps({"text": VERSION}).encode(),
    b'{"text": null}',
]
CLEAN = [
    b'{"text": "one",   "n": 1.50, "n": 12345678901234567890123}',
    b'{"text":"two \\u00e9", "more": {"a": [1, 2]}}',
]
DROPPED = {"exact_duplicate": 1, "near_duplicate": 1, "blank_line": 1, "malformed_json": 1, "null_text": 1}


def published(out, name="a"):
    return sorted((Path(out) / "data" / name).iterdir())


def table_of(paths):
    return pa.concat_tables(pq.read_table(path) for path in paths)


def test_kept_rows_keep_their_bytes(tmp_path):
    _, manifest = prepare(blend_of(write_rows(tmp_path / "a.jsonl", ROWS)), tmp_path / "out")
    (path,) = published(tmp_path / "out")
    assert lines_of(path) == [*CLEAN, ROWS[5]]
    totals = manifest["totals"]
    assert (totals["rows"], totals["documents"], totals["quarantined"]) == (8, 3, 2)
    assert totals["dropped"] == DROPPED
    assert manifest["duplicates"]["tally"] == {"kept": 3, "exact_duplicate": 1, "near_duplicate": 1}
    (quarantined,) = (tmp_path / "out/quarantine").iterdir()
    assert [json.loads(line)["line"] for line in lines_of(quarantined)] == [5, 8]
    edges = pq.read_table(tmp_path / "out/edges.parquet").to_pylist()
    assert [(row["dropped"], row["kept"], row["reason"]) for row in edges] == [
        ("a/a.jsonl@0#2", "a/a.jsonl@0#0", "exact_duplicate"),
        ("a/a.jsonl@0#6", "a/a.jsonl@0#5", "near_duplicate"),
    ]
    assert edges[0]["jaccard"] == 1
    assert edges[1]["jaccard"] == pytest.approx(52 / 60)  # of 56 runs each, four hold the word
    assert not (tmp_path / "out/hits.parquet").exists()
    assert verify(str(tmp_path / "out"), inspect_rows).problems == []


def test_marking_does_not_parse_rows(tmp_path):
    _, manifest = prepare(blend_of(write_rows(tmp_path / "a.jsonl", ROWS)), tmp_path / "out", mode="tag")
    (path,) = published(tmp_path / "out")
    lines = lines_of(path)
    stays = b',"dedup_outcome":"kept","duplicate_of":null,"jaccard":null}'
    assert lines[0] == CLEAN[0][:-1] + stays
    assert lines[1] == CLEAN[1][:-1] + stays
    assert lines[2] == b'{"text": "one","dedup_outcome":"exact_duplicate","duplicate_of":"a/a.jsonl@0#0","jaccard":1.0}'
    assert [json.loads(line)["dedup_outcome"] for line in lines] == [
        "kept", "kept", "exact_duplicate", "kept", "near_duplicate",
    ]  # fmt: skip
    assert manifest["totals"]["documents"] == 5
    assert manifest["totals"]["dropped"] == {"blank_line": 1, "malformed_json": 1, "null_text": 1}


def test_marks_that_a_row_has_already_are_replaced():
    row = b'{"jaccard": 0.3, "text": "\xc3\xa9", "n": 12345678901234567890123}'
    mark = {"dedup_outcome": "kept", "duplicate_of": None, "jaccard": None}
    found = tagged(row, mark)
    assert found.count(b'"jaccard"') == 1
    assert json.loads(found) == {"text": "é", "n": 12345678901234567890123, **mark}


def parquet_of(path):
    rows = [orjson.loads(row.removeprefix(b"\xef\xbb\xbf")) for row in ROWS if row.startswith((b'{"', b"\xef"))]
    columns = {
        "n": pa.array(range(len(rows)), pa.int16()),
        "text": pa.array([row["text"] for row in rows]),
        "nested": pa.array([{"list": [number]} for number in range(len(rows))]),
        "jaccard": pa.array(["mine"] * len(rows)),
    }
    pq.write_table(pa.table(columns).replace_schema_metadata({"made": "here"}), path, row_group_size=3)
    return pq.read_table(path)


@pytest.mark.parametrize(("shard_size", "files"), [(1, 2), (1 << 30, 1)])
def test_parquet_rows_keep_all_columns_when_marked(tmp_path, shard_size, files):
    whole = parquet_of(tmp_path / "a.parquet")
    _, manifest = prepare(blend_of(tmp_path / "a.parquet"), tmp_path / "out", shard_size=shard_size)
    found = table_of(published(tmp_path / "out"))
    assert found.equals(whole.take([0, 1, 3]), check_metadata=True)
    assert len(published(tmp_path / "out")) == files
    assert manifest["totals"]["dropped"] == {"exact_duplicate": 1, "near_duplicate": 1, "null_text": 1}
    assert verify(str(tmp_path / "out"), inspect_rows).problems == []
    prepare(blend_of(tmp_path / "a.parquet"), tmp_path / "out", mode="tag", shard_size=shard_size)
    found = table_of(published(tmp_path / "out"))
    assert found.drop_columns(["dedup_outcome", "duplicate_of", "jaccard"]).equals(
        whole.drop_columns(["jaccard"]).take([0, 1, 2, 3, 4])
    )
    assert found["dedup_outcome"].to_pylist() == ["kept", "kept", "exact_duplicate", "kept", "near_duplicate"]
    near = "a/a.parquet@1#0" if files == 2 else "a/a.parquet@0#3"
    assert found["duplicate_of"].to_pylist() == [None, None, "a/a.parquet@0#0", None, near]
    assert found["jaccard"].type == pa.float64()


def test_elements_of_an_array_become_lines(tmp_path):
    rows = '[\n  {"text":\n "one", "a": 1},\n {"text": "two"}, {"text": "one"}]'
    (tmp_path / "a.json").write_text(rows)
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "two"}\n{"text": "three"}\n'))
    prepare(blend_of(tmp_path / "a.json", tmp_path / "b.jsonl.zst"), tmp_path / "out")
    (first,), (second,) = published(tmp_path / "out", "a"), published(tmp_path / "out", "b")
    assert lines_of(first) == [b'{"text":  "one", "a": 1}', b'{"text": "two"}']
    assert lines_of(second) == [b'{"text": "three"}']


def split_blend(tmp_path):
    for split, texts in {"train": ["one", "two"], "valid": ["two", "three"], "test": ["one"]}.items():
        write_rows(tmp_path / split / "a.jsonl", [{"body": text} for text in texts])
    source = {"name": "a", "weight": 2.0, "text_field": "body"}
    return {split: [{**source, "path": str(tmp_path / split)}] for split in ("train", "valid", "test")}


def test_rows_in_two_splits_are_kept_in_the_first(tmp_path):
    out = tmp_path / "out"
    _, manifest = prepare(split_blend(tmp_path), out)
    (train,), (valid,) = published(out, "train/a"), published(out, "valid/a")
    assert lines_of(train) == [b'{"body": "one"}', b'{"body": "two"}']
    assert lines_of(valid) == [b'{"body": "three"}']
    assert json.loads((out / "blend.json").read_bytes()) == {
        "train": [{"name": "a", "path": str(out / "data/train/a"), "weight": 2.0, "text_field": "body"}],
        "valid": [{"name": "a", "path": str(out / "data/valid/a"), "weight": 2.0, "text_field": "body"}],
        "test": [],
    }
    assert warnings(manifest) == ["test/a: doesn't have documents, so its weight can't be applied"]
    edges = pq.read_table(out / "edges.parquet").to_pylist()
    assert edges[0]["dropped"] == "valid/a/a.jsonl@0#0"
    again, _ = prepare(str(out / "blend.json"), tmp_path / "again")
    assert [shard.dataset for shard in again.plan.shards] == ["a", "a"]
    assert [path.read_bytes() for path in published(tmp_path / "again", "train/a")] == [train.read_bytes()]


def test_file_in_two_datasets_is_kept_in_the_first(tmp_path):
    path, bad = write_rows(tmp_path / "a.jsonl", ROWS), write_rows(tmp_path / "bad.jsonl", [b"{broken", b""])
    blend = {"datasets": [{"name": name, "path": str(path if name < "bad" else bad)} for name in ("a", "b", "bad")]}
    _, manifest = prepare(blend, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out/data").iterdir()} == {"a"}, "and nothing of the bad one"
    assert manifest["totals"]["rows"] == 2 * len(ROWS) + 2
    assert manifest["totals"]["datasets"]["datasets/b"]["dropped"]["exact_duplicate"] == 5
    assert len([*(tmp_path / "out/shards/dedup").glob("*/exact.arrow")]) == 2, "the same slice is signed once"
    prepare(blend, tmp_path / "tagged", mode="tag")
    first, second = (lines_of(published(tmp_path / "tagged", name)[0]) for name in ("a", "b"))
    assert len(first) == len(second) == 5
    assert all(json.loads(line)["dedup_outcome"] == "exact_duplicate" for line in second)
    assert verify(str(tmp_path / "tagged"), inspect_rows).problems == []


def test_impossible_evaluations_and_prompts_are_reported(tmp_path):
    exam = write_rows(tmp_path / "exam.jsonl", [{"text": "too short"}, {"text": TEXT}])
    rows = [{"text": "one", "topic": "t"}, {"text": "one more", "topic": "t"}, {"text": f"Now: {VERSION}"}]
    blend = blend_of(write_rows(tmp_path / "a.jsonl", rows))
    evaluations = {"datasets": [{"name": "exam", "path": str(exam)}]}
    _, manifest = prepare(blend, tmp_path / "out", evaluations=evaluations, cap=1, cap_by="topic")
    assert manifest["totals"]["dropped"] == {"beyond_cap": 1, "contaminated": 1}
    assert warnings(manifest) == [
        "evaluation exam/exam.jsonl: 1 of 2 rows have fewer than 3 words and are not searched for",
        "cap: 1 documents don't have a prompt, so the cap doesn't apply to them",
    ]
    assert "| contaminated | 1 |" in markdown(manifest, "out")
    assert artifact_record(manifest, "out")["dedup"]["dropped"] == {"beyond_cap": 1, "contaminated": 1}
    (hit,) = pq.read_table(tmp_path / "out/hits.parquet").to_pylist()
    assert (hit["document"], hit["evaluation"], hit["row"], hit["runs"]) == ("a/a.jsonl@0#2", "exam/exam.jsonl", 1, 44)
    prepare(blend, tmp_path / "out")
    assert not (tmp_path / "out/hits.parquet").exists()


def test_units_of_text_without_spaces_are_reported(tmp_path):
    generator = random.Random(0)
    texts = [
        written(generator, "Chinese", 60),
        unbroken(generator, "minified code", 500),
        written(generator, "Thai", 60),
    ]
    versions = [f"{changed(generator, text, 1)}{text[:1]}" for text in texts]
    rows = [{"text": text} for text in [*texts, TEXT, *versions, f"{TEXT}\n", "?"]]
    _, manifest = prepare(blend_of(write_rows(tmp_path / "a.jsonl", rows)), tmp_path / "out")
    found = pq.read_table(tmp_path / "out/edges.parquet").to_pylist()
    counts = [tuple(row[kind] for kind in ("words", "characters", "letters", "pieces")) for row in found]
    made_of = [[kind for _, kind in units(text)] for text in texts]
    assert [row["reason"] for row in found] == ["near_duplicate"] * 3 + ["exact_duplicate"]
    assert counts[0] == (0, len(made_of[0]), 0, 0)
    assert counts[1][3] == sum(counts[1]) == pytest.approx(len(made_of[1]), abs=3)
    assert counts[2] == (0, 0, len(made_of[2]), 0)
    assert counts[3] == (None, None, None, None)
    duplicates = manifest["duplicates"]
    assert duplicates["units"] == {"characters": 2, "letters": 2, "pieces": 2, "words": 3}
    assert duplicates["not_compared"] == {"documents": 0, "first": []}


def test_bounded_documents_are_counted_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.tasks.dedup.near.COMPARED", 3)
    texts = forms(VOCABULARY, 120)
    _, manifest = prepare(blend_of(write_lines(tmp_path / "a.jsonl", texts)), tmp_path / "out")
    bound = manifest["duplicates"]["not_compared"]
    (line,) = warnings(manifest)
    assert bound["documents"] > len(bound["first"]) == 10
    assert f"{bound['documents']:,} kept documents" in line
    edges = pq.read_table(tmp_path / "out/edges.parquet")["dropped"].to_pylist()
    for name in bound["first"]:
        assert name.startswith("a/a.jsonl@0#")
        assert name in line
        assert name not in edges


def test_a_change_writes_only_the_shards_whose_rows_it_concerns(tmp_path):
    for name in "abc":
        write_rows(tmp_path / f"{name}.jsonl", [{"text": f"{name} {number}"} for number in range(3)])
    blend = blend_of(*(tmp_path / f"{name}.jsonl" for name in "abc"))
    prepare(blend, tmp_path / "out")
    before = {path.name: path.stat().st_ino for name in "abc" for path in published(tmp_path / "out", name)}
    write_rows(tmp_path / "a.jsonl", [{"text": "a longer text"}, {"text": "b  1"}])
    decided, manifest = prepare(blend, tmp_path / "out")
    assert [shard.dataset for shard in decided.plan.pending] == ["a", "b"]
    after = {path.name: path.stat().st_ino for name in "abc" for path in published(tmp_path / "out", name)}
    assert len(after.items() & before.items()) == 1
    assert manifest["totals"]["dropped"] == {"exact_duplicate": 1}


@pytest.mark.slow
def test_many_partitions_publish_the_bytes_of_one(tmp_path, monkeypatch):
    """Under other names: the recipe says how many there are."""
    found, outputs = PREPARATIONS["dedup"](tmp_path), []
    for size in (1 << 40, 500):
        monkeypatch.setattr("tokenmill.tasks.dedup.rounds.PARTITION_BYTES", size)
        (recipe,) = found.run()[1]["recipes"]
        files = {re.sub(r"-\w{8}(?=\.)", "", name): content for name, content in tree(found.out).items()}
        kept = {name: files[name] for name in files if name != "manifest.json" and not name.startswith("shards/")}
        outputs.append((recipe["recipe"]["partitions"], kept))
        found.clear()
    (one, expected), (many, published) = outputs
    assert (one, many > 4) == (1, True)
    assert published == expected
    assert {"edges.parquet", "hits.parquet", "data/three/part-00000.jsonl"} < {*expected}


def test_the_output_has_the_budget_and_the_facts_of_the_input(tmp_path):
    source = {"name": "a", "path": str(write_rows(tmp_path / "a.jsonl", ROWS)), "weight": 1.0, "text_field": "text"}
    source |= {"max_epochs": 4.0, "group": "web/good", "license": "CC0-1.0", "languages": ["en"], "domain": "web"}
    budget = {
        "tokens": 90,
        "groups": {"web": 1.0},
        "phases": [{"name": "main", "tokens": 60}, {"name": "end", "mix": {"a": 1.0}}],
    }
    prepare({**budget, "datasets": [source]}, tmp_path / "out")
    written = json.loads((tmp_path / "out/blend.json").read_bytes())
    assert written == {**budget, "datasets": [{**source, "path": str(tmp_path / "out/data/a")}]}


@pytest.mark.parametrize(
    ("source", "chosen", "message"),
    [
        ({"converter": "x"}, {}, "'converter' doesn't affect deduplication"),
        ({"path": "/nowhere.jsonl"}, {}, "nowhere"),
        ({"text_field": "txt"}, {}, "no column 'txt'; did you mean 'text'"),
        ({}, {"cap": 3}, "cap and cap_by need each other"),
        ({}, {"cap_by": "topic"}, "cap and cap_by need each other"),
        ({}, {"holdout": {"valid": 0.1}}, "holdout does not apply"),
        ({}, {"threshold": 0.3}, "threshold"),
        ({}, {"mode": "off"}, "mode"),
        ({}, {"near_on": "prompt"}, "near_on: unknown key"),
    ],
)
def test_unusable_inputs_fail_before_the_start(tmp_path, source, chosen, message):
    parquet_of(tmp_path / "a.parquet")
    blend = {"datasets": [{"name": "a", "path": str(tmp_path / "a.parquet"), **source}]}
    with pytest.raises(InputError, match=message):
        plan(blend, tmp_path / "out", **chosen)


def test_rows_that_were_decided_and_are_not_there_are_an_error(tmp_path, monkeypatch):
    planned = plan(blend_of(write_rows(tmp_path / "a.jsonl", ROWS)), tmp_path / "out")
    decisions = decisions_of(planned)
    decided = decided_plan(planned, decisions)
    (table,) = (rows_decided(decisions.uri, digest) for digest in decisions.digests)
    more = pa.Table.from_pylist([{"row": 99, "outcome": "exact_duplicate"}], schema=OUTCOMES)
    monkeypatch.setattr("tokenmill.tasks.dedup.apply.rows_decided", lambda *_: pa.concat_tables([table, more]))
    with pytest.raises(RunError, match="3 rows should be dropped, but the slice has 2 of them"):
        build(decided, decisions, decided.plan.pending)


def test_shards_that_contradict_decisions_are_not_published(tmp_path):
    decided, _ = prepare(blend_of(write_rows(tmp_path / "a.jsonl", ROWS)), tmp_path / "out")
    decisions = decided.found.decisions
    other = replace(decisions, facts={**decisions.facts, "tally": {"kept": 4, "exact_duplicate": 1}})
    plan = decided.plan.after(build(decided, decisions, decided.plan.shards))
    changed = replace(decided, plan=plan, found=replace(decided.found, decisions=other))
    with pytest.raises(RunError, match=r"but \{.exact_duplicate.: 1\} was decided"):
        DEDUP.publish(changed, 0.0)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"text": 1}\n[]\n{"text": 2}\n', "holds 2 rows, its receipt records 3"),
        (b'{"a": 1}\n{broken\n', "cannot be read"),
    ],
)
def test_non_object_rows_are_reported(tmp_path, content, problem):
    decided, _ = prepare(blend_of(write_rows(tmp_path / "a.jsonl", ROWS)), tmp_path / "out")
    (key,), store = decided.plan.keys, decided.plan.store
    receipt = store.receipt(key)
    assert inspect_rows(store, receipt) == []
    Path(store.path(key, "all.jsonl")).write_bytes(content)
    (found,) = inspect_rows(store, receipt)
    assert problem in found


def test_changed_or_foreign_decisions_are_not_applied(tmp_path):
    files = [write_rows(tmp_path / f"{count}.jsonl", ROWS[:count]) for count in (3, 7)]
    one, other = (decisions_of(prepare(blend_of(file), tmp_path / file.stem)[0]) for file in files)
    content = Path(other.uri).read_bytes()
    Path(one.uri).write_bytes(content)
    with pytest.raises(RunError, match="doesn't contain decisions"):
        rows_decided(one.uri, one.digests[0])
    Path(other.uri).write_bytes(content.replace(b"near_duplicate", b"fear_duplicate"))
    with pytest.raises(RunError, match="damaged since it was built"):
        rows_decided(other.uri, other.digests[0])
