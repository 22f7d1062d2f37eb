"""Each source's records become conversations as the source means them, or say why not."""

import copy
import json

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.harmony.columns import SCHEMA
from tokenmill.tasks.harmony.compose import compose
from tokenmill.tasks.harmony.converters import CONVERTERS, converter_for
from tokenmill.tasks.harmony.grammar import parse
from tokenmill.tasks.harmony.message import Composed, Policy, Source
from tokenmill.tasks.harmony.render import cross_check, render
from tokenmill.tasks.harmony.semantics import WARNINGS, faults, judge

from tests.examples import max_examples
from tests.harmony import rows
from tests.harmony.test_compose import lines

EVERY_ROW = [
    pytest.param(name, row, split, id=f"{name}-{number}")
    for name, given in rows.GOOD.items()
    for number, (row, split) in enumerate(given)
]


def converted(name, row, split="train"):
    found = CONVERTERS[name](row, split)
    assert isinstance(found, Source), found
    return found


def composed(name, row, split="train", **policy):
    found = CONVERTERS[name](row, split)
    found = compose(found, Policy(**policy)) if isinstance(found, Source) else found
    assert isinstance(found, Composed), found
    return found


@pytest.mark.parametrize(("name", "row", "split"), EVERY_ROW)
def test_output_is_harmony_for_all_parsers_and_rules(name, row, split):
    before = copy.deepcopy(row)
    found = composed(name, row, split)
    assert row == before
    text = render(found.messages)
    parsed = parse(text)
    assert [each.message for each in parsed] == list(found.messages)
    assert cross_check(text, found.messages) is None
    assert [fault for fault in faults(found.messages, found.declared) if fault.code not in WARNINGS] == []
    assert judge(text, parsed, found.declared).quality_valid_harmony


