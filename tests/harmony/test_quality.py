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


FAULTS = [
    ("", "E01", 0),
    ("4", "E02", 0),
    (ASKED + "\n" + ANSWER, "E02", len(ASKED)),
    (ASKED + ANSWER.removesuffix("<|return|>"), "E04", len(ASKED + ANSWER) - len("<|return|>")),
    (ANSWER, "S18", 0),
    (ASKED + ANSWER.replace("final", "comment"), "S01", len(ASKED)),
    (ASKED + RESULT + ANSWER, "S11", len(ASKED)),
    (ASKED + CALL.replace('{"a":1}', "[]") + RESULT + ANSWER, "S13", len(ASKED)),
    (ASKED + CALL + ANSWER, "S21", len(ASKED)),
]


@pytest.mark.parametrize(("text", "code", "offset"), FAULTS)
def test_fault_makes_a_row_invalid_without_quality(text, code, offset):
    found = judged(text)
    assert not found.quality_valid_harmony
    assert (found.quality_error_code, found.quality_error_offset) == (code, offset)
    if code.startswith("E"):
        assert found == Quality(quality_error_code=code, quality_error_offset=offset)
    else:
        assert found.num_messages == len(parse(text))


def test_valid_rows():
    assert judged(ANSWER, off=frozenset({"S18"})).quality_valid_harmony, "a rule that is off"
    warned = judged(ASKED + "<|start|>assistant to=python<|channel|>commentary<|message|>1<|call|>")
    assert (warned.quality_valid_harmony, warned.quality_error_code) == (True, None)
    unasked = judged(CALL + RESULT + ANSWER)
    assert (unasked.quality_valid_harmony, unasked.quality_valid_tool_schema) == (False, True)
    tools = {ASKED + ANSWER: False, ASKED + CALL: True, ASKED + RESULT + ANSWER: True}
    assert {text: judged(text).quality_has_tool for text in tools} == tools


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
def test_calls_are_judged_by_declared_tools(declared, valid, schema):
    found = judged(ASKED + CALL + RESULT + ANSWER, declared)
    assert (found.quality_valid_harmony, found.quality_valid_tool_schema) == (valid, schema)


@pytest.mark.parametrize(
    ("ending", "nonempty", "returns"),
    [
        (ANSWER, True, True),
        (ANSWER.replace("4", " \n"), False, True),
        (ANSWER.replace("4", ""), False, True),
        (ANSWER.replace("return", "end"), True, False),
        (ANSWER.replace("final", "commentary").replace("return", "end"), False, False),
        (ANSWER.replace("return", "end") + ASKED, False, False),
        (CALL, True, False),
        (CALL.replace('{"a":1}', "{}"), True, False),
        (CALL + RESULT, False, False),
        ("<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>", False, False),
    ],
)
def test_completion_is_a_nonempty_answer_or_a_call(ending, nonempty, returns):
    found = judged(ASKED + ending)
    assert found.quality_completion_nonempty == nonempty
    assert found.quality_completion_ends_with_return == returns


@pytest.mark.parametrize(("characters", "nonempty"), [(31, False), (32, True)])
def test_a_completion_may_be_asked_to_be_longer(characters, nonempty):
    text = ASKED + ANSWER.replace("4", f" {'x' * characters}\n")
    assert judged(text, least=32).quality_completion_nonempty == nonempty


def test_different_reference_reading_is_invalid():
    other = parse(ASKED + ANSWER.replace("4", "5"))
    assert not isinstance(other, Fault)
    found = judge(ASKED + ANSWER, other)
    assert not found.quality_valid_harmony
    assert found.quality_error_code == "R02"
