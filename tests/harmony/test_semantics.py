"""Each rule finds its own breach, at its message, and nothing in a conversation that keeps them all."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenmill.tasks.harmony.grammar import parse
from tokenmill.tasks.harmony.message import HarmonyMessage
from tokenmill.tasks.harmony.render import render
from tokenmill.tasks.harmony.semantics import CODES, WARNINGS, faults, violation

from tests.examples import max_examples

SYSTEM = HarmonyMessage("system", "s")
DEVELOPER = HarmonyMessage("developer", "d")
USER = HarmonyMessage("user", "u")
THOUGHT = HarmonyMessage("assistant", "t", channel="analysis")
REMARK = HarmonyMessage("assistant", "r", channel="commentary")
CALL = HarmonyMessage("assistant", '{"a":1}', "functions.f", "commentary", "json", terminator="call")
RESULT = HarmonyMessage("functions.f", "1", "assistant", "commentary")
OTHER = replace(CALL, recipient="functions.g")
OTHER_RESULT = replace(RESULT, author="functions.g")
PYTHON = HarmonyMessage("assistant", "1", "python", "analysis", "code", constrained=False, terminator="call")
PYTHON_RESULT = HarmonyMessage("python", "1", "assistant", "analysis")
FINAL = HarmonyMessage("assistant", "f", channel="final")
RETURN = replace(FINAL, terminator="return")

GOOD = {
    "an answer": [USER, FINAL],
    "everything": [SYSTEM, DEVELOPER, USER, THOUGHT, REMARK, CALL, RESULT, THOUGHT, PYTHON, PYTHON_RESULT, THOUGHT, RETURN],
    "several turns": [SYSTEM, USER, FINAL, USER, THOUGHT, RETURN],
    "a call is the end": [USER, THOUGHT, CALL],
    "calls side by side": [USER, CALL, OTHER, RESULT, OTHER_RESULT, FINAL],
    "results in another order": [USER, CALL, OTHER, OTHER_RESULT, RESULT, FINAL],
    "the same call twice": [USER, CALL, CALL, RESULT, RESULT, FINAL],
    "a thought between": [USER, CALL, THOUGHT, OTHER, RESULT, OTHER_RESULT, FINAL],
    "a result on no channel": [USER, CALL, replace(RESULT, channel=None), FINAL],
    "no arguments": [USER, replace(CALL, body="{}"), RESULT, FINAL],
    "arguments that are no JSON, of a built-in tool": [USER, replace(PYTHON, body="print(1)"), PYTHON_RESULT, FINAL],
}  # fmt: skip

BAD = {
    "S01": [([USER, replace(THOUGHT, channel="thinking"), FINAL], [1]), ([USER, CALL, replace(RESULT, channel="x"), FINAL], [2])],
    "S02": [([USER, replace(THOUGHT, channel=None), FINAL], [1]), ([USER, replace(FINAL, channel=None)], [1])],
    "S03": [
        ([replace(SYSTEM, channel="final"), USER, FINAL], [0]),
        ([replace(DEVELOPER, channel="commentary"), USER, FINAL], [0]),
        ([replace(USER, channel="analysis"), FINAL], [0]),
    ],
    "S04": [
        ([USER, replace(THOUGHT, terminator="call"), FINAL], [1]),
        ([USER, CALL, replace(RESULT, terminator="call"), FINAL], [2]),
        ([replace(USER, terminator="call"), FINAL], [0]),
    ],
    "S05": [
        ([USER, replace(CALL, terminator="end"), RESULT, FINAL], [1]),
        ([replace(USER, recipient="assistant"), FINAL], [0]),
    ],
    "S06": [([USER, RETURN, USER, RETURN], [1]), ([USER, RETURN, FINAL], [1])],
    "S07": [([USER, replace(THOUGHT, terminator="return")], [1]), ([USER, replace(REMARK, terminator="return")], [1])],
    "S10": [
        ([USER, replace(PYTHON, channel="commentary"), PYTHON_RESULT, FINAL], [1]),
        ([USER, replace(PYTHON, recipient="browser.search", channel="commentary")], [1]),
    ],
    "S09": [([USER, replace(CALL, channel="analysis"), RESULT, FINAL], [1])],
    "S11": [
        ([USER, RESULT, FINAL], [1]),
        ([USER, CALL, RESULT, RESULT, FINAL], [3]),
        ([USER, CALL, replace(RESULT, recipient="user"), FINAL], [2]),
    ],
    "S12": [([USER, CALL, OTHER_RESULT, FINAL], [2]), ([USER, PYTHON, RESULT, FINAL], [2])],
    "S13": [
        ([USER, replace(CALL, body=body), RESULT, FINAL], [1])
        for body in ["", "{", "{'a': 1}", "[]", "null", '"{}"', "{} x", "NaN", '{"a": NaN}']
    ],
    "S16": [([USER, SYSTEM, FINAL], [1]), ([SYSTEM, SYSTEM, USER, FINAL], [1]), ([DEVELOPER, SYSTEM, USER, FINAL], [1])],
    "S17": [([SYSTEM, USER, DEVELOPER, FINAL], [2]), ([DEVELOPER, USER, FINAL, DEVELOPER, USER, FINAL], [3])],
    "S18": [([SYSTEM, FINAL], [0])],
    "S20": [([USER, FINAL, USER], [2]), ([USER, CALL, RESULT], [2])],
    "S21": [
        ([USER, CALL, USER, FINAL], [1]),
        ([USER, CALL, THOUGHT, FINAL], [1]),
        ([USER, CALL, OTHER, RESULT, FINAL], [2]),
        ([USER, CALL, OTHER, USER, FINAL], [1, 2]),
    ],
    "S22": [
        *(([replace(USER, body=body), FINAL], [0]) for body in ["", " \n\t", "-", " - \n", "--", "\u2014", "...", "\u2026", "_", "\u3000"]),
        ([SYSTEM, USER, FINAL, replace(USER, body=" "), FINAL], [3]),
    ],
}  # fmt: skip
"""Conversations that break one rule alone, with the numbers of the messages at fault."""


def found(messages, **settings):
    """Rules broken and the messages that break them, by the offsets in the text."""
    parsed = parse(render(messages))
    starts = [message.start for message in parsed]
    broken = faults(parsed, **settings)
    assert all(fault.name == CODES[fault.code] and fault.detail for fault in broken)
    return [(fault.code, starts.index(fault.offset)) for fault in broken]


@pytest.mark.parametrize("name", GOOD)
def test_valid_conversation_lacks_faults(name):
    assert found(GOOD[name]) == []
    assert faults(GOOD[name]) == []


@pytest.mark.parametrize(
    ("code", "messages", "numbers"), [(code, *case) for code, cases in BAD.items() for case in cases]
)
def test_a_rule_that_is_broken_is_found_at_its_message(code, messages, numbers):
    assert found(messages) == [(code, number) for number in numbers]
    assert [(fault.code, fault.offset) for fault in faults(messages)] == [(code, 0)] * len(numbers)
    assert found(messages, off=frozenset({code})) == []
    assert found(messages, off=frozenset(CODES) - {code}) == [(code, number) for number in numbers]


SEVERAL = [
    ([USER, replace(CALL, channel="final")], [("S08", 1), ("S09", 1)]),
    ([USER, replace(PYTHON, channel="final")], [("S08", 1), ("S10", 1)]),
    ([USER, CALL, replace(RESULT, channel="final", terminator="return")], [("S07", 2), ("S20", 2)]),
    ([USER], [("S19", 0), ("S20", 0)]),
    ([SYSTEM], [("S18", 0), ("S19", 0), ("S20", 0)]),
    (
        [replace(USER, channel="final"), replace(THOUGHT, channel="x"), RESULT, SYSTEM],
        [("S03", 0), ("S01", 1), ("S11", 2), ("S16", 3), ("S20", 3)],
    ),
]


@pytest.mark.parametrize("body", ["?", "a-b", "🎈", "7", "- a\n- b", "否"])
def test_short_questions_are_questions(body):
    assert found([replace(USER, body=body), FINAL, replace(USER, body="..."), FINAL]) == []


@pytest.mark.parametrize(("messages", "broken"), SEVERAL)
def test_faults_are_in_message_order(messages, broken):
    assert found(messages) == broken
    assert [fault.code for fault in faults([])] == ["S18", "S19", "S20"]


def test_only_declared_tools_may_be_called():
    messages = [USER, CALL, RESULT, PYTHON, PYTHON_RESULT, FINAL]
    assert found(messages, declared=["functions.f", "python"]) == []
    assert found(messages, declared=["functions.f"]) == [("S14", 3)]
    assert found(messages, declared=["f", "functions.ff"]) == [("S14", 1), ("S14", 3)]
    assert found(messages, declared=[]) == [("S14", 1), ("S14", 3)]
    assert found(messages, declared=[], off=frozenset({"S14"})) == []


def test_arguments_are_held_against_the_schema():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    messages = [USER, CALL, RESULT, FINAL]
    assert found(messages, schemas={"functions.f": schema}) == [("S15", 1)]
    assert found(messages, schemas={"functions.g": schema}) == []
    assert found(messages, schemas={"functions.f": None}) == []
    assert found(messages, schemas={"functions.f": schema}, off=WARNINGS) == []


def test_every_rule_has_a_test():
    apart = {"S08", "S14", "S15", "S19"}
    assert set(BAD) | apart == set(CODES) == {f"S{number:02}" for number in range(1, 23)}
    assert set(CODES) >= WARNINGS == {"S10", "S15"}


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", 1]}}},
}


@pytest.mark.parametrize(
    ("value", "schema", "says"),
    [
        ({"a": "1"}, OBJECT, "arguments.a is not of type integer"),
        ({"a": True}, OBJECT, "arguments.a is not of type integer"),
        ({"b": ["x", "z"]}, OBJECT, "arguments.b[1] is none of its values"),
        ({}, {**OBJECT, "required": ["a"]}, "arguments.a is missing"),
        ({"z": 1}, {**OBJECT, "additionalProperties": False}, "arguments.z is not declared"),
        (1.5, {"type": "integer"}, "arguments is not of type integer"),
        ({"a": None}, {"properties": {"a": {"type": ["string", "number"]}}}, "arguments.a is not of type string or number"),
    ],
)  # fmt: skip
def test_a_violation_is_named(value, schema, says):
    assert violation(value, schema, "arguments") == says


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        *(
            ({"a": 1}, nothing)
            for nothing in (
                {}, {"type": "dict"}, {"type": 3}, {"required": "a"}, {"properties": []}, {"properties": {"a": "string"}},
                {"enum": "a"}, {"type": {"x": 1}}, {"type": [{"type": "object"}, ["null"]]}, {"required": [{"name": "a"}, ["a"]]},
                {"properties": {"a": {"type": [{"type": "string"}]}}},
            )
        ),
        (1.0, {"type": "integer"}),
        (None, {"type": "string", "nullable": True}),
    ],
)  # fmt: skip
def test_unspecified_fields_do_not_violate_a_schema(value, schema):
    assert violation(value, schema, "arguments") is None


SCALARS = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, 1.0, "a", "b"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)
KINDS = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"])
SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional={"type": KINDS | st.lists(KINDS, min_size=1, max_size=2, unique=True)}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": KINDS,
            "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            "required": st.lists(st.sampled_from("ab"), max_size=2, unique=True),
            "additionalProperties": st.just(value=False),
            "items": inner,
            "enum": st.lists(st.sampled_from(["a", "b", 2, None]), min_size=1, max_size=3),
        },
    ),
    max_leaves=4,
)


@given(VALUES, SCHEMAS)
@max_examples(300)
def test_violations_match_jsonschema(value, schema):
    assert (violation(value, schema, "value") is None) == Draft202012Validator(schema).is_valid(value)
