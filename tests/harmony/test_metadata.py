"""Columns say what the record says, and null where it says something else."""

import hashlib
import json
from decimal import Decimal

import pytest
from tokenmill.tasks.harmony.columns import effort_of, of_evaluation, of_record, of_tools
from tokenmill.tasks.harmony.converters import CONVERTERS

from tests.harmony import rows
from tests.harmony.rows import block


def evaluation(metadata, effort="high", *, tools=False):
    return of_evaluation({"metadata": metadata}, effort, tools=tools)


@pytest.mark.parametrize(
    ("split", "effort"),
    [
        ("high_part00", "high"),
        ("high.part_01", "high"),
        ("medium", "medium"),
        ("low", "low"),
        ("lean", None),
        ("", None),
    ],
)
def test_the_effort_is_in_the_name_of_the_split(split, effort):
    assert effort_of(split) == effort


def test_metadata_from_sources():
    assert of_record({**rows.MATH, "capability_target": "chat", "reasoning": "on"}) == {
        "source_uuid": "u-1",
        "source_license": "cc-by-4.0",
        "source_used_in": ["nano_v3"],
        "source_data_source": "aops",
        "source_changed_answer_to_majority": False,
        "source_capability_target": "chat",
        "source_reasoning": "on",
        "meta_expected_answer": "1024",
    }
    assert of_record(rows.PROOF)["source_data_source"] == "mathstack"


@pytest.mark.parametrize(
    "record",
    [
        {},
        dict.fromkeys(rows.MATH),
        {"uuid": 7, "license": ["a"], "used_in": "x", "data_source": {}, "changed_answer_to_majority": 1},
    ],
)
def test_absent_or_odd_metadata_is_null(record):
    assert set(of_record(record).values()) == {None}


@pytest.mark.parametrize(
    ("used", "found"), [([], []), (["a", 1], None), (["a", None], None), ("a", None), (["a"], ["a"])]
)
def test_used_in_is_a_list_of_strings_or_null(used, found):
    assert of_record({"used_in": used})["source_used_in"] == found


def test_rates_of_a_problem():
    found = evaluation(rows.MATH["metadata"], tools=True)
    assert found | {"meta_eval_json": None} == {
        "meta_correctness": 1.0,
        "meta_eval_best_setting": "reason_low_no_tool",
        "meta_pass_k": 8,
        "meta_correct_count": 8,
        "meta_correctness_low": 1.0,
        "meta_correctness_medium": None,
        "meta_correctness_high": 0.5,
        "meta_correctness_high_with_tool": 0.25,
        "meta_correctness_high_no_tool": 0.5,
        "meta_correctness_own": 0.25,
        "meta_difficulty": "hard",
        "meta_eval_json": None,
    }
    assert json.loads(found["meta_eval_json"]) == rows.MATH["metadata"]
    assert evaluation(json.dumps(rows.MATH["metadata"])) == evaluation(rows.MATH["metadata"])


@pytest.mark.parametrize(
    ("metadata", "columns"),
    [
        ({"reason_low_with_tool": block(0.5, 4), "reason_high_no_tool": block(0.5)}, ("reason_low_with_tool", 0.5, 4, 2)),
        ({"reason_low_no_tool": {"accuracy": 1.0, "count": True, "pass": "8"}}, ("reason_low_no_tool", 1.0, None, None)),
        ({"reason_high_no_tool": {"accuracy": 0.5, "count": 1 << 63}}, ("reason_high_no_tool", 0.5, None, None)),
        ({"reason_high_no_tool": {"accuracy": 10**400, "count": 8}}, (None, None, None, None)),
        ({"reason_high_no_tool": {"accuracy": Decimal("0.5"), "count": 8}}, (None, None, None, None)),
        ({"reason_high_no_tool": {"accuracy": 0.5, "count": 8, "seen": b"bytes"}}, ("reason_high_no_tool", 0.5, 8, None)),
    ],
    ids=["of equal rates the first", "no counts", "a count too large", "a rate too large", "a decimal", "bytes"],
)  # fmt: skip
def test_rates_use_the_best_column_or_null(metadata, columns):
    found = evaluation(metadata)
    names = ("meta_eval_best_setting", "meta_correctness", "meta_pass_k", "meta_correct_count")
    assert tuple(found[name] for name in names) == columns
    assert found["meta_eval_json"] is None or json.loads(found["meta_eval_json"]) == metadata


@pytest.mark.parametrize(
    ("effort", "tools", "own"),
    [("low", False, 1.0), ("high", False, 0.5), ("high", True, 0.25), ("low", True, None), (None, False, None)],
)
def test_own_rate_matches_effort_and_tools(effort, tools, own):
    assert evaluation(rows.MATH["metadata"], effort, tools=tools)["meta_correctness_own"] == own


@pytest.mark.parametrize(
    ("rate", "difficulty"),
    [(0.0, "hard"), (0.25, "hard"), (0.375, "medium"), (0.625, "medium"), (0.75, "easy"), (1, "easy")],
)
def test_difficulty_is_judged_by_the_own_rate(rate, difficulty):
    found = evaluation({"reason_high_no_tool": block(rate), "reason_low_no_tool": block(0.5)})
    assert found["meta_difficulty"] == difficulty


@pytest.mark.parametrize(
    "metadata",
    [
        None, {}, [], 7, "", "{", "[]", {"reason_high_no_tool": None}, {"reason_high_no_tool": {"accuracy": "1.0"}},
        {"reason_high_no_tool": {"accuracy": True}}, {"reason_high_no_tool": {"accuracy": float("nan")}},
    ],
)  # fmt: skip
def test_without_rates_there_are_none(metadata):
    assert set((evaluation(metadata) | {"meta_eval_json": None}).values()) == {None}


def test_tools_are_named_by_their_content():
    tools = [{"b": 1, "a": {"d": "é", "c": None}}]
    compact = '[{"a":{"c":null,"d":"é"},"b":1}]'
    assert of_tools(tools) == {"source_tools_id": hashlib.sha1(compact.encode()).hexdigest(), "source_tools_count": 1}
    assert of_tools([{"a": {"c": None, "d": "é"}, "b": 1}]) == of_tools(tools)
    assert of_tools([]) == {"source_tools_id": None, "source_tools_count": 0}
    offered = CONVERTERS["math_v2"](rows.MATH, "low")
    assert offered.tools == [rows.PYTHON_TOOL]
    assert offered.metadata.items() >= of_tools([rows.PYTHON_TOOL]).items()
