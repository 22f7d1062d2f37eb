"""An RL shard: a row that nobody changes keeps every byte, a changed one is compact JSON, and none is lost without a reason."""

import datetime as dt
import gzip
import json
import math
import random
import re
import shutil
from collections import Counter
from decimal import Decimal
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import max_examples
from tests.preparing import blend_of, quarantined
from tests.preparing_rl import lines_of, prepare, write_rows

BOM = b"\xef\xbb\xbf"


def prepared(blend, out, **chosen):
    """The rows of each split of a preparation, in order."""
    _, manifest = prepare(blend, out, **chosen)
    return {key: lines_of(manifest[key]) for key in ("train", "val", "test") if manifest[key]}


def train(blend, out, **chosen):
    found = prepared(blend, out, **chosen)
    assert found.keys() <= {"train"}
    return found.get("train", [])


def transformed(path, *transforms, **fields):
    flat = blend_of(path)
    return {"datasets": [{**source, "transforms": list(transforms), **fields} for source in flat["datasets"]]}


# Rows that nobody changes.

blank = st.sampled_from(["", "", " ", "\t", "   "])
number = st.sampled_from(
    ["0", "-0", "1.0", "1.50", "1e5", "1E+05", "-0.0e-0", "0.1", "123456789012345678901234567890", "1.7976931348623157e308"]
)  # fmt: skip
character = st.characters(exclude_categories=["Cs"]).map(lambda each: json.dumps(each, ensure_ascii=False)[1:-1])
escaped = st.sampled_from(
    ["\\/", "\\u0041", "\\u00E9", "\\ud83d\\ude00", "\\u2028", "\\n", '\\"', "\u2028", "\u0085", "😀"]
)
string = st.lists(character | escaped, max_size=4).map(lambda parts: f'"{"".join(parts)}"')
key = st.sampled_from(['"a"', '"\\u0061"', '"text"', '""', '"é"'])


def padded(value):
    return st.tuples(blank, value, blank).map("".join)


def containers(inner):
    member = st.tuples(padded(key), padded(inner)).map(":".join)
    array = st.lists(padded(inner), max_size=3).map(lambda items: f"[{','.join(items)}]")
    return array | st.lists(member, max_size=4).map(lambda members: f"{{{','.join(members)}}}")


value = st.recursive(number | string | st.sampled_from(["true", "false", "null"]), containers, max_leaves=6)
spelling = st.lists(st.tuples(padded(key), padded(value)).map(":".join), max_size=4).map(
    lambda members: f"{{{','.join(members)}}}".encode()
)
"""Any spelling of an object: blanks, numbers, escapes, and keys that occur twice."""

STORED = {
    "some.jsonl": bytes,
    "some.jsonl.gz": gzip.compress,
    "some.jsonl.zst": zstandard.compress,
    "some.json": bytes,
}  # fmt: skip


@max_examples(25)
@given(
    st.lists(st.tuples(spelling, st.sampled_from([b"", b"\r", b" \t"])), min_size=1, max_size=12),
    st.sampled_from([*STORED]), st.booleans(), st.sampled_from([b"", b"\n", b" \r\n\n"]), st.integers(60, 400),
)  # fmt: skip
def test_a_row_that_nobody_changes_keeps_every_byte(tmp_path_factory, rows, name, marked, gap, shard_size):
    """Whatever its spelling is, however it is stored, and wherever the file is cut."""
    folder = tmp_path_factory.mktemp("bytes")
    content = (BOM if marked else b"") + gap.join(row + end + b"\n" for row, end in rows)
    (folder / name).write_bytes(STORED[name](content))
    found = train(blend_of(folder / name), folder / "out", shard_size=shard_size)
    assert found == [row + end for row, end in rows]
    shutil.rmtree(folder)


