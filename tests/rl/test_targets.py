"""The checks let pass what the readers read, and refuse what they would choke on or silently misread."""

import copy
import json
import re
from importlib import resources

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import SchemaValidator
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.rl import targets
from tokenmill.tasks.rl.targets import TARGETS
from tokenmill.tasks.rl.targets.nemo_gym import SCHEMAS, request_fault

from tests.examples import max_examples
from tests.peers import nemo_rl_readers as readers

Q = {"role": "user", "content": "2 + 2?"}
A = {"role": "assistant", "content": "4"}
B = {"role": "assistant", "content": "5"}
S = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
GYM_TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
AGENT = {"type": "responses_api_agents", "name": "math"}


def ranks(first, second, context=(Q,), ranks=(0, 1)):
    completions = [{"rank": rank, "completion": list(each)} for rank, each in zip(ranks, (first, second), strict=True)]
    return {"context": list(context), "completions": completions}


RANKS = ranks([A], [B])
PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def request(*items, **params):
    return {"responses_create_params": {"input": list(items), **params}, "agent_ref": AGENT}


def without(row, field):
    return {key: value for key, value in row.items() if key != field}


def in_ranks(row):
    return row.get("completions") is not None or (row.get("context") is not None and row.get("chosen") is None)


READERS = {
    "nemo_rl_sft": readers.read_sft,
    "nemo_rl_chat": readers.read_chat,
    "nemo_rl_grpo_math": readers.read_grpo_math,
    "nemo_rl_dpo": lambda rows: (readers.read_preferences if in_ranks(rows[0]) else readers.read_pairs)(rows),
    "nemo_gym": readers.read_gym,
}

CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}

GOOD = [
    # target, row, the texts that a model reads, what the reader reads
    ("nemo_rl_sft", {"input": "q", "output": "a"}, ["q", "a"], "<user>q<assistant>a"),
    ("nemo_rl_sft", {"input": " ", "output": "é\n", "id": 7, "system": None}, [" ", "é\n"], "<user> <assistant>é\n"),
    ("nemo_rl_chat", {"messages": [Q, A]}, ["2 + 2?", "4"], "<user>2 + 2?<assistant>4"),
    ("nemo_rl_chat", {"messages": [A]}, ["4"], "<assistant>4"),
    ("nemo_rl_chat", {"messages": [S, Q, A], "tools": None}, ["Be brief.", "2 + 2?", "4"], "<system>Be brief.<user>2 + 2?<assistant>4"),
    ("nemo_rl_chat", {"messages": [Q, A], "tools": [], "id": 1}, ["2 + 2?", "4"], "<user>2 + 2?<assistant>4"),
    ("nemo_rl_chat", {"messages": [Q, CALLED, {"role": "tool", "content": "4"}, A], "tools": [TOOL]}, ["2 + 2?", '{"type": "function", "id": "c1", "function": {"name": "add", "arguments": "{\\"a\\": 2}"}}', "4", "4", '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'], "<user>2 + 2?<assistant><call><tool>4<assistant>4"),
    ("nemo_rl_chat", {"messages": [Q, {**A, "reasoning_content": "two twos"}]}, ["2 + 2?", "two twos", "4"], "<user>2 + 2?<assistant>4"),
    ("nemo_rl_chat", {"messages": [{**Q, "tool_calls": None}, {**A, "tool_calls": []}]}, ["2 + 2?", "4"], "<user>2 + 2?<assistant>4"),
    ("nemo_rl_chat", {"messages": [{"role": "developer", "content": ""}, Q, A]}, ["", "2 + 2?", "4"], "<developer><user>2 + 2?<assistant>4"),
    ("nemo_rl_grpo_math", {"input": "q", "output": "a"}, ["q"], ("<user>q", "a")),
    ("nemo_rl_grpo_math", {"messages": [Q, A], "level": 3}, ["2 + 2?"], ("<user>2 + 2?", "4")),
    ("nemo_rl_dpo", RANKS, ["2 + 2?", "4", "5"], ("<user>2 + 2?<assistant>4", "<user>2 + 2?<assistant>5")),
    ("nemo_rl_dpo", ranks([B], [A], context=[S, Q], ranks=(7, -1)), ["Be brief.", "2 + 2?", "5", "4"], ("<system>Be brief.<user>2 + 2?<assistant>4", "<system>Be brief.<user>2 + 2?<assistant>5")),
    ("nemo_rl_dpo", ranks([A, Q, A], [B]) | {"prompt": None}, ["2 + 2?", "4", "2 + 2?", "4", "5"], ("<user>2 + 2?<assistant>4<user>2 + 2?<assistant>4", "<user>2 + 2?<assistant>5")),
    ("nemo_rl_dpo", PAIR | {"context": "arithmetic", "completions": None}, ["2 + 2?", "4", "5"], ("<user>2 + 2?<assistant>4", "<user>2 + 2?<assistant>5")),
    ("nemo_rl_dpo", PAIR, ["2 + 2?", "4", "5"], ("<user>2 + 2?<assistant>4", "<user>2 + 2?<assistant>5")),
    ("nemo_rl_dpo", PAIR | {"prompt": [S, Q], "score": 0.5}, ["Be brief.", "2 + 2?", "4", "5"], ("<system>Be brief.<user>2 + 2?<assistant>4", "<system>Be brief.<user>2 + 2?<assistant>5")),
]  # fmt: skip

