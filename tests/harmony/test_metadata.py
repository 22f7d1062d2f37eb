"""Columns say what the record says, and null where it says something else."""

import hashlib
import json
from decimal import Decimal

import pytest
from tokenmill.tasks.harmony.columns import domain_of, effort_of, of_evaluation, of_record, of_tools
from tokenmill.tasks.harmony.converters import CONVERTERS

from tests.harmony import rows
from tests.harmony.rows import block


def evaluation(metadata, effort="high", *, tools=False):
    return of_evaluation({"metadata": metadata}, effort, tools=tools)


@pytest.mark.parametrize(
    ("dataset", "domain"),
    [
        ("nvidia/Nemotron-Math-v2", "math"),
        ("nvidia/Nemotron-Math-Proofs-v1", "proof"),
        ("nvidia/Nemotron-Science-v1", "science"),
        ("nvidia/Nemotron-Agentic-v1", "agentic"),
        ("nvidia/Nemotron-Instruction-Following-Chat-v1", "chat_if"),
        ("radna0/nemotron-math-v2-harmony-tools", "math"),
        ("nvidia/Nemotron-SWE-v1", None),
        ("me/chats", None),
    ],
)
def test_the_domain_is_in_the_name(dataset, domain):
    assert domain_of(dataset) == domain


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
def test_the_effort_is_in_the_split_s_name(split, effort):
    assert effort_of(split) == effort


def test_what_a_source_says_of_a_row():
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
def test_what_is_absent_or_odd_is_null(record):
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


def test_rates_may_come_as_text():
    assert evaluation(json.dumps(rows.MATH["metadata"])) == evaluation(rows.MATH["metadata"])


def test_of_equal_rates_the_first_is_the_best():
    found = evaluation({"reason_low_with_tool": block(0.5, 4), "reason_high_no_tool": block(0.5)})
    assert (found["meta_eval_best_setting"], found["meta_pass_k"], found["meta_correct_count"]) == (
        "reason_low_with_tool",
        4,
        2,
    )


def test_counts_that_are_no_numbers_are_null():
    found = evaluation({"reason_low_no_tool": {"accuracy": 1.0, "count": True, "pass": "8"}})
    assert found["meta_correctness"] == 1.0
    assert found["meta_pass_k"] is found["meta_correct_count"] is None


@pytest.mark.parametrize(
    ("effort", "tools", "own"),
    [("low", False, 1.0), ("high", False, 0.5), ("high", True, 0.25), ("low", True, None), (None, False, None)],
)
def test_the_own_rate_is_that_of_effort_and_tools(effort, tools, own):
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


def test_no_tools_have_no_id():
    assert of_tools([]) == {"source_tools_id": None, "source_tools_count": 0}


@pytest.mark.parametrize(
    ("row", "split", "own", "effort"), [(rows.MATH, "high_part00", 0.25, "high"), (rows.MATH_PLAIN, "low", 1.0, "low")]
)
def test_math_rows_know_their_own_rate(row, split, own, effort):
    found = CONVERTERS["math_v2"](row, split)
    assert found.metadata["meta_correctness_own"] == own
    assert found.metadata["meta_expected_answer"] == "1024"
    assert found.effort == effort


def test_offered_tools_are_those_of_the_source():
    found = CONVERTERS["math_v2"](rows.MATH, "low")
    assert found.tools == [rows.PYTHON_TOOL]
    assert found.metadata["source_tools_count"] == 1
    assert found.metadata["source_tools_id"] == of_tools([rows.PYTHON_TOOL])["source_tools_id"]


@pytest.mark.parametrize(
    ("odd", "correctness", "passes"),
    [
        ({"accuracy": 0.5, "count": 1 << 63}, 0.5, None),
        ({"accuracy": 10**400, "count": 8}, None, None),
        ({"accuracy": Decimal("0.5"), "count": 8}, None, None),
        ({"accuracy": 0.5, "count": 8, "seen": b"bytes"}, 0.5, 8),
    ],
)
def test_what_no_column_holds_is_null(odd, correctness, passes):
    found = evaluation({"reason_high_no_tool": odd})
    assert (found["meta_correctness"], found["meta_pass_k"]) == (correctness, passes)
    assert found["meta_eval_json"] is None or json.loads(found["meta_eval_json"]) == {"reason_high_no_tool": odd}