@max_examples(20)
@given(st.lists(spelling, min_size=1, max_size=8), st.sampled_from([b",", b", ", b",\n", b",\r\n  "]), st.booleans())
def test_so_does_an_element_of_an_array(tmp_path_factory, rows, comma, marked):
    folder = tmp_path_factory.mktemp("array")
    (folder / "some.json").write_bytes((BOM if marked else b"") + b"[" + comma.join(rows) + b"]")
    assert train(blend_of(folder / "some.json"), folder / "out") == rows
    shutil.rmtree(folder)


def exact(line):
    """What a row says, with its numbers as they are spelt and its keys as often as they occur."""
    return json.loads(line, parse_int=str, parse_float=str, object_pairs_hook=list)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=repr)
def test_multi_line_element_becomes_one_equal_line(tmp_path, end):
    rows = [
        b'{"n": 123456789012345678901234567890,\n  "x": 1.50, "x": 2}',
        b'{\n  "deep": {\n    "a": [1E+05,\n\n 2]\n  },\n\n  "text": "a\\nb"\n}',
        b'{"on": "one line", "n": 18446744073709551616}',
    ]
    content = b"[\n" + b",\n".join(rows) + b"\n]\n"
    (tmp_path / "some.json").write_bytes(content.replace(b"\n", end))
    found = train(blend_of(tmp_path / "some.json"), tmp_path / "out")
    assert [exact(line) for line in found] == [exact(row) for row in rows]


def test_a_reader_that_knows_other_line_ends_finds_the_same_rows(tmp_path):
    """Text that is opened in Python has a line end wherever a carriage return stands, also between two values."""
    path = write_rows(tmp_path / "some.jsonl", [b'{"a": 1,\r "b": 2}', b'{"a": 3}\r', b'{"a":\r\r4}\r'])
    _, manifest = prepare(blend_of(path), tmp_path / "out")
    with Path(manifest["train"]).open(encoding="utf-8") as file:
        assert [json.loads(line) for line in file] == [{"a": 1, "b": 2}, {"a": 3}, {"a": 4}]


def test_an_array_of_many_blocks_keeps_every_byte(tmp_path):
    source = random.Random(7)
    rows = [b'{ "n":%d.0, "text": "%s" }' % (number, b"\\u00e9," * source.randint(0, 900)) for number in range(800)]
    content = b"[" + b" ,\n ".join(rows) + b"]"
    assert len(content) > 2 << 20
    (tmp_path / "some.json.gz").write_bytes(gzip.compress(content, 1))
    assert [line.rstrip() for line in train(blend_of(tmp_path / "some.json.gz"), tmp_path / "out")] == rows


@pytest.mark.parametrize(
    "transforms", [[], ["passthrough"], [{"select": ["b", "a"]}], [{"rename": {"b": "b", "a": "a"}}]]
)
def test_unneeded_transform_keeps_every_byte(tmp_path, transforms):
    rows = [b'{"b" :1.0,"a":"\\u00e9" }', b'{ "b":1e2, "b": 10000000000000000000000, "a": null}']
    path = write_rows(tmp_path / "some.jsonl", rows)
    assert train(transformed(path, *transforms), tmp_path / "out") == rows


# Rows that are changed.


def says_a_key_twice(row):
    repeated = []
    json.loads(row, object_pairs_hook=lambda pairs: repeated.append(len(dict(pairs)) < len(pairs)))
    return any(repeated)


@max_examples(20)
@given(st.lists(spelling, min_size=1, max_size=10))
def test_changed_row_is_equal_compact_json(tmp_path_factory, rows):
    rows = [b"{}", *rows]  # one at least is kept
    folder = tmp_path_factory.mktemp("changed")
    wrapped = [b'{"old": ' + row + b', "other": 1.0}' for row in rows]
    path = write_rows(folder / "some.jsonl", wrapped)
    found = train(transformed(path, {"rename": {"new": "old"}}), folder / "out")
    kept = [row for row in rows if not says_a_key_twice(row)]
    assert [repr(json.loads(line)) for line in found] == [repr({"new": json.loads(row)}) for row in kept]
    plain = [number for number, row in enumerate(kept) if not re.search(rb"\d{19}", row)]
    assert [found[number] for number in plain] == [
        orjson.dumps({"new": orjson.loads(kept[number])}) for number in plain
    ]
    shutil.rmtree(folder)


