"""Transforms bring rows into another form or say why not; what they are given stays as it was."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.rl.transforms import RESOLVE, TRANSFORMS, parse

from tests.examples import max_examples
from tests.peers import nemo_rl_readers as readers

Q = {"role": "user", "content": "2 + 2?"}
Q2 = {"role": "user", "content": "sure?"}
A = {"role": "assistant", "content": "4"}
B = {"role": "assistant", "content": "5"}
S = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
RESULT = {"role": "tool", "content": "4"}
PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def no_tables(argument):
    raise AssertionError("nobody asked for tables")


def transform(spec):
    (only,) = parse([spec], no_tables)
    return only


def ranks(context, better, worse):
    return {"context": context, "completions": [{"rank": 0, "completion": better}, {"rank": 1, "completion": worse}]}


def request(**params):
    return {"responses_create_params": params, "agent_ref": {"type": "t", "name": "n"}}


MADE = {
    "sft": ("sft", {"id": 1, "output": "a", "input": "q"}, {"input": "q", "output": "a"}),
    "sft leaves system alone": ("sft", {"input": "q", "output": "a", "system": "s"}, {"input": "q", "output": "a"}),
    "sft with other names": ({"sft": {"input": "question", "output": "answer.text"}}, {"question": "q", "answer": {"text": "a", "score": 1}}, {"input": "q", "output": "a"}),
    "sft with a system prompt": ({"sft": {"system": "meta.system"}}, {"input": "q", "output": "a", "meta": {"system": "s"}}, {"input": "q", "output": "a", "system": "s"}),
    "set of a constant": ({"set": {"agent_ref": {"name": "n"}, "meta.level": 2, "new.deep": None}}, {"a": 1, "meta": {"source": "aime"}}, {"a": 1, "meta": {"source": "aime", "level": 2}, "agent_ref": {"name": "n"}, "new": {"deep": None}}),
    "set in the place of a different value": ({"set": {"a": True}}, {"a": 1, "b": 2}, {"a": True, "b": 2}),
    "drop of nested fields": ({"drop": ["responses_create_params.temperature", "score", "absent.field"]}, {"responses_create_params": {"input": [], "temperature": 1.0}, "score": 1, "id": 7}, {"responses_create_params": {"input": []}, "id": 7}),
    "sft with system switched off": ({"sft": {"system": None}}, {"input": "q", "output": "a", "id": 1}, {"input": "q", "output": "a"}),
    "sft takes values of any type": ("sft", {"input": ["q"], "output": 0, "id": 1}, {"input": ["q"], "output": 0}),
    "openai_chat": ("openai_chat", {"messages": [Q, A], "id": 1}, {"messages": [Q, A]}),
    "openai_chat with tools": ({"openai_chat": {"messages": "data.turns"}}, {"data": {"turns": [Q, A]}, "tools": [TOOL], "id": 1}, {"messages": [Q, A], "tools": [TOOL]}),
    "openai_chat drops no tools": ("openai_chat", {"messages": [Q], "tools": []}, {"messages": [Q]}),
    "openai_chat drops null tools": ("openai_chat", {"messages": [Q], "tools": None}, {"messages": [Q]}),
    "sharegpt": ("sharegpt", {"conversations": [{"from": "human"}], "id": 1}, {"conversations": [{"from": "human"}]}),
    "sharegpt with another name": ({"sharegpt": {"conversations": "turns"}}, {"turns": [{"from": "human"}]}, {"conversations": [{"from": "human"}]}),
    "nemotron_rl": ("nemotron_rl", request(input=[S, Q]), {"messages": [S, Q]}),
    "nemotron_rl with tools": ("nemotron_rl", request(input=[Q], tools=[TOOL]), {"messages": [Q], "tools": [TOOL]}),
    "nemotron_rl without tools": ("nemotron_rl", request(input=[Q], tools=[], top_p=1), {"messages": [Q]}),
    "nemotron_rl with null tools": ("nemotron_rl", request(input=[Q], tools=None), {"messages": [Q]}),
    "select": ({"select": ["b", "a"]}, {"a": 1, "b": None, "c": 3}, {"b": None, "a": 1}),
    "select puts in order": ({"select": ["b", "a"]}, {"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "rename": ({"rename": {"input": "q.text", "id": "id"}}, {"id": None, "q": {"text": 1}}, {"input": 1, "id": None}),
    "rename exchanges": ({"rename": {"a": "b", "b": "a"}}, {"a": 1, "b": True}, {"a": True, "b": 1}),
    "preference of texts": ("preference", PAIR | {"id": 1}, ranks([Q], [A], [B])),
    "preference by name": ({"preference": "completions"}, PAIR, ranks([Q], [A], [B])),
    "preference with tools": ("preference", PAIR | {"tools": [TOOL]}, ranks([Q], [A], [B]) | {"tools": [TOOL]}),
    "preference with empty tools": ("preference", PAIR | {"tools": []}, ranks([Q], [A], [B])),
    "pairs with tools": ({"preference": "pairs"}, {"prompt": [S, Q], "chosen": [A], "rejected": [B], "tools": [TOOL]}, {"prompt": [S, Q], "chosen": "4", "rejected": "5", "tools": [TOOL]}),
    "preference with a prompt of messages": ("preference", PAIR | {"prompt": [S, Q]}, ranks([S, Q], [A], [B])),
    "preference of answers as messages": ("preference", {"prompt": "2 + 2?", "chosen": [A], "rejected": [B]}, ranks([Q], [A], [B])),
    "preference of an answer as text and one as messages": ("preference", {"prompt": "2 + 2?", "chosen": "4", "rejected": [B]}, ranks([Q], [A], [B])),
    "preference of whole conversations": ("preference", {"chosen": [Q, A], "rejected": [Q, B]}, ranks([Q], [A], [B])),
    "preference of whole conversations and null prompt": ("preference", {"prompt": None, "chosen": [S, Q, A], "rejected": [S, Q, B]}, ranks([S, Q], [A], [B])),
    "preference of conversations with their prompt": ("preference", PAIR | {"chosen": [Q, A], "rejected": [Q, B]}, ranks([Q], [A], [B])),
    "preference whose prompt is the last question": ("preference", {"prompt": "sure?", "chosen": [S, Q, B, Q2, A], "rejected": [S, Q, B, Q2, B]}, ranks([S, Q, B, Q2], [A], [B])),
    "preference whose prompt has more than the conversations": ("preference", {"prompt": [S, Q], "chosen": [Q, A], "rejected": [Q, B]}, ranks([S, Q], [A], [B])),
    "preference of answers that begin alike": ("preference", {"prompt": "2 + 2?", "chosen": [CALLED, RESULT, A], "rejected": [CALLED, RESULT, B]}, ranks([Q, CALLED, RESULT], [A], [B])),
    "preference of a conversation that goes on": ("preference", {"chosen": [Q, A], "rejected": [Q, A, Q2, B]}, ranks([Q], [A], [A, Q2, B])),
    "preference of equal answers": ("preference", {"chosen": [Q, A], "rejected": [Q, A]}, ranks([Q], [A], [A])),
    "pairs": ({"preference": "pairs"}, ranks([Q], [A], [B]), PAIR),
    "pairs of a longer context": ({"preference": "pairs"}, ranks([S, Q], [A], [B]), PAIR | {"prompt": [S, Q]}),
    "pairs of a context that says more": ({"preference": "pairs"}, ranks([Q | {"name": "ann"}], [A], [B]), PAIR | {"prompt": [Q | {"name": "ann"}]}),
    "pairs of ranks the other way": ({"preference": "pairs"}, {"context": [Q], "completions": [{"rank": 2, "completion": [B]}, {"rank": 1, "completion": [A]}], "id": 1}, PAIR),
    "pairs of conversations": ({"preference": "pairs"}, {"chosen": [Q, A], "rejected": [Q, B | {"name": None}]}, PAIR),
}  # fmt: skip

KEPT = {
    "set of what it has": ({"set": {"a.b": [1]}}, {"a": {"b": [1]}}),
    "drop of what it lacks": ({"drop": ["b", "a.c"]}, {"a": {"b": 1}}),
    "passthrough": ("passthrough", {"anything": [None], "task_name": 1}),
    "passthrough of nothing": ({"passthrough": None}, {}),
    "sft": ("sft", {"input": "q", "output": "a"}),
    "openai_chat": ("openai_chat", {"messages": [Q, A]}),
    "openai_chat with tools": ("openai_chat", {"messages": [Q, A], "tools": [TOOL]}),
    "sharegpt": ("sharegpt", {"conversations": []}),
    "select": ({"select": ["a", "b"]}, {"a": 1, "b": None}),
    "rename": ({"rename": {"a": "a"}}, {"a": 1}),
    "preference in ranks": ("preference", ranks([Q], [A], [B]) | {"id": 1}),
    "preference in pairs": ({"preference": "pairs"}, PAIR | {"prompt": [S, Q], "id": 1}),
}

REFUSED = {
    "sft without": ("sft", {"input": "q"}, "missing_field", ["output", "'input'"]),
    "sft with null": ("sft", {"input": None, "output": "a"}, "missing_field", ["input is null", "'output'"]),
    "sft without a system prompt": ({"sft": {"system": "s"}}, {"input": "q", "output": "a"}, "missing_field", ["missing field s"]),
    "sft with nothing on the way": ({"sft": {"input": "a.b"}}, {"a": None, "output": "x"}, "missing_field", ["missing field a.b"]),
    "sft with text on the way": ({"sft": {"input": "a.b"}}, {"a": "text", "output": "x"}, "missing_field", ["missing field a.b"]),
    "openai_chat without": ("openai_chat", {"turns": []}, "missing_field", ["messages", "'turns'"]),
    "openai_chat with null": ("openai_chat", {"messages": None}, "missing_field", ["messages is null"]),
    "openai_chat with tools as text": ("openai_chat", {"messages": [], "tools": "[]"}, "bad_tools", ["tools is a string", "an array"]),
    "sharegpt without": ("sharegpt", {"messages": []}, "missing_field", ["conversations", "'messages'"]),
    "nemotron_rl without params": ("nemotron_rl", {"messages": []}, "missing_field", ["responses_create_params", "'messages'"]),
    "nemotron_rl with params as text": ("nemotron_rl", {"responses_create_params": "{}"}, "bad_field", ["responses_create_params", "an object"]),
    "nemotron_rl without input": ("nemotron_rl", request(tools=[]), "missing_field", ["responses_create_params.input", "'tools'"]),
    "nemotron_rl with input as text": ("nemotron_rl", request(input="q"), "bad_field", ["responses_create_params.input", "an array"]),
    "nemotron_rl with tools as text": ("nemotron_rl", request(input=[Q], tools="[]"), "bad_tools", ["responses_create_params.tools", "an array"]),
    "select of what is missing": ({"select": ["a", "b"]}, {"a": 1}, "missing_field", ["missing field b", "'a'"]),
    "set in something else": ({"set": {"a.b": 1}}, {"a": "text"}, "bad_field", ["a is a string", "make it an object"]),
    "rename of what is missing": ({"rename": {"b": "c.d"}}, {"c": {}}, "missing_field", ["missing field c.d"]),
    "preference without chosen": ("preference", {"prompt": "q", "rejected": "5"}, "missing_field", ["chosen", "rename"]),
    "preference with null rejected": ("preference", PAIR | {"rejected": None}, "missing_field", ["rejected", "rename"]),
    "preference without prompt": ("preference", {"chosen": "4", "rejected": "5"}, "missing_field", ["prompt", "rename"]),
    "preference of answers without prompt": ("preference", {"chosen": [A], "rejected": [B]}, "missing_field", ["prompt"]),
    "preference with empty prompt": ("preference", PAIR | {"prompt": []}, "missing_field", ["prompt"]),
    "preference with a number for prompt": ("preference", PAIR | {"prompt": 4}, "bad_field", ["prompt is a number", "text or an array"]),
    "preference with a number chosen": ("preference", PAIR | {"chosen": 4}, "bad_field", ["chosen is a number", "text or an array"]),
    "preference with no messages": ("preference", PAIR | {"rejected": []}, "bad_field", ["rejected is empty"]),
    "preference of another prompt": ("preference", {"prompt": "3 + 3?", "chosen": [Q, A], "rejected": [Q, B]}, "two_prompts", ["prompt", "select"]),
    "preference of two questions": ("preference", {"prompt": "q", "chosen": [Q, A], "rejected": [Q2, A]}, "two_prompts", ["chosen", "'user'", "filter out"]),
    "preference of a question in one": ("preference", {"prompt": "q", "chosen": [A], "rejected": [S, A]}, "two_prompts", ["rejected", "'system'"]),
    "preference of who knows whom": ("preference", {"chosen": [{"role": ["user"]}], "rejected": [B]}, "missing_field", ["prompt"]),
    "pairs without prompt": ({"preference": "pairs"}, {"chosen": "4", "rejected": "5"}, "missing_field", ["prompt", "rename"]),
    "pairs without anything": ({"preference": "pairs"}, {"prompt": "q"}, "missing_field", ["chosen"]),
    "pairs of one": ({"preference": "pairs"}, {"context": [Q], "completions": [{"rank": 0, "completion": [A]}]}, "not_two_completions", ["completions has 1"]),
    "pairs of ties": ({"preference": "pairs"}, {"context": [Q], "completions": [{"rank": 1, "completion": [A]}] * 2}, "tied_ranks", ["rank 1", "filter out"]),
    "pairs without rank": ({"preference": "pairs"}, {"context": [Q], "completions": [{"completion": [A]}] * 2}, "bad_rank", ["completion 1", "a whole number"]),
    "pairs of texts for completions": ({"preference": "pairs"}, {"context": [Q], "completions": ["4", "5"]}, "bad_field", ["completion 1 of 2"]),
    "pairs of no completions": ({"preference": "pairs"}, {"context": [Q], "completions": {}}, "bad_field", ["completions is an object"]),
    "pairs of several turns": ({"preference": "pairs"}, ranks([Q], [A, Q2, A], [B]), "not_text", ["completions", "keep the form"]),
    "pairs of tool calls": ({"preference": "pairs"}, ranks([Q], [CALLED], [B]), "not_text", ["completions", "keep the form"]),
    "pairs of a weighed answer": ({"preference": "pairs"}, ranks([Q], [A | {"weight": 0}], [B]), "not_text", ["keep the form"]),
    "pairs of parts": ({"preference": "pairs"}, ranks([Q], [A], [B | {"content": []}]), "not_text", ["keep the form"]),
    "pairs of the user's": ({"preference": "pairs"}, ranks([Q], [A], [Q2]), "not_text", ["keep the form"]),
    "pairs without context": ({"preference": "pairs"}, ranks([], [A], [B]), "bad_field", ["context is empty"]),
}  # fmt: skip

UNUSABLE = [
    # spec, what the error says beside the spec itself
    ("selct", "did you mean 'select'?"),
    ("xyz", "known: drop, nemotron_rl, openai_chat, passthrough, preference, rename, resolve_placeholders, select, set, sft, sharegpt"),
    ("", "known:"),
    ({"openai_caht": {}}, "did you mean 'openai_chat'?"),
    (5, "it is a number; write a name"),
    (None, "it is null; write a name"),
    (["sft"], "it is an array; write a name"),
    ({}, "it has 0 keys"),
    ({"sft": {}, "select": ["a"]}, "it has 2 keys; write one transform per object"),
    ({"passthrough": {}}, "it doesn't take an argument, but an object is given"),
    ({"nemotron_rl": ["a"]}, "it doesn't take an argument, but an array is given"),
    ({"sft": ["input"]}, "its argument is an array; name fields"),
    ({"sft": {"inputs": "q"}}, "take an argument 'inputs'; did you mean 'input'?"),
    ({"sft": {"input": 5}}, "a field's name is a number"),
    ({"sft": {"input": None}}, "a field's name is null"),
    ({"sft": {"output": ""}}, "'' is not a field"),
    ({"sft": {"output": "a..b"}}, "'a..b' is not a field"),
    ({"openai_chat": "turns"}, "its argument is a string; name fields"),
    ({"openai_chat": {"tools": "t"}}, "take an argument 'tools'; known: messages"),
    ({"sharegpt": {"messages": "t"}}, "take an argument 'messages'"),
    ("select", "its argument is null; list the fields"),
    ({"select": []}, "its argument is empty; list the fields"),
    ({"select": "messages"}, "its argument is a string; list the fields"),
    ({"select": ["a", 1]}, "a field's name is a number"),
    ({"select": ["a", "b.c"]}, "'b.c' is a nested field; extract it with"),
    ({"select": ["a", "a"]}, "it names a field twice"),
    ("rename", "its argument is null; give each new name its field"),
    ({"rename": {}}, "its argument is empty; give each new name its field"),
    ({"rename": ["a"]}, "its argument is an array"),
    ({"rename": {"a.b": "c"}}, "the new name 'a.b' has a dot"),
    ({"rename": {"a": ["c"]}}, "a field's name is an array"),
    ({"rename": {"a": ".c"}}, "'.c' is not a field"),
    ({"set": {}}, "its argument is empty; give each field its value"),
    ({"set": {"a..b": 1}}, "'a..b' is not a field"),
    ("drop", "its argument is null; list the fields to drop"),
    ({"preference": "pair"}, "have the form 'pair'; did you mean 'pairs'?"),
    ({"preference": {}}, 'its argument is an object; write "completions" or "pairs"'),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "row", "made"), MADE.values(), ids=MADE)
def test_a_row_becomes_a_new_one(spec, row, made):
    before = copy.deepcopy(row)
    found = transform(spec)(row)
    assert found == made
    assert list(found) == list(made)
    assert found is not row
    assert row == before


@pytest.mark.parametrize(("spec", "row"), KEPT.values(), ids=KEPT)
def test_finished_row_is_the_same_object(spec, row):
    before = copy.deepcopy(row)
    assert transform(spec)(row) is row
    assert row == before


@pytest.mark.parametrize(("spec", "row", "reason", "words"), REFUSED.values(), ids=REFUSED)
def test_untransformable_row_has_a_reason(spec, row, reason, words):
    before = copy.deepcopy(row)
    rejected = transform(spec)(row)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == reason
    assert [word for word in words if word not in rejected.detail] == [], rejected.detail
    assert row == before


@pytest.mark.parametrize(("spec", "says"), UNUSABLE)
def test_an_unusable_spec_is_shown_with_its_remedy(spec, says):
    with pytest.raises(InputError) as error:
        parse(["passthrough", spec], no_tables)
    assert str(error.value).startswith("transform 2, ")
    assert says in str(error.value)


def test_placeholders_use_the_given_resolver():
    asked = []

    def resolver(argument):
        asked.append(argument)
        if argument == "nano9":
            raise InputError("no such tables")
        return len

    assert parse([RESOLVE, {RESOLVE: "nano3"}, {RESOLVE: {"a": {"path": "x"}}}], resolver) == [len, len, len]
    assert asked == [None, "nano3", {"a": {"path": "x"}}]
    with pytest.raises(InputError, match=r'transform 1, {"resolve_placeholders": "nano9"}: no such tables'):
        parse([{RESOLVE: "nano9"}], resolver)
    with pytest.raises(InputError, match="transform 1, ") as error:
        parse([{"select": ["field" * 1000, "b.c"]}], resolver)
    assert len(str(error.value)) < 400


def test_transforms_run_in_spec_order():
    first, second = parse([{"rename": {"input": "q", "output": "a"}}, "sft"], no_tables)
    between = first({"q": "1", "a": "2"})
    assert between == {"input": "1", "output": "2"}
    assert second(between) is between
    assert parse([], no_tables) == []
    row = {"messages": [Q, A], "id": 1}
    assert transform("openai_chat")(row)["messages"] is row["messages"], "values are shared"


TEXT = st.text("ab é\n{}", max_size=5)
MESSAGE = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant", "tool"]), TEXT
)
PROMPT = st.one_of(TEXT, st.lists(MESSAGE, min_size=2, max_size=4))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SPECS = [
    *TRANSFORMS.keys() - {"select", "rename", "set", "drop"},
    {"set": {"a": 1, "input.tools": [True]}},
    {"drop": ["a", "input.tools"]},
    {"select": ["a", "messages"]},
    {"rename": {"a": "input", "b": "prompt.a"}},
    {"preference": "pairs"},
    {"sft": {"system": "a.b"}},
]
LOOSE = st.one_of(
    JSON, st.lists(MESSAGE, max_size=3), st.just([{"rank": 0, "completion": [A]}, {"rank": 1, "completion": [B]}])
)
ROWS = st.dictionaries(
    st.sampled_from(["a", "input", "output", "messages", "tools", "conversations", "prompt", "chosen", "rejected", "context", "completions", "responses_create_params"]),
    LOOSE | st.fixed_dictionaries({"input": LOOSE}, optional={"tools": LOOSE}),
)  # fmt: skip


@given(ROWS, st.sampled_from(SPECS))
@max_examples(500)
def test_no_row_is_changed_and_none_raises(row, spec):
    before = copy.deepcopy(row)
    found = transform(spec)(row)
    assert isinstance(found, dict | Rejected)
    assert row == before
    assert [*map(repr, row.items())] == [*map(repr, before.items())]


IDEMPOTENT = [
    spec
    for spec in SPECS
    if spec != "nemotron_rl" and not {"rename", "sft"} & {*(spec if isinstance(spec, dict) else ())}
]


@given(ROWS, st.sampled_from(IDEMPOTENT))
@max_examples(300)
def test_transforms_are_idempotent(row, spec):
    found = transform(spec)(row)
    if isinstance(found, dict):
        assert transform(spec)(found) is found


@given(PROMPT, TEXT, TEXT)
@max_examples(200)
def test_preferences_from_completions(prompt, chosen, rejected):
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    completions = transform("preference")(row)
    assert transform({"preference": "pairs"})(completions) == row
    assert completions == readers.ranks_of(row)


@given(st.lists(MESSAGE, min_size=1, max_size=4), TEXT, TEXT)
@max_examples(200)
def test_completions_from_pairs(context, chosen, rejected):
    row = ranks(context, [{"role": "assistant", "content": chosen}], [{"role": "assistant", "content": rejected}])
    pairs = transform({"preference": "pairs"})(row)
    assert transform("preference")(pairs) == row


@given(
    st.lists(MESSAGE, min_size=1, max_size=4),
    st.lists(MESSAGE, min_size=1, max_size=3),
    st.lists(MESSAGE, min_size=1, max_size=3),
)
@max_examples(200)
def test_conversations_lose_no_message(shared, better, worse):
    row = {"chosen": shared + better, "rejected": shared + worse}
    found = transform("preference")(row)
    if isinstance(found, Rejected):
        assert found.reason == "two_prompts"
        return
    chosen, rejected = (each["completion"] for each in found["completions"])
    assert chosen
    assert rejected
    assert [found["context"] + chosen, found["context"] + rejected] == [row["chosen"], row["rejected"]]


def turn(speaker, value):
    return {"from": speaker, "value": value}


HUB = "https://huggingface.co/datasets/"
SHAPES = {
    HUB + "trl-lib/ultrafeedback_binarized": {"chosen": [Q, A], "rejected": [Q, B], "score_chosen": 8.0},
    HUB + "HuggingFaceH4/ultrafeedback_binarized": {"prompt": Q["content"], "chosen": [Q, A], "rejected": [Q, B], "messages": [Q, A]},
    HUB + "trl-lib/hh-rlhf-helpful-base": {"prompt": [Q], "chosen": [A], "rejected": [B]},
    HUB + "jondurbin/truthy-dpo-v0.1": {"prompt": Q["content"], "chosen": A["content"], "rejected": B["content"], "system": ""},
    HUB + "Anthropic/hh-rlhf": {name: f"\n\nHuman: {Q['content']}\n\nAssistant: {each['content']}" for name, each in (("chosen", A), ("rejected", B))},
    HUB + "Intel/orca_dpo_pairs#no-system": {"system": "", "question": Q["content"], "chosen": A["content"], "rejected": B["content"]},
    HUB + "hiyouga/DPO-En-Zh-20k": {"conversations": [turn("human", Q["content"])], "chosen": turn("gpt", A["content"]), "rejected": turn("gpt", B["content"])},
    "https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md": {"instruction": Q["content"], "input": "", "chosen": A["content"], "rejected": B["content"]},
    "https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html": {"messages": [Q, A], "rejected_response": B["content"]},
    "https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html#rejected_messages": {"messages": [Q, A], "rejected_messages": [Q, B]},
}  # fmt: skip
"""Rows of one preference in the shapes of public datasets, by source."""


@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES)
def test_preferences_of_every_shape_are_the_same(row):
    before = copy.deepcopy(row)
    assert transform("preference")(row) == {
        "context": [Q], "completions": [{"rank": 0, "completion": [A]}, {"rank": 1, "completion": [B]}]
    }  # fmt: skip
    pairs = transform({"preference": "pairs"})(row)
    assert pairs["prompt"] in (Q["content"], [Q])
    assert (pairs["chosen"], pairs["rejected"]) == (A["content"], B["content"])
    assert row == before


def test_a_system_prompt_and_turns_before_a_preference_are_kept():
    row = {"system": "s", "question": "q", "chosen": "a", "rejected": "b"}
    assert transform("preference")(row)["context"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
    ]
    talk = "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant:"
    context = transform("preference")({"chosen": f"{talk} x", "rejected": f"{talk} y"})["context"]
    assert [message["content"] for message in context] == ["q", "a", "r"]