GYM_ROWS = [
    (request(Q, temperature=0.2, top_p=0.5), ["2 + 2?"]),
    (request(), []),
    ({"responses_create_params": {"input": "2 + 2?"}, "agent_ref": AGENT}, ["2 + 2?"]),
    (request(S, Q), ["Be brief.", "2 + 2?"]),
    (request(Q, tools=[GYM_TOOL], temperature=None, instructions="Sum."), ["Sum.", "2 + 2?", json.dumps(GYM_TOOL)]),
    (request(Q, max_output_tokens=256, metadata={"a": "b"}, tool_choice="auto", parallel_tool_calls=False), ["2 + 2?"]),
    (request(Q) | {"agent_ref": {"name": "math"}, "license": "of nobody"}, ["2 + 2?"]),
    (request(Q) | {"_hf_placeholder": None, "_rowidx": None, "expected_answer": 4}, ["2 + 2?"]),
    (
        request(
            {"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}], "type": "message"},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "4"},
        ),
        ["2 + 2?", "add", "{}", "4"],
    ),
]  # fmt: skip

FAILS = object()
"""The reader raises."""

CLAIMED = object()
"""Nothing is said of the reader, which may be more patient."""

SFT = {"input": "q", "output": "a"}
PAIR_MESSAGES = {"messages": [Q, A]}

REFUSED = [
    # target, row, reason, words of the detail: the field and the remedy, and what the reader makes of it
    ("nemo_rl_sft", {"output": "a"}, "missing_field", ["input", "filter out"], FAILS),
    ("nemo_rl_sft", {"input": None, "output": "a"}, "missing_field", ["input", "filter out"], FAILS),
    ("nemo_rl_sft", {"input": "q", "output": 4}, "bad_field", ["output", "a number", "make it text"], FAILS),
    ("nemo_rl_sft", {"input": "q", "output": ["a"]}, "bad_field", ["output", "an array", "make it text"], FAILS),
    ("nemo_rl_sft", {"input": "", "output": "a"}, "empty_text", ["input", "filter out"], "<user><assistant>a"),
    ("nemo_rl_sft", {"input": "q", "output": ""}, "empty_text", ["output", "filter out"], "<user>q<assistant>"),
    ("nemo_rl_sft", SFT | {"messages": [Q, A]}, "two_forms", ["messages", "input and output", "select"], "<user>2 + 2?<assistant>4"),
    ("nemo_rl_sft", SFT | {"messages": None}, "two_forms", ["messages", "select"], FAILS),
    ("nemo_rl_sft", {"messages": [Q, A]}, "missing_field", ["input"], CLAIMED),
    ("nemo_rl_sft", SFT | {"task_name": "x"}, "reserved_field", ["task_name", "remove"], "<user>q<assistant>a"),
    ("nemo_rl_chat", {}, "missing_field", ["messages", "an array of messages"], FAILS),
    ("nemo_rl_chat", {"messages": "[]"}, "bad_field", ["messages", "a string", "an array of messages"], FAILS),
    ("nemo_rl_chat", {"messages": []}, "no_messages", ["messages", "filter out"], FAILS),
    ("nemo_rl_chat", {"messages": [Q, "4"]}, "bad_message", ["message 2 of 2 in messages", "make it an object"], FAILS),
    ("nemo_rl_chat", {"messages": [{"role": "human", "content": "q"}, A]}, "unknown_role", ["message 1 of 2", "'human'", "user"], FAILS),
    ("nemo_rl_chat", {"messages": [{"role": ["user"], "content": "q"}, A]}, "unknown_role", ["message 1 of 2", "an array"], FAILS),
    ("nemo_rl_chat", {"messages": [{"content": "q"}, A]}, "unknown_role", ["message 1 of 2", "null"], FAILS),
    ("nemo_rl_chat", {"messages": [Q, {"role": "assistant"}]}, "no_content", ["message 2 of 2", "'role'", "write text"], FAILS),
    ("nemo_rl_chat", {"messages": [Q, {"role": "assistant", "content": None}]}, "no_content", ["message 2 of 2", "null beside tool_calls"], FAILS),
    ("nemo_rl_chat", {"messages": [Q, CALLED | {"tool_calls": []}]}, "no_content", ["message 2 of 2"], FAILS),
    ("nemo_rl_chat", {"messages": [Q, without(CALLED, "content")]}, "no_content", ["write text, or null beside tool_calls"], FAILS),
    ("nemo_rl_chat", {"messages": [Q, {**A, "content": [{"type": "text", "text": "4"}]}]}, "not_text", ["message 2 of 2", "make it one text"], FAILS),
    ("nemo_rl_chat", {"messages": [Q, {**A, "content": 4}]}, "not_text", ["message 2 of 2", "a number"], FAILS),
    ("nemo_rl_chat", {"messages": [Q, {**A, "tool_calls": "add"}]}, "bad_tool_calls", ["message 2 of 2", "make it an array"], FAILS),
    ("nemo_rl_chat", {"messages": [Q, {**A, "tool_calls": ["add"]}]}, "bad_tool_calls", ["an array with a string in it"], FAILS),
    ("nemo_rl_chat", {"messages": [A, Q]}, "last_not_assistant", ["messages", "'user'", "end it with an answer"], FAILS),
    ("nemo_rl_chat", PAIR_MESSAGES | {"tools": "[]"}, "bad_tools", ["tools", "a string", "make it an array"], FAILS),
    ("nemo_rl_chat", PAIR_MESSAGES | {"tools": ["add"]}, "bad_tools", ["tools", "an array with a string in it"], FAILS),
    ("nemo_rl_chat", PAIR_MESSAGES | {"task_name": None}, "reserved_field", ["task_name", "remove"], FAILS),
    ("nemo_rl_grpo_math", {"input": "q"}, "missing_field", ["output"], FAILS),
    ("nemo_rl_grpo_math", {"input": "q", "output": 4}, "bad_field", ["output", "make it text"], ("<user>q", 4)),
    ("nemo_rl_grpo_math", {"input": "q", "output": ""}, "empty_text", ["output"], ("<user>q", "")),
    ("nemo_rl_grpo_math", {"input": "", "output": "4"}, "empty_text", ["input"], ("<user>", "4")),
    ("nemo_rl_grpo_math", {"messages": [S, Q, A]}, "system_turn", ["system", "system_prompt_file"], ("<user>Be brief.", "2 + 2?")),
    ("nemo_rl_grpo_math", {"messages": [S, Q]}, "system_turn", ["system_prompt_file"], ("<user>Be brief.", "2 + 2?")),
    ("nemo_rl_grpo_math", {"messages": [Q]}, "not_a_pair", ["user", "one by assistant"], FAILS),
    ("nemo_rl_grpo_math", {"messages": [A, Q]}, "not_a_pair", ["assistant, user"], ("<user>4", "2 + 2?")),
    ("nemo_rl_grpo_math", {"messages": [Q, B, Q, A]}, "not_a_pair", ["only the first two"], ("<user>2 + 2?", "5")),
    ("nemo_rl_grpo_math", {"messages": [Q, CALLED]}, "missing_field", ["message 2", "answer", "make it text"], ("<user>2 + 2?", None)),
    ("nemo_rl_grpo_math", {"messages": [Q, {**A, "content": ""}]}, "empty_text", ["message 2", "answer"], ("<user>2 + 2?", "")),
    ("nemo_rl_grpo_math", {"messages": [Q, {**A, "content": 4}]}, "not_text", ["message 2 of 2"], FAILS),
    ("nemo_rl_grpo_math", {"messages": None}, "missing_field", ["messages"], FAILS),
    ("nemo_rl_grpo_math", SFT | PAIR_MESSAGES, "two_forms", ["input and output", "select"], ("<user>2 + 2?", "4")),
    ("nemo_rl_grpo_math", SFT | {"messages": None}, "two_forms", ["select"], FAILS),
    ("nemo_rl_grpo_math", PAIR_MESSAGES | {"task_name": "math"}, "reserved_field", ["task_name"], FAILS),
    ("nemo_rl_dpo", RANKS | {"task_name": "pref"}, "reserved_field", ["task_name", "remove"], FAILS),
    ("nemo_rl_dpo", without(RANKS, "context"), "missing_field", ["context", "an array of messages"], FAILS),
    ("nemo_rl_dpo", without(RANKS, "completions"), "missing_field", ["completions"], FAILS),
    ("nemo_rl_dpo", RANKS | {"context": []}, "no_messages", ["context"], ("<assistant>4", "<assistant>5")),
    ("nemo_rl_dpo", RANKS | {"context": "q"}, "bad_field", ["context", "an array of messages"], FAILS),
    ("nemo_rl_dpo", RANKS | {"context": [{"role": "human", "content": "q"}]}, "unknown_role", ["message 1 of 1 in context"], FAILS),
    ("nemo_rl_dpo", RANKS | {"completions": "4"}, "bad_field", ["completions", "an array of two"], FAILS),
    ("nemo_rl_dpo", RANKS | {"completions": RANKS["completions"][:1]}, "not_two_completions", ["completions has 1", "every pair"], FAILS),
    ("nemo_rl_dpo", RANKS | {"completions": RANKS["completions"] * 2}, "not_two_completions", ["completions has 4"], FAILS),
    ("nemo_rl_dpo", RANKS | {"completions": ["4", "5"]}, "bad_field", ["completion 1 of 2", "{rank, completion}"], FAILS),
    ("nemo_rl_dpo", ranks([A], [A]), "same_answers", ["equal", "filter out"], ("<user>2 + 2?<assistant>4", "<user>2 + 2?<assistant>4")),
    ("nemo_rl_dpo", PAIR | {"rejected": PAIR["chosen"]}, "same_answers", ["equal", "filter out"], ("<user>2 + 2?<assistant>4", "<user>2 + 2?<assistant>4")),
    ("nemo_rl_dpo", ranks([A], [B], ranks=(1, 1)), "tied_ranks", ["rank 1", "filter out ties"], FAILS),
    ("nemo_rl_dpo", ranks([A], [B], ranks=(0, None)), "bad_rank", ["completion 2", "a whole number"], FAILS),
    ("nemo_rl_dpo", ranks([A], [B], ranks=("9", "10")), "bad_rank", ["completion 1", "a string"], ("<user>2 + 2?<assistant>5", "<user>2 + 2?<assistant>4")),
    ("nemo_rl_dpo", ranks([A], [B], ranks=(0, True)), "bad_rank", ["completion 2", "a boolean"], FAILS),
    ("nemo_rl_dpo", ranks([A], [B], ranks=(0.5, 1)), "bad_rank", ["completion 1", "a number"], CLAIMED),
    ("nemo_rl_dpo", ranks([A], []), "no_messages", ["completion 2 of 2"], ("<user>2 + 2?<assistant>4", "<user>2 + 2?")),
    ("nemo_rl_dpo", ranks([A, Q], [B]), "last_not_assistant", ["completion 1 of 2", "'user'"], ("<user>2 + 2?<assistant>4<user>2 + 2?", "<user>2 + 2?<assistant>5")),
    ("nemo_rl_dpo", ranks([A], [{**B, "content": None}]), "no_content", ["message 1 of 1 in completion 2 of 2"], FAILS),
    ("nemo_rl_dpo", {"completions": [{"rank": 0}, {"rank": 1}], "context": [Q]}, "missing_field", ["completion 1 of 2"], FAILS),
    ("nemo_rl_dpo", without(PAIR, "prompt"), "missing_field", ["prompt"], FAILS),
    ("nemo_rl_dpo", without(PAIR, "chosen"), "missing_field", ["chosen"], FAILS),
    ("nemo_rl_dpo", PAIR | {"rejected": None}, "missing_field", ["rejected"], FAILS),
    ("nemo_rl_dpo", PAIR | {"rejected": ""}, "empty_text", ["rejected"], ("<user>2 + 2?<assistant>4", "<user>2 + 2?<assistant>")),
    ("nemo_rl_dpo", PAIR | {"prompt": ""}, "empty_text", ["prompt"], ("<user><assistant>4", "<user><assistant>5")),
    ("nemo_rl_dpo", PAIR | {"prompt": []}, "no_messages", ["prompt"], ("<assistant>4", "<assistant>5")),
    ("nemo_rl_dpo", PAIR | {"prompt": ["2 + 2?"]}, "bad_message", ["message 1 of 1 in prompt"], FAILS),
    ("nemo_rl_dpo", PAIR | {"chosen": [Q, A]}, "not_text", ["chosen", "the transform preference"], FAILS),
    ("nemo_rl_dpo", PAIR | {"rejected": 5}, "bad_field", ["rejected", "make it text"], FAILS),
    ("nemo_rl_dpo", PAIR | {"task_name": "pref"}, "reserved_field", ["task_name"], CLAIMED),
    ("nemo_rl_dpo", {}, "missing_field", ["prompt"], FAILS),
    ("nemo_gym", {"agent_ref": AGENT}, "missing_field", ["responses_create_params", "an object"], FAILS),
    ("nemo_gym", {"responses_create_params": "{}", "agent_ref": AGENT}, "bad_field", ["responses_create_params", "a string"], FAILS),
    ("nemo_gym", {"responses_create_params": {}, "agent_ref": AGENT}, "missing_field", ["responses_create_params.input", '"role": "user"'], FAILS),
    ("nemo_gym", {"responses_create_params": {"input": 7}, "agent_ref": AGENT}, "bad_field", ["responses_create_params.input", '"role": "user"'], FAILS),
    ("nemo_gym", request("q"), "bad_message", ["item 1 of 1", "role and content"], FAILS),
    ("nemo_gym", request(Q, {"role": "tool", "content": "4"}), "unknown_role", ["item 2 of 2", "'tool'", "developer"], FAILS),
    ("nemo_gym", request({"content": "q"}), "unknown_role", ["item 1 of 1", "null"], FAILS),
    ("nemo_gym", request({"role": "user"}), "no_content", ["item 1 of 1", "write text"], FAILS),
    ("nemo_gym", request({"role": "user", "content": 4}), "not_text", ["item 1 of 1", "array of parts"], FAILS),
    ("nemo_gym", request({"role": "user", "content": ["q"]}), "not_text", ["item 1 of 1", "an array with a string in it"], FAILS),
    ("nemo_gym", request(Q | {"type": None}), "bad_message", ["item 1 of 1", "remove it"], FAILS),
    ("nemo_gym", request(Q | {"type": ""}), "bad_message", ["item 1 of 1", "remove it"], FAILS),
    ("nemo_gym", request(Q, tools=None), "bad_tools", ["responses_create_params.tools", "remove it"], FAILS),
    ("nemo_gym", request(Q, tools={}), "bad_tools", ["responses_create_params.tools", "a valid list"], FAILS),
    ("nemo_gym", request(Q, tools=["add"]), "bad_tools", ["a string"], FAILS),
    ("nemo_gym", request(Q) | {"agent_ref": None}, "missing_field", ["agent_ref", '"name"'], FAILS),
    ("nemo_gym", request(Q) | {"agent_ref": "math"}, "bad_field", ["agent_ref", "an object"], FAILS),
    ("nemo_gym", request(Q, max_tokens=5), "unknown_parameter", ["responses_create_params.max_tokens", "remove"], FAILS),
    ("nemo_gym", request(Q, tools=[TOOL]), "bad_tools", ["tools[0]", "side by side"], FAILS),
    ("nemo_gym", request(Q, tools=[{"type": "function", "name": "add", "strict": True}]), "bad_tools", ["tools[0].parameters"], FAILS),
    ("nemo_gym", request(Q, {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}), "bad_item", ["input[1].arguments", "a valid string"], FAILS),
    ("nemo_gym", request(Q, {"role": "assistant", "content": [{"type": "output_text", "text": "4"}]}), "bad_item", ["input[1]"], FAILS),
    ("nemo_gym", request(Q, {"type": "thought", "text": "hm"}), "bad_item", ["input[1]"], FAILS),
    ("nemo_gym", request({**Q, "prompt_token_ids": [1]}), "bad_item", ["input[0]", "go together"], FAILS),
    ("nemo_gym", request({"role": "user", "content": [{"type": "input_video", "video": ""}]}), "bad_item", ["a video", "one address"], FAILS),
    ("nemo_gym", request(Q, metadata={"n": 1}), "bad_parameter", ["metadata.n"], FAILS),
    ("nemo_gym", request(Q, tool_choice="always"), "bad_parameter", ["tool_choice"], FAILS),
    ("nemo_gym", request(Q, reasoning="high"), "bad_parameter", ["reasoning"], FAILS),
    ("nemo_gym", request(Q, instructions=["Sum."]), "bad_parameter", ["instructions"], FAILS),
    ("nemo_gym", request(Q, parallel_tool_calls=None), "bad_parameter", ["parallel_tool_calls"], FAILS),
    ("nemo_gym", request(Q, max_output_tokens="256"), "bad_field", ["max_output_tokens", "a number"], FAILS),
    ("nemo_gym", request(Q) | {"agent_ref": {"type": "t"}}, "missing_field", ["agent_ref.name"], FAILS),
    ("nemo_gym", request(Q) | {"agent_ref": {"type": "t", "name": ""}}, "empty_text", ["agent_ref.name"], FAILS),
    ("nemo_gym", {"_hf_placeholder": {"row": 1}, "agent_ref": AGENT}, "unresolved_placeholder", ["_hf_placeholder", "resolve_placeholders"], FAILS),
    ("nemo_gym", {"_hf_question_placeholder": {"row": 1}, "agent_ref": AGENT}, "unresolved_placeholder", ["_hf_question_placeholder", "resolve_placeholders"], FAILS),
]  # fmt: skip


@pytest.mark.parametrize(("target", "row", "texts", "read"), GOOD)
def test_good_row_passes_and_is_read_unchanged(target, row, texts, read):
    before = copy.deepcopy(row)
    assert TARGETS[target].check(row) is None
    assert TARGETS[target].texts(row) == texts
    assert row == before
    assert READERS[target]([row]) == [read]


@pytest.mark.parametrize(("row", "texts"), GYM_ROWS)
def test_a_good_request_passes_and_keeps_its_line(row, texts):
    assert TARGETS["nemo_gym"].check(row) is None
    assert TARGETS["nemo_gym"].texts(row) == texts
    (read,) = readers.read_gym([row])
    assert read["responses_create_params"]["input"] == row["responses_create_params"]["input"]
    assert {key: read[key] for key in row.keys() - {"responses_create_params", "_rowidx"}} == {
        key: row[key] for key in row.keys() - {"responses_create_params", "_rowidx"}
    }


@pytest.mark.parametrize(("target", "row", "reason", "words", "read"), REFUSED)
def test_bad_row_is_rejected_with_field_and_remedy(target, row, reason, words, read):
    before = copy.deepcopy(row)
    rejected = TARGETS[target].check(row)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == reason
    assert [word for word in words if word not in rejected.detail] == [], rejected.detail
    assert row == before
    if read is FAILS:
        with pytest.raises(readers.FAILURES):
            READERS[target]([row])
    elif read is not CLAIMED:
        assert READERS[target]([row]) == [read]


def test_rows_that_the_reader_would_change_are_rejected():
    row = request(Q) | {"_rowidx": 17}
    rejected = TARGETS["nemo_gym"].check(row)
    assert rejected.reason == "reserved_field"
    assert re.search("_rowidx.*remove", rejected.detail)
    assert readers.read_gym([row])[0]["_rowidx"] == 0
    row = request({"role": "user", "content": ""}) | {"_hf_placeholder": {"row": 3, "question_template": "{question}"}}
    assert TARGETS["nemo_gym"].check(row).reason == "unresolved_placeholder"
    assert readers.read_gym([row])[0]["responses_create_params"]["input"][0]["content"] == ""


def test_any_row_passes_where_nobody_reads():
    for row in [{}, {"task_name": 1}, {"messages": None}]:
        assert TARGETS["none"].check(row) is None
        assert TARGETS["none"].texts(row) == []


def test_non_texts_become_json():
    row = {"messages": [{**Q, "name": 5}, {**A, "reasoning_content": {"é": 1}}]}
    assert TARGETS["nemo_rl_chat"].texts(row) == ["2 + 2?", "5", '{"é": 1}', "4"]


SCALARS = st.sampled_from([None, "", "a", "é b", 4, True])


def places(value):
    """Every object and array within, with a key of it."""
    keys = list(value if isinstance(value, dict) else range(len(value))) if isinstance(value, dict | list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


ANYTHING = st.recursive(
    SCALARS | st.floats(allow_nan=False), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "rank", "completion", "input"]), inner, max_size=3), max_leaves=8
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["input", "messages", "context", "completions", "prompt", "chosen", "responses_create_params", "agent_ref"]), ANYTHING))  # fmt: skip
@max_examples(300)
def test_nothing_in_data_raises(row):
    before = copy.deepcopy(row)
    for target in TARGETS:
        assert isinstance(TARGETS[target].check(row), Rejected | None)
    assert row == before