def test_dataset_transforms_precede_global_ones(tmp_path):
    one, other = (write_rows(tmp_path / f"{name}.jsonl", [{"a": name, "b": 1}]) for name in ("one", "other"))
    blend = blend_of(one, other)
    blend["datasets"][0]["transforms"] = [{"select": ["b"]}, {"rename": {"c": "b"}}]
    assert train(blend, tmp_path / "out", transforms=[{"select": ["a"]}]) == [b'{"c":1}', b'{"a":"other"}']


# Parquet.


def parquet(path, table, **options):
    pq.write_table(table, path, **options)
    return path


def test_parquet_rows_become_their_objects(tmp_path):
    """Nulls are left out at every depth but in lists, which count their items."""
    kind = pa.schema(
        {
            "text": pa.large_string(),
            "n": pa.int64(),
            "x": pa.float64(),
            "yes": pa.bool_(),
            "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "deep": pa.struct({"n": pa.int8()})})),
            "items": pa.list_(pa.int32()),
            "map": pa.map_(pa.string(), pa.int64()),
        }
    )  # fmt: skip
    rows = [
        {"text": "é\n", "n": 2**63 - 1, "x": 0.1, "yes": False, "items": [1, None], "map": [("k", 1)]},
        {"messages": [{"role": "user", "content": None, "deep": {"n": None}}, None, {"content": "c", "deep": None}]},
        {},
    ]
    path = parquet(tmp_path / "some.parquet", pa.Table.from_pylist(rows, kind), row_group_size=2)
    found = train(blend_of(path), tmp_path / "out", shard_size=1)
    assert [json.loads(line) for line in found] == [
        {"text": "é\n", "n": 2**63 - 1, "x": 0.1, "yes": False, "items": [1, None], "map": {"k": 1}},
        {"messages": [{"role": "user", "deep": {}}, None, {"content": "c"}]},
        {},
    ]
    assert all(orjson.dumps(orjson.loads(line)) == line for line in found)


def test_moments_are_written_as_text_and_what_json_has_not_makes_a_bad_row(tmp_path):
    moment = dt.datetime(2024, 2, 29, 12, 30, 1, 250_000, tzinfo=dt.UTC)
    columns = {
        "id": pa.array(range(5)),
        "day": pa.array([moment.date(), None, None, None, None], pa.date32()),
        "at": pa.array([moment, None, None, None, None], pa.timestamp("us", "UTC")),
        "bytes": pa.array([None, b"raw \xff", None, None, None], pa.binary()),
        "price": pa.array([None, None, Decimal("1.20"), None, None], pa.decimal128(5, 2)),
        "deep": pa.array([None, None, None, [{"b": b""}], None], pa.list_(pa.struct({"b": pa.binary()}))),
    }
    path = parquet(tmp_path / "some.parquet", pa.table(columns))
    _, manifest = prepare(blend_of(path), tmp_path / "out")
    first, last = map(json.loads, lines_of(manifest["train"]))
    assert (first["id"], first["day"]) == (0, "2024-02-29")
    assert dt.datetime.fromisoformat(first["at"]) == moment
    assert last == {"id": 4}
    assert manifest["totals"]["dropped"] == {"not_json": 3}
    bad = quarantined(tmp_path / "out")
    assert [(row["line"], row["reason"]) for row in bad] == [(number, "not_json") for number in (2, 3, 4)]
    assert all("remove it" in row["detail"] for row in bad)
    assert "raw" in bad[0]["excerpt"]


NO_JSON = {
    "bytes and decimals": {"bytes": [b"\xff"] * 40, "price": [Decimal("1.2")] * 40},
    "keys that are no text": {"counts": pa.array([[(number, "x")] for number in range(40)], pa.map_(pa.int32(), pa.string()))},
}  # fmt: skip