LEAN = "Prove it in Lean 4:\ntheorem two : 1 + 1 = 2 := by sorry"
SAID = {
    "math with python": ("math_v2", rows.MATH, "high_part00", ["Reasoning: high", "# Tools", "## python", "\\boxed{}"], [
        ("user", None, "What is 2^10?", "end"),
        ("assistant", "analysis", "Compute it.", "end"),
        ("assistant>python", "analysis", "print(2**10)\n", "call"),
        ("python>assistant", "commentary", "1024\n", "end"),
        ("assistant", "analysis", "Good.", "end"),
        ("assistant", "final", "\\boxed{1024}", "return"),
    ]),
    "math without tools": ("math_v2", rows.MATH_PLAIN, "medium", ["Reasoning: medium"], None),
    "python that is called but not offered": ("math_v2", {**rows.MATH, "tools": []}, "low", ["## python"], None),
    "python that is offered and not called": ("math_v2", {**rows.MATH_PLAIN, "tools": [rows.PYTHON_TOOL]}, "low", ["## python"], None),
    "a proof, from the messages": ("math_proofs", rows.PROOF, "lean", [], [
        ("user", None, LEAN, "end"),
        ("assistant", "analysis", "Numbers.", "end"),
        ("assistant", "final", "theorem two : 1 + 1 = 2 := by norm_num", "return"),
    ]),
    "a statement, from the problem": ("math_proofs_formalize", rows.PROOF, "lean", ["Lean 4"], [
        ("user", None, "Show that 1 + 1 = 2.", "end"),
        ("assistant", "final", "import Mathlib\n\ntheorem two : 1 + 1 = 2 := by", "return"),
    ]),
    "agentic with objects and without ids": ("agentic", rows.AGENTIC, "train", ["You help with orders.", "id: string"], [
        ("user", None, "Where are A1 and A2?", "end"),
        ("assistant", "commentary", "Let me look.", "end"),
        ("assistant>functions.get_order", "commentary", '{"id":"A1","deep":[1,2.5,null,true]}', "call"),
        ("functions.get_order>assistant", "commentary", '{"status": "sent", "days": 2}', "end"),
        ("assistant>functions.get_order", "commentary", '{"id":"A2","é":"ü"}', "call"),
        ("functions.get_order>assistant", "commentary", '["late", "lost"]', "end"),
        ("assistant", "final", "Which user?", "end"),
        ("user", None, "me", "end"),
        ("assistant", "analysis", "Fetch.", "end"),
        ("assistant>functions.get_user_", "commentary", "{}", "call"),
        ("functions.get_user_>assistant", "commentary", "true", "end"),
        ("assistant", "analysis", "Done.", "end"),
        ("assistant", "final", "A1 was sent, A2 is lost.", "return"),
    ]),
    "agentic with text and ids": ("agentic", rows.INTERACTIVE, "train", [], [
        ("user", None, "cancel A1", "end"),
        ("assistant>functions.get_order", "commentary", '{"id":"A1"}', "call"),
        ("functions.get_order>assistant", "commentary", "first", "end"),
        ("assistant>functions.get_order", "commentary", '{"id":"B1"}', "call"),
        ("functions.get_order>assistant", "commentary", "second", "end"),
        ("assistant", "final", "Done.", "return"),
    ]),
    "chat, without thoughts of earlier turns": ("instruction_following", rows.CHAT, "train", ["Reasoning: medium"], [
        ("user", None, "Name a colour.", "end"),
        ("assistant", "final", "Blue.", "end"),
        ("user", None, "Another!", "end"),
        ("assistant", "analysis", "Not blue.", "end"),
        ("assistant", "final", "Red.", "return"),
    ]),
    "chat without reasoning": ("instruction_following", rows.CHAT_OFF, "train", ["Reasoning: low"], None),
    "ShareGPT": ("openai_messages", rows.SHAREGPT, "train", [], [
        ("user", None, "Hi", "end"),
        ("assistant", "analysis", "Greet.", "end"),
        ("assistant", "final", "Hello", "return"),
    ]),
    "pairs": ("openai_messages", rows.PAIR, "train", ["Reasoning: high"], None),
}  # fmt: skip
FACTS = {
    "agentic with objects and without ids": {"meta_parallel_calls": 1, "meta_dropped_thoughts": 2, "meta_renamed_tools": '{"get user?": "functions.get_user_"}'},
    "agentic with text and ids": {"meta_dropped_trailing": 1},
    "chat without reasoning": {"meta_effort": "low"},
}  # fmt: skip
DECLARED = {
    "math with python": ["python"], "math without tools": [], "python that is offered and not called": ["python"],
    "agentic with objects and without ids": ["functions.get_order", "functions.get_user_"],
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_converted_messages(name):
    converter, row, split, before, expected = SAID[name]
    found = composed(converter, row, split)
    said = "".join(message.body for message in found.messages if message.author in {"system", "developer"})
    assert all(words in said for words in before), said
    assert lines(found) == (expected or lines(found))
    assert found.facts.items() >= FACTS.get(name, {}).items()
    if name in DECLARED:
        assert list(found.declared) == DECLARED[name]
        assert ("# Tools" in said) == bool(DECLARED[name])
    assert "stateful_python_code_exec" not in render(found.messages)
    if "without reasoning" in name:
        everything = composed(converter, row, split, thoughts="keep_all")
        assert not [message for message in everything.messages if message.channel == "analysis"]


def test_python_of_other_sources_is_a_function():
    row = {**rows.MATH, "tools": [{"function": {**rows.PYTHON_TOOL["function"], "name": "python"}}]}
    row = json.loads(json.dumps(row).replace('"stateful_python_code_exec"', '"python"'))
    found = composed("openai_messages", row)
    assert [message.recipient for message in found.messages if message.terminator == "call"] == ["functions.python"]


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        *(("math_proofs", {**rows.PROOF, "messages": empty}, "no_messages") for empty in ([], "[]", None, "")),
        *(
            ("math_proofs_formalize", {**rows.PROOF, field: value}, "no_formal_statement")
            for field in ("problem", "lean_header", "formal_statement")
            for value in (None, " \n", 7)
        ),
        ("harmony_text", {"text": ""}, "empty_text"),
        ("harmony_text", {"text": None}, "not_str"),
        ("harmony_text", {"text": "Hi"}, "text_outside_message"),
        ("harmony_text", {"text": rows.HARMONY["text"] + "\n"}, "text_outside_message"),
        ("harmony_text", {"text": rows.HARMONY["text"].replace("Hello", "<|endoftext|>")}, "special_in_body"),
    ],
)
def test_rows_without_trained_text_are_rejected(name, row, reason):
    found = CONVERTERS[name](row, "train")
    assert found.reason == reason
    changed = [field for field in row if row[field] != rows.PROOF.get(field)]
    assert reason != "no_formal_statement" or changed[0] in found.detail


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("given", [[1, {"a": None}], '[1, {"a": null}]', ' [1,{"a":null}]'])
def test_arguments_may_be_an_array(given, bare):
    row, call = copy.deepcopy(rows.AGENTIC), {"name": "get user?", "arguments": given}
    row["messages"][7]["tool_calls"] = [call if bare else {"type": "function", "function": call}]
    found = composed("agentic", row)
    (call,) = [message for message in found.messages if message.recipient == "functions.get_user_"]
    assert call.body == '[1,{"a":null}]'
    assert "S13" in {fault.code for fault in faults(found.messages, found.declared)}


@pytest.mark.parametrize(
    ("given", "reason"),
    [(each, "bad_tool_arguments") for each in ('{"id": ', "[1,", "A1", 7, "7", "null", [float("nan")])]
    + [(["\ud83d"], "lone_surrogate")],
)
def test_non_object_arguments_reject_the_row(given, reason):
    row = copy.deepcopy(rows.AGENTIC)
    row["messages"][2]["tool_calls"][1]["function"]["arguments"] = given
    found = CONVERTERS["agentic"](row, "tool_calling")
    assert isinstance(found, Rejected)
    assert found.reason == reason
    assert "message 3 of 10" in found.detail


OFFICIAL = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "channel": "final", "content": "a"}]}