SCALARS = st.sampled_from([None, True, False, 0, 1, -1, 1.0, 2.5, 10**30, float("nan"), "", "auto", "x", [], {}, ["x"]])
NAMES = [
    "parallel_tool_calls",
    "max_output_tokens",
    "store",
    "model",
    "tools",
    "instructions",
    "user",
    "top_logprobs",
    "no",
]
PARAMETERS = st.dictionaries(st.sampled_from(NAMES), SCALARS, max_size=2)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]), "content": st.text() | SCALARS},
    optional={"type": st.sampled_from(["message", "no"]), "name": st.text(max_size=2)},
)


@max_examples(300)
@given(st.lists(st.tuples(st.lists(MESSAGES, min_size=1, max_size=3), PARAMETERS), min_size=1, max_size=4))
def test_requests_match_the_schema(requests):
    schema = SchemaValidator(orjson.loads(resources.files(targets).joinpath(SCHEMAS).read_bytes())["request"])
    for messages, others in [*requests, *requests]:
        params = {"input": messages, **others}
        assert (request_fault(params) is None) == (schema.isinstance_python(params))


def test_tools_of_preferences_are_counted():
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert [list(TARGETS["nemo_rl_dpo"].unread({**row, **more})) for more in ({}, {"tools": [{"name": "f"}]})] == [
        [],
        ["tools"],
    ]