@pytest.mark.parametrize("what", NO_JSON)
def test_what_json_has_not_does_no_harm_where_it_is_excluded(tmp_path, what):
    path = parquet(tmp_path / "some.parquet", pa.table({"id": range(40), **NO_JSON[what]}))
    chosen = {"holdout": {"valid": 0.4, "test": 0.3}}
    found = prepared(transformed(path, {"select": ["id"]}), tmp_path / "out", **chosen)
    assert sorted(json.loads(line)["id"] for rows in found.values() for line in rows) == [*range(40)]
    _, manifest = prepare(blend_of(path), tmp_path / "whole", allow_shrink=["some"], **chosen)
    assert manifest["totals"]["dropped"] == {"not_json": 40}


def test_moments_and_numbers_that_cannot_be_spelt_are_counted(tmp_path):
    columns = {"id": pa.array(range(3)), "day": pa.array([0, 2**30, None], pa.date32())}
    _, manifest = prepare(blend_of(parquet(tmp_path / "some.parquet", pa.table(columns))), tmp_path / "out")
    assert [json.loads(line)["id"] for line in lines_of(manifest["train"])] == [0, 2]
    assert manifest["totals"]["dropped"] == {"unreadable_value": 1}


def gym(question, **fields):
    asked = {"responses_create_params": {"input": [{"role": "user", "content": question}]}}
    return {**asked, "agent_ref": {"type": "responses_api_agents", "name": "math"}, **fields}


@pytest.fixture
def table(tmp_path):
    """A table of two questions, and the transform that looks them up."""
    rows = [
        {"prompt": [{"role": "user", "content": f"Q{n}"}], "reward_model": {"ground_truth": f"A{n}"}} for n in range(2)
    ]
    parquet(tmp_path / "table.parquet", pa.Table.from_pylist(rows))
    return {"resolve_placeholders": {"some": {"path": str(tmp_path / "table.parquet"), "style": "skywork"}}}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_null_placeholder_next_to_a_resolved_one(tmp_path, table, ending):
    """Parquet has the column in every row; where a writer spelt it as a struct full of nulls, it says as little."""
    rows = [
        gym("How much?", _hf_placeholder=None, dataset="other"),
        {"agent_ref": gym("")["agent_ref"], "_hf_placeholder": {"row": 1, "question_template": "Say: {question}"}, "dataset": "some"},
        gym("How many?", _hf_placeholder={"row": None, "question_template": None}, dataset="other"),
    ]  # fmt: skip
    path = tmp_path / f"rows.{ending}"
    write_rows(path, rows) if ending == "jsonl" else parquet(path, pa.Table.from_pylist(rows))
    _, manifest = prepare(transformed(path, table), tmp_path / "out", target="nemo_gym")
    found = [json.loads(line) for line in lines_of(manifest["train"])]
    asked = [row["responses_create_params"]["input"][0]["content"] for row in found]
    assert asked == ["How much?", "Say: Q1", "How many?"]
    assert found[1]["expected_answer"] == "A1"
    assert manifest["mode"] == "resolve"


