"""A text is judged by what it says, whoever wrote it."""

import pytest
from tokenmill.tasks.harmony.grammar import Fault, parse
from tokenmill.tasks.harmony.semantics import Quality, judge

ASKED = "<|start|>user<|message|>q<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>4<|return|>"
CALL = '<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a":1}<|call|>'
RESULT = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>r<|end|>"
F = {"functions.f": None}


def judged(text, *args, **kwargs):
    return judge(text, parse(text), *args, **kwargs)


def test_a_good_row():
    assert judged(ASKED + CALL + RESULT + ANSWER, F) == Quality(
        quality_valid_harmony=True,
        quality_completion_nonempty=True,
        quality_completion_ends_with_return=True,
        quality_has_tool=True,
        quality_valid_tool_schema=True,
        num_messages=4,
        num_tool_calls=1,
        num_tool_results=1,
    )


@pytest.mark.parametrize(
    ("text", "code", "offset"),
    [
        ("", "E01", 0),
        ("4", "E02", 0),
        (ASKED + "\n" + ANSWER, "E02", len(ASKED)),
        (ASKED + ANSWER.removesuffix("<|return|>"), "E04", len(ASKED + ANSWER) - len("<|return|>")),
    ],
)
def test_text_that_is_not_harmony_has_no_quality(text, code, offset):
    assert judged(text) == Quality(quality_error_code=code, quality_error_offset=offset)


@pytest.mark.parametrize(
    ("text", "code", "offset"),
    [
        (ANSWER, "S18", 0),
        (ASKED + ANSWER.replace("final", "comment"), "S01", len(ASKED)),
        (ASKED + RESULT + ANSWER, "S11", len(ASKED)),
        (ASKED + CALL.replace('{"a":1}', "[]") + RESULT + ANSWER, "S13", len(ASKED)),
        (ASKED + CALL + ANSWER, "S21", len(ASKED)),
    ],
)
def test_a_broken_rule_makes_a_row_invalid(text, code, offset):
    found = judged(text)
    assert not found.quality_valid_harmony
    assert (found.quality_error_code, found.quality_error_offset) == (code, offset)
    assert found.num_messages == len(parse(text))


def test_a_rule_that_is_off_is_not_asked():
    assert judged(ANSWER, off=frozenset({"S18"})).quality_valid_harmony


def test_a_warning_makes_no_row_invalid():
    text = ASKED + "<|start|>assistant to=python<|channel|>commentary<|message|>1<|call|>"
    found = judged(text)
    assert found.quality_valid_harmony
    assert found.quality_error_code is None


@pytest.mark.parametrize(
    ("declared", "valid", "schema"),
    [
        (None, True, True),
        (F, True, True),
        ({}, False, False),
        ({"functions.f": {"type": "object", "required": ["a"]}}, True, True),
        ({"functions.f": {"type": "object", "required": ["b"]}}, True, False),
    ],
)
def test_calls_are_judged_by_what_is_declared(declared, valid, schema):
    found = judged(ASKED + CALL + RESULT + ANSWER, declared)
    assert (found.quality_valid_harmony, found.quality_valid_tool_schema) == (valid, schema)


def test_other_faults_leave_the_tools_valid():
    found = judged(CALL + RESULT + ANSWER)
    assert not found.quality_valid_harmony
    assert found.quality_valid_tool_schema


@pytest.mark.parametrize(
    ("ending", "nonempty", "returns"),
    [
        (ANSWER, True, True),
        (ANSWER.replace("4", " \n"), False, True),
        (ANSWER.replace("4", ""), False, True),
        (ANSWER.replace("return", "end"), True, False),
        (ANSWER.replace("final", "commentary").replace("return", "end"), False, False),
        (ANSWER.replace("return", "end") + ASKED, False, False),
        (CALL, False, False),
    ],
)
def test_a_completion_is_a_last_answer_that_says_something(ending, nonempty, returns):
    found = judged(ASKED + ending)
    assert found.quality_completion_nonempty == nonempty
    assert found.quality_completion_ends_with_return == returns


@pytest.mark.parametrize(("characters", "nonempty"), [(31, False), (32, True)])
def test_a_completion_may_be_asked_to_be_longer(characters, nonempty):
    text = ASKED + ANSWER.replace("4", f" {'x' * characters}\n")
    assert judged(text, least=32).quality_completion_nonempty == nonempty


@pytest.mark.parametrize(
    ("text", "has"), [(ASKED + ANSWER, False), (ASKED + CALL, True), (ASKED + RESULT + ANSWER, True)]
)
def test_a_call_or_a_result_is_a_tool(text, has):
    assert judged(text).quality_has_tool == has


def test_what_the_reference_reads_otherwise_is_invalid():
    other = parse(ASKED + ANSWER.replace("4", "5"))
    assert not isinstance(other, Fault)
    found = judge(ASKED + ANSWER, other)
    assert not found.quality_valid_harmony
    assert found.quality_error_code == "R02"
