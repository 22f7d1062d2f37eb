"""Rows that cannot be written as they are: each is set aside with a reason, and no number becomes null unseen."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.preparing import blend_of
from tests.preparing_rl import lines_of, prepare, write_rows


def quarantine(out):
    return [json.loads(line) for line in (Path(out) / "quarantine/some.jsonl").read_bytes().splitlines()]


def transformed(path, *transforms):
    flat = blend_of(path)
    return {"datasets": [{**source, "transforms": list(transforms)} for source in flat["datasets"]]}


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
    assert [(row["line"], row["reason"]) for row in quarantine(tmp_path / "out")] == [(2, "two_prompts")]


@pytest.mark.parametrize("shape", ["[", '{"a":'], ids=["arrays", "objects"])
def test_a_deep_row_with_a_long_integer_is_set_aside_unless_its_depth_is_excluded(tmp_path, shape):
    depth = 1000
    deep = f"{shape * depth}1{(']' if shape == '[' else '}') * depth}"
    row = f'{{"a":{deep},"b":1234567890123456789,"c":1}}'.encode()
    path = write_rows(tmp_path / "some.jsonl", [b'{"a":1,"b":2,"c":3}', row, b'{"a":4,"b":5,"c":6}'])
    _, manifest = prepare(transformed(path, {"select": ["a", "b"]}), tmp_path / "out")
    assert [json.loads(line)["b"] for line in lines_of(manifest["train"])] == [2, 5]
    assert manifest["totals"]["dropped"] == {"not_json": 1}
    (found,) = quarantine(tmp_path / "out")
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
    found = quarantine(tmp_path / "out")
    assert [(row["line"], row["reason"]) for row in found] == [(2, "not_json"), (4, "not_json")]
    assert all("NaN or an infinity" in row["detail"] and "drop or replace" in row["detail"] for row in found)


def test_moments_beside_a_null_are_written_as_ever(tmp_path):
    day = pa.array([0, 1], pa.date32())
    pq.write_table(pa.table({"day": day, "items": [[None], [1]]}), tmp_path / "some.parquet")
    _, manifest = prepare(blend_of(tmp_path / "some.parquet"), tmp_path / "out")
    assert lines_of(manifest["train"]) == [b'{"day":"1970-01-01","items":[null]}', b'{"day":"1970-01-02","items":[1]}']