def test_parameters_that_the_trainer_overwrites_are_counted(tmp_path):
    warm = gym("How much?")
    warm["responses_create_params"] |= {"temperature": 0.7, "top_p": None}
    rows = [
        warm,
        gym("How many?"),
        {"responses_create_params": {"input": "Why?", "top_p": 1}, "agent_ref": warm["agent_ref"]},
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    _, manifest = prepare(blend_of(tmp_path / "rows.jsonl"), tmp_path / "out", target="nemo_gym")
    assert [json.loads(line) for line in lines_of(manifest["train"])] == rows
    (counts,) = manifest["totals"]["not_read"].values()
    assert counts == {"responses_create_params.temperature": 1, "responses_create_params.top_p": 1}


# Rows that cannot be written as they are.


def asked(number, answer):
    return [{"role": "user", "content": "q", "id": number}, {"role": "assistant", "content": answer}]


GOOD = {"chosen": asked(1, "a"), "rejected": asked(1, "b")}


def test_questions_with_different_long_integers_are_distinct(tmp_path):
    """As floats they are one."""
    longs = [12345678901234567890123, 12345678901234567890124]
    bad = {"chosen": asked(longs[0], "a"), "rejected": asked(longs[1], "b")}
    same = {"chosen": asked(longs[0], "a"), "rejected": asked(longs[0], "b")}
    path = write_rows(tmp_path / "some.jsonl", [GOOD, bad, same])
    _, manifest = prepare(transformed(path, "preference"), tmp_path / "out", target="nemo_rl_dpo")
    assert [json.loads(line)["context"][0]["id"] for line in lines_of(manifest["train"])] == [1, longs[0]]
    assert manifest["totals"]["dropped"] == {"two_prompts": 1}
    assert [(row["line"], row["reason"]) for row in quarantined(tmp_path / "out")] == [(2, "two_prompts")]


@pytest.mark.parametrize("shape", ["[", '{"a":'], ids=["arrays", "objects"])
def test_a_deep_row_with_a_long_integer_is_set_aside_unless_its_depth_is_excluded(tmp_path, shape):
    depth = 1000
    deep = f"{shape * depth}1{(']' if shape == '[' else '}') * depth}"
    row = f'{{"a":{deep},"b":1234567890123456789,"c":1}}'.encode()
    path = write_rows(tmp_path / "some.jsonl", [b'{"a":1,"b":2,"c":3}', row, b'{"a":4,"b":5,"c":6}'])
    _, manifest = prepare(transformed(path, {"select": ["a", "b"]}), tmp_path / "out")
    assert [json.loads(line)["b"] for line in lines_of(manifest["train"])] == [2, 5]
    assert manifest["totals"]["dropped"] == {"not_json": 1}
    (found,) = quarantined(tmp_path / "out")
    assert (found["line"], found["reason"]) == (2, "not_json")
    assert "recursion" in found["detail"].lower()
    _, manifest = prepare(transformed(path, {"select": ["b"]}), tmp_path / "shallow")
    assert [json.loads(line)["b"] for line in lines_of(manifest["train"])] == [2, 1234567890123456789, 5]


@pytest.mark.parametrize("digits", [b"12", b"1234567890123456789"], ids=["short", "long"])
def test_how_deep_a_row_may_be_does_not_depend_on_its_integers(tmp_path, digits):
    rows = [b'{"a":%s%s%s,"b":1}' % (b"[" * depth, digits, b"]" * depth) for depth in (200, 400)]
    path = write_rows(tmp_path / "some.jsonl", rows)
    _, manifest = prepare(transformed(path, {"select": ["a"]}), tmp_path / "out")
    assert lines_of(manifest["train"]) == [rows[0].replace(b',"b":1', b"")]
    assert manifest["totals"]["dropped"] == {"not_json": 1}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_json_numbers_in_parquet_make_a_bad_row(tmp_path, number):
    columns = {
        "id": range(5),
        "text": ["null", "NaN", "null", "x", "null"],
        "x": [0.5, number, None, 1.5, -0.0],
        "deep": [[{"y": [None, 1.0]}], None, [], [{"y": [2.0, number]}], [{"y": []}]],
    }
    pq.write_table(pa.table(columns), tmp_path / "some.parquet")
    _, manifest = prepare(blend_of(tmp_path / "some.parquet"), tmp_path / "out")
    assert [json.loads(line) for line in lines_of(manifest["train"])] == [
        {"id": 0, "text": "null", "x": 0.5, "deep": [{"y": [None, 1.0]}]},
        {"id": 2, "text": "null", "deep": []},
        {"id": 4, "text": "null", "x": -0.0, "deep": [{"y": []}]},
    ]
    assert manifest["totals"]["dropped"] == {"not_json": 2}
    found = quarantined(tmp_path / "out")
    assert [(row["line"], row["reason"]) for row in found] == [(2, "not_json"), (4, "not_json")]
    assert all("NaN or an infinity" in row["detail"] and "drop or replace" in row["detail"] for row in found)


def test_moments_beside_a_null_are_written_as_ever(tmp_path):
    day = pa.array([0, 1], pa.date32())
    pq.write_table(pa.table({"day": day, "items": [[None], [1]]}), tmp_path / "some.parquet")
    _, manifest = prepare(blend_of(tmp_path / "some.parquet"), tmp_path / "out")
    assert lines_of(manifest["train"]) == [b'{"day":"1970-01-01","items":[null]}', b'{"day":"1970-01-02","items":[1]}']


# No row is lost.

MIXED = {
    b'{"a": "good", "keep": "yes"}': None,
    b'{"a": "left", "keep": "no"}': "filtered",
    b'{"keep": "yes"}': "missing_field",
    b"broken": "malformed_json",
    b"[1]": "not_an_object",
    b'{"a": "\xff"}': "invalid_utf8",
    b'{"a": "\\ud800"}': "lone_surrogate",
    b" ": "blank_line",
    b"": "blank_line",
    b'{"a": 1': "malformed_json",
    b'{"a": 2, "keep": ["yes", "x"]}': None,
}
"""Rows, and why each is dropped where `a` is selected of those with keep=yes; None for those that stay."""
QUARANTINED = {"missing_field", "malformed_json", "not_an_object", "invalid_utf8", "lone_surrogate"}


def mixed(folder, count=150):
    """Two files of one dataset, with the rows of each."""
    source = random.Random(count)
    rows = {name: source.choices([*MIXED], k=count) for name in ("a.jsonl", "b.jsonl")}
    for name, each in rows.items():
        write_rows(folder / "in" / name, each)
    return rows


@pytest.mark.parametrize("shard_size", [160, 700, 10**9])
def test_every_row_is_written_or_counted_and_bad_ones_are_named_by_file_and_line(tmp_path, shard_size):
    rows = mixed(tmp_path)
    blend = transformed(tmp_path / "in", {"select": ["a"]}, filters={"keep": "yes"})
    planned, manifest = prepare(blend, tmp_path / "out", shard_size=shard_size)
    assert len(planned.plan.shards) >= 6 if shard_size < 1000 else len(planned.plan.shards) == 1  # a bundle
    fates = Counter(MIXED[row] for each in rows.values() for row in each)
    kept = fates.pop(None)
    assert manifest["totals"]["dropped"] == fates
    assert manifest["totals"]["documents"] == len(lines_of(manifest["train"])) == kept
    assert manifest["totals"]["rows"] == 300
    assert lines_of(manifest["train"]) == [
        orjson.dumps({"a": orjson.loads(row)["a"]}) for each in rows.values() for row in each if MIXED[row] is None
    ]
    found = [(Path(row["file"]).name, row["line"], row["reason"]) for row in quarantined(tmp_path / "out", "in")]
    assert found == [
        (name, number, MIXED[row])
        for name, each in rows.items()
        for number, row in enumerate(each, 1)
        if MIXED[row] in QUARANTINED
    ]
    assert manifest["totals"]["quarantined"] == len(found)


def test_a_row_in_quarantine_shows_how_it_begins_and_one_that_is_filtered_out_cannot_be_bad(tmp_path):
    path = write_rows(tmp_path / "some.jsonl", [b'{"n":  1.0, "b": 2}', b'{"a": 1}'])
    prepare(transformed(path, {"select": ["a"]}), tmp_path / "out")
    (row,) = quarantined(tmp_path / "out")
    assert row["excerpt"] == '{"n":  1.0, "b": 2}'
    assert "field a" in row["detail"]
    path = write_rows(tmp_path / "some.jsonl", [{"used_in": "other"}] * 30 + [{"used_in": ["mine"], "a": 1}])
    blend = transformed(path, {"select": ["a"]}, used_in="mine")
    _, manifest = prepare(blend, tmp_path / "out", on_bad_row="fail", max_bad_row_fraction=0.0, allow_shrink=["some"])
    assert lines_of(manifest["train"]) == [b'{"a":1}']
    assert manifest["totals"]["dropped"] == {"filtered": 30}


# Held out by a hash of the row.

SHARES = {"holdout": {"valid": 0.2, "test": 0.1}}


def sides(found):
    """The split that each row is in, by its `id`."""
    return {json.loads(line)["id"]: split for split, rows in found.items() for line in rows}


def test_rows_never_change_splits(tmp_path):
    rows = [{"id": number, "text": f"text {number}", "keep": number % 3} for number in range(300)]
    path = write_rows(tmp_path / "some.jsonl", rows)
    found = prepared(blend_of(path), tmp_path / "out", **SHARES)
    assert all(lines == sorted(lines, key=lambda line: json.loads(line)["id"]) for lines in found.values())
    expected = sides(found)
    assert len(expected) == sum(map(len, found.values())) == 300
    assert set(expected.values()) == {"train", "val", "test"}
    shuffled = random.Random(3).sample(rows, k=len(rows))
    more = [{"id": -number, "text": "other"} for number in range(1, 200)]
    others = {
        "selected": transformed(path, {"select": ["id"]}),
        "renamed": transformed(path, {"rename": {"id": "id", "new": "text"}}),
        "filtered": transformed(path, filters={"keep": 1}),
        "shuffled": blend_of(write_rows(tmp_path / "shuffled.jsonl", shuffled)),
        "among others": blend_of(
            write_rows(tmp_path / "more.jsonl", [b"broken", *more[:100], *rows, b"", *more[100:]])
        ),
        "compressed": blend_of(tmp_path / "some.jsonl.gz"),
    }
    (tmp_path / "some.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    for name, blend in others.items():
        found = sides(prepared(blend, tmp_path / name, shard_size=3000, **SHARES))
        assert {number: side for number, side in found.items() if number >= 0}.items() <= expected.items(), name
        assert len(found) == {"filtered": 100, "among others": 499}.get(name, 300)


@pytest.mark.parametrize(
    ("name", "before", "between", "after"),
    [
        ("some.jsonl", BOM, b"\n", b"\n"),
        ("some.jsonl", b"", b"\r\n", b""),
        ("some.json", b"[\n", b",\n", b"\n]"),
        ("some.json", b"[", b" , ", b"]"),
    ],
    ids=["byte order mark", "no last line end", "array", "blanks"],
)
def test_rows_at_either_end_never_change_splits(tmp_path, name, before, between, after):
    """What stands before the first row of a file or after the last is not of the row."""
    rows = [json.dumps({"id": number}).encode() for number in range(30)]
    found = []
    for turn in range(0, 30, 3):
        path = tmp_path / f"{turn}" / name
        path.parent.mkdir()
        path.write_bytes(before + between.join(rows[turn:] + rows[:turn]) + after)
        found.append(sides(prepared(blend_of(path), path.parent / "out", holdout={"valid": 0.4, "test": 0.3})))
    assert [each for each in found if each != found[0]] == []


def test_parquet_rows_keep_their_splits(tmp_path):
    rows = [{"id": number, "text": f"text {number}", "raw": b"\xff"} for number in range(300)]
    one = parquet(tmp_path / "one.parquet", pa.Table.from_pylist(rows))
    other = parquet(tmp_path / "other.parquet", pa.Table.from_pylist(rows[::-1]), row_group_size=37)
    kept = {"select": ["id", "text"]}
    expected = sides(prepared(transformed(one, kept), tmp_path / "out", **SHARES))
    assert set(expected.values()) == {"train", "val", "test"}
    assert sides(prepared(transformed(one, {"select": ["id"]}), tmp_path / "select", **SHARES)) == expected
    assert sides(prepared(transformed(other, kept), tmp_path / "reversed", shard_size=500, **SHARES)) == expected


def test_equal_rows_share_a_split_and_seeds_differ(tmp_path):
    first = write_rows(tmp_path / "first.jsonl", [{"id": number} for number in range(200)])
    again = write_rows(tmp_path / "again.jsonl", [{"id": number} for number in range(199, -1, -1)])
    found = prepared(blend_of(first, again), tmp_path / "out", **SHARES)
    assert set(Counter(line for rows in found.values() for line in rows).values()) == {2}
    assert all(set(Counter(rows).values()) == {2} for rows in found.values())
    other = prepared(blend_of(first, again), tmp_path / "other", holdout={"valid": 0.2, "test": 0.1, "seed": 7})
    assert sides(found) != sides(other)


# The same bytes, always.


def test_compressed_files_are_read_by_others_also_where_frames_were_joined(tmp_path):
    rows = [{"id": number, "text": "text " * (number % 50)} for number in range(3000)]
    path = write_rows(tmp_path / "some.jsonl", rows)
    planned, manifest = prepare(blend_of(path), tmp_path / "out", compression="zstd", shard_size=70_000)
    assert len(planned.plan.shards) > 3
    assert manifest["train"].endswith(".jsonl.zst")
    content = path.read_bytes()
    with zstandard.open(manifest["train"], "rb") as stream:
        assert stream.read() == content
    with pa.OSFile(manifest["train"]) as file, pa.CompressedInputStream(file, "zstd") as stream:
        assert stream.read() == content
    copied = tmp_path / "copied"
    with Path(manifest["train"]).open("rb") as stream, copied.open("wb") as plain:
        zstandard.ZstdDecompressor().copy_stream(stream, plain)
    assert copied.read_bytes() == content
    assert Path(manifest["train"]).stat().st_size < len(content) / 5
    shards = sorted((tmp_path / "out/train").iterdir())
    assert b"".join(zstandard.ZstdDecompressor().decompressobj().decompress(each.read_bytes()) for each in shards) == content  # fmt: skip


def test_only_changed_rows_are_rewritten(tmp_path):
    rows = [b'{"a" : 1.0}', b'{"a" : 1.0, "b": 2}', b'{ "a":2e0 }']
    path = write_rows(tmp_path / "some.jsonl", rows)
    _, manifest = prepare(transformed(path, {"select": ["a"]}), tmp_path / "out")
    assert lines_of(manifest["train"]) == [rows[0], b'{"a":1.0}', rows[2]]
    assert manifest["shards"][0]["facts"]["untouched"] == 2
    spelt = b'{"a":[1.50,1E+05,-0,-0.0,1e-400],"b":{"c":0.10},"d":2.5}'
    path = write_rows(tmp_path / "a.jsonl", [b'{"x": %s, "gone": 1}' % spelt])
    (renamed,) = train(transformed(path, {"rename": {"y": "x"}}), tmp_path / "renamed")
    assert repr(json.loads(renamed)) == repr({"y": json.loads(spelt)})


def test_a_changed_row_never_loses_one_of_two_values(tmp_path):
    """Rows that come through keep both values; where a row is written anew, it is set aside instead."""
    twice, beside = b'{"x": {"a": 1, "a": 2}, "y": 3}', b'{"x": {"a": 1}, "y": 4, "y": 5, "z": 1}'
    path = write_rows(tmp_path / "a.jsonl", [twice, beside])
    assert train(blend_of(path), tmp_path / "same") == [twice, beside]
    _, manifest = prepare(transformed(path, {"select": ["x"]}), tmp_path / "out")
    assert lines_of(manifest["train"]) == [b'{"x":{"a":1}}']
    (bad,) = [json.loads(line) for file in (tmp_path / "out/quarantine").rglob("*.jsonl") for line in file.open()]
    assert (bad["reason"], "'a' appears twice" in bad["detail"]) == ("repeated_key", True)