@pytest.mark.parametrize(
    ("fields", "effort", "unread"),
    [
        ({"reasoning_effort": None}, None, ()),
        ({"reasoning_effort": "High"}, "high", ()),
        ({"reasoning_effort": "minimal"}, "low", ()),
        ({"reasoning_effort": "NONE"}, "low", ()),
        ({"reasoning_effort": "xhigh"}, "high", ()),
        ({"reasoning_effort": "extreme"}, None, ("reasoning_effort",)),
        ({"reasoning_effort": 3}, None, ("reasoning_effort",)),
        ({"reasoning_effort": ["high"]}, None, ("reasoning_effort",)),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low", ()),
        ({"chat_template_kwargs": '{"reasoning_effort": "low"}'}, "low", ()),
        ({"chat_template_kwargs": {"reasoning_effort": "low", "x": 1}}, "low", ("chat_template_kwargs",)),
        ({"chat_template_kwargs": {"x": 1}}, None, ("chat_template_kwargs",)),
    ],
)
@pytest.mark.parametrize("row", [rows.SHAREGPT, OFFICIAL])
def test_efforts_of_rows(row, fields, effort, unread):
    """An effort that isn't known is counted, and the policy's is written."""
    found = converted("openai_messages", {**row, **fields})
    made = compose(found, Policy(effort="medium"))
    assert (made.facts["meta_effort"], found.unread) == (effort, unread)
    assert f"Reasoning: {effort or 'medium'}" in made.messages[0].body


@pytest.mark.parametrize(
    ("row", "read"),
    [(rows.HARMONY, "Hello"), ({"text": "Hi!", **OFFICIAL}, "a"), ({**OFFICIAL, **rows.HARMONY}, "Hello")],
)
def test_rows_show_whether_they_are_harmony_text(row, read):
    assert composed("openai_messages", row).messages[-1].body == read


def test_harmony_text_keeps_masked_parts():
    row = {**rows.HARMONY, "untrained_messages": [2]}
    assert composed("openai_messages", row).facts["untrained_messages"] == [2]


def test_harmony_text_is_kept():
    found = composed("harmony_text", rows.HARMONY)
    assert render(found.messages) == rows.HARMONY["text"]
    assert found.declared is None
    assert found.facts["source_uuid"] == "u-7"


def test_harmony_text_is_brought_into_canonical_form():
    text = (
        "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json"
        "<|message|>{}<|call|>"
    )
    assert render(composed("harmony_text", {"text": text}).messages) == (
        "<|start|>user<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json"
        "<|message|>{}<|call|>"
    )


@pytest.mark.parametrize("name", sorted(CONVERTERS))
@pytest.mark.parametrize("record", [{}, {"messages": 7}, {"messages": [7]}, {"messages": [{}]}, {"text": []}])
def test_no_record_raises(name, record):
    found = CONVERTERS[name](record, "")
    assert isinstance(found, Rejected)
    assert found.detail


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("nvidia/Nemotron-Math-v2", "math_v2"),
        ("/data/nvidia/Nemotron-Math-Proofs-v1/", "math_proofs"),
        ("/data/Nemotron-Math-v2/data/high.part_00.jsonl", "math_v2"),
        ("nvidia/Nemotron-Science-v1", "science"),
        ("nvidia/Nemotron-Agentic-v1", "agentic"),
        ("nvidia/Nemotron-Instruction-Following-Chat-v1", "instruction_following"),
        ("radna0/nemotron-math-v2-harmony-tools", "openai_messages"),
        ("me/my-harmony-rows", "openai_messages"),
        ("/data/harmony.jsonl", "openai_messages"),
        ("/data/math-proofs.jsonl", "openai_messages"),
        ("/data/my-instruction-following-chat.jsonl", "openai_messages"),
        ("me/my-chats", "openai_messages"),
        ("nvidia/Nemotron-SWE-v1", "openai_messages"),
        ("harmony-room/my-chats", "openai_messages"),
    ],
)
def test_repository_name_selects_the_converter(path, name):
    assert converter_for(path) == name


def places(value, path=()):
    """The paths to all that a row holds."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value, path, other):
    """A copy of a row with something else in one place."""
    if not path:
        return other
    copied = copy.copy(value)
    copied[path[0]] = changed(value[path[0]], path[1:], other)
    return copied


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["[]", "{}", "[1]"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "code", "x"]), inner),
    max_leaves=3,
)


@st.composite
def odd_rows(draw):
    """A good row with anything in up to two of its places, and its converter and split."""
    name = draw(st.sampled_from(sorted(rows.GOOD)))
    row, split = draw(st.sampled_from(rows.GOOD[name]))
    for _ in range(draw(st.integers(1, 2))):
        row = changed(row, draw(st.sampled_from([path for path in places(row) if path])), draw(ANYTHING))
    return name, row, split


@max_examples(300)
@drawn(odd_rows())
def test_an_odd_row_is_harmony_or_has_its_reason(given_row):
    name, row, split = given_row
    found = CONVERTERS[name](row, split)
    found = compose(found, Policy()) if isinstance(found, Source) else found
    if isinstance(found, Rejected):
        assert found.reason
        assert found.detail
        return
    text = render(found.messages)
    assert [each.message for each in parse(text)] == list(found.messages)
    assert cross_check(text, found.messages) is None
    assert json.dumps(found.facts)
    assert set(found.facts) <= set(SCHEMA.names)
