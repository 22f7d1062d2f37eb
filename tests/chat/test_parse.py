"""Records of every shape become one strict form, or say why not; nothing in data raises."""

import copy
import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import get_args

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.chat import messages
from tokenmill.tasks.chat.conversation import Arguments, Conversation, Reason, Rejected, RejectionError, apart
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.chat.shapes import fields_read
from tokenmill.tasks.sources.exact_json import loads

from tests.examples import max_examples

Q = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "a"}
HALF = "half \ud83d"
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


def read(record, messages_field=None, tools_field="tools"):
    found = conversation(record, messages_field, tools_field)
    return found if isinstance(found, Rejected) else apart(found, "closed")


def messages_of(record, messages_field=None):
    found = read(record, messages_field)
    assert isinstance(found, Conversation), found
    return found.messages


def answer(**fields):
    """A record whose one answer has `fields`."""
    return {"messages": [Q, {"role": "assistant", **fields}]}


def calling(*calls, **fields):
    return answer(content="", tool_calls=list(calls), **fields)


def asked(**fields):
    """A record whose question has `fields` beside its role."""
    return {"messages": [{"role": "user", **fields}, A]}


def result(content):
    return {"messages": [Q, A, {"role": "tool", "content": content}]}


def turn(speaker, value, **fields):
    return {"from": speaker, "value": value, **fields}


SEARCH_CALL = {"type": "function", "function": {"name": "search", "arguments": {"q": "é"}}}

GOOD = {
    # OpenAI's messages
    "plain": ({"messages": [Q, A]}, [Q, A]),
    "every role": (
        {"messages": [{"role": role, "content": role} for role in ["system", "developer", "user", "assistant", "tool"]]},
        [{"role": role, "content": role} for role in ["system", "developer", "user", "assistant", "tool"]],
    ),
    "function is tool": (
        {"messages": [Q, A, {"role": "function", "name": "f", "content": "r"}]},
        [Q, A, {"role": "tool", "content": "r", "name": "f"}],
    ),
    "messages as a JSON string": ({"messages": json.dumps([Q, A])}, [Q, A]),
    "unknown keys of messages": (
        {"messages": [{**Q, "weight": 1}, {**A, "refusal": None, "annotations": []}]},
        [Q, A],
    ),
    "empty answer": (answer(content=""), [Q, {"role": "assistant", "content": ""}]),
    "other alphabets": (asked(content="שלום 👍🏽 e\u0301"), [{"role": "user", "content": "שלום 👍🏽 e\u0301"}, A]),
    "text is not touched": (asked(content="\n <b>{{ x }}</b>\x00\t "), [{"role": "user", "content": "\n <b>{{ x }}</b>\x00\t "}, A]),
    "names": (
        {"messages": [{**Q, "name": "ann"}, {**A, "name": ""}, {"role": "tool", "content": "r", "name": "f", "tool_call_id": "c1"}]},
        [{**Q, "name": "ann"}, A, {"role": "tool", "content": "r", "name": "f", "tool_call_id": "c1"}],
    ),
    "a tool_call_id is a tool's": ({"messages": [{**Q, "tool_call_id": "c1"}, A]}, [Q, A]),
    # content
    "text parts": (
        asked(content=[{"type": "text", "text": "one "}, "two", {"type": "text", "text": "", "image_url": None}]),
        [{"role": "user", "content": "one two"}, A],
    ),
    "no parts": (answer(content=[]), [Q, {"role": "assistant", "content": ""}]),
    "text parts from a tool": (result([{"type": "text", "text": "1"}, "2"]), [Q, A, {"role": "tool", "content": "12"}]),
    "an object from a tool": (result({"ok": True, "é": None}), [Q, A, {"role": "tool", "content": '{"ok": true, "é": null}'}]),
    "an array from a tool": (result(["a", {"type": "file"}]), [Q, A, {"role": "tool", "content": '["a", {"type": "file"}]'}]),
    "blocks from a tool": (result([{"type": "tool_use"}]), [Q, A, {"role": "tool", "content": '[{"type": "tool_use"}]'}]),
    "an empty array from a tool": (result([]), [Q, A, {"role": "tool", "content": "[]"}]),
    "a boolean from a tool": (result(False), [Q, A, {"role": "tool", "content": "false"}]),
    "a number from a tool": (result(0.5), [Q, A, {"role": "tool", "content": "0.5"}]),
    # reasoning
    "reasoning": (answer(content="a", reasoning_content=" why\n"), [Q, {**A, "reasoning_content": " why\n"}]),
    "reasoning, second spelling": (answer(content="a", reasoning="why"), [Q, {**A, "reasoning_content": "why"}]),
    "reasoning, third spelling": (answer(content="a", thinking="why"), [Q, {**A, "reasoning_content": "why"}]),
    "reasoning, said twice the same": (
        answer(content="a", reasoning="why", reasoning_content="why"),
        [Q, {**A, "reasoning_content": "why"}],
    ),
    "reasoning, null": (answer(content="a", reasoning_content=None), [Q, A]),
    "reasoning, empty": (answer(content="a", reasoning_content=""), [Q, A]),
    "reasoning, blank": (answer(content="a", reasoning_content=" \n\u00a0", reasoning=""), [Q, A]),
    "reasoning, a setting": (answer(content="a", thinking=True, reasoning={"effort": "high"}), [Q, A]),
    "reasoning, blank by the user": (asked(content="q", reasoning_content=" "), [Q, A]),
    "reasoning alone, beside calls": (
        answer(reasoning_content="why", tool_calls=[SEARCH_CALL]),
        [Q, {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [SEARCH_CALL]}],
    ),
    # inline thinking
    "inline": (answer(content="<think>\nwhy\n</think>\n\na"), [Q, {**A, "reasoning_content": "why"}]),
    "inline, after blanks": (answer(content=" \n<think>why</think>a"), [Q, {**A, "reasoning_content": "why"}]),
    "inline, in parts": (answer(content=["<think>why", "</think>", "a"]), [Q, {**A, "reasoning_content": "why"}]),
    "inline, opened before it begins": (answer(content="\nwhy\n</think>\na"), [Q, {**A, "reasoning_content": "why"}]),
    "inline, blanks of its own": (
        answer(content="<think>\n  so:\n\n1\n</think>\n  a\n"),
        [Q, {"role": "assistant", "content": "  a\n", "reasoning_content": "  so:\n\n1"}],
    ),
    "inline, empty": (answer(content="<think></think>a"), [Q, A]),
    "inline, blank": (answer(content="<think>\n\n</think>\n\na"), [Q, A]),
    "inline, only its end": (answer(content="</think>a"), [Q, A]),
    "inline, no answer": (answer(content="<think>why</think>"), [Q, {"role": "assistant", "content": "", "reasoning_content": "why"}]),
    "inline, opened within": (
        answer(content="<think>say <think> here</think>a"),
        [Q, {**A, "reasoning_content": "say <think> here"}],
    ),
    "inline blank, and reasoning": (answer(content="<think>\n</think>a", reasoning_content="why"), [Q, {**A, "reasoning_content": "why"}]),
    "inline, and reasoning blank": (answer(content="<think>why</think>a", reasoning_content=" "), [Q, {**A, "reasoning_content": "why"}]),
    "inline, with calls": (
        calling(SEARCH_CALL) | answer(content="<think>why</think>", tool_calls=[SEARCH_CALL]),
        [Q, {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [SEARCH_CALL]}],
    ),
    "a think tag in the answer": (answer(content="the tag <think>"), [Q, {"role": "assistant", "content": "the tag <think>"}]),
    "think tags in the answer": (
        answer(content="write <think>x</think>, and again </think>"),
        [Q, {"role": "assistant", "content": "write <think>x</think>, and again </think>"}],
    ),
    "think tags after thinking": (
        answer(content="<think>why</think>use <think> and </think>"),
        [Q, {"role": "assistant", "content": "use <think> and </think>", "reasoning_content": "why"}],
    ),
    "think tags beside reasoning": (
        answer(content="use <think>", reasoning_content="<think>"),
        [Q, {"role": "assistant", "content": "use <think>", "reasoning_content": "<think>"}],
    ),
    "think tags by others": (
        {"messages": [{"role": role, "content": "<think>x</think>y"} for role in ["system", "user", "tool"]] + [A]},
        [*({"role": role, "content": "<think>x</think>y"} for role in ["system", "user", "tool"]), A],
    ),
    # tool calls
    "call without content": (answer(tool_calls=[SEARCH_CALL]), [Q, {"role": "assistant", "content": None, "tool_calls": [SEARCH_CALL]}]),
    "call with content": (
        answer(content="look", tool_calls=[{**SEARCH_CALL, "id": "c1", "index": 0}]),
        [Q, {"role": "assistant", "content": "look", "tool_calls": [{**SEARCH_CALL, "id": "c1"}]}],
    ),
    "calls, bare": (
        answer(tool_calls=[{"name": "search", "arguments": {"q": "é"}, "id": "c1"}, SEARCH_CALL]),
        [Q, {"role": "assistant", "content": None, "tool_calls": [{**SEARCH_CALL, "id": "c1"}, SEARCH_CALL]}],
    ),
    "calls as a JSON string": (
        answer(tool_calls=json.dumps([SEARCH_CALL])),
        [Q, {"role": "assistant", "content": None, "tool_calls": [SEARCH_CALL]}],
    ),
    "call, nulls": (
        answer(tool_calls=[{"id": None, "type": None, "name": None, "arguments": None, "function": SEARCH_CALL["function"]}]),
        [Q, {"role": "assistant", "content": None, "tool_calls": [SEARCH_CALL]}],
    ),
    "call without arguments": (
        answer(tool_calls=[{"name": "f", "parameters": None}]),
        [Q, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}],
    ),
    "an older function_call": (
        answer(content=None, function_call={"name": "search", "arguments": '{"q": "é"}'}, tool_calls=[]),
        [Q, {"role": "assistant", "content": None, "tool_calls": [SEARCH_CALL]}],
    ),
    "no calls": (answer(content="a", tool_calls=[], function_call=None), [Q, A]),
    "no calls, as a string": (asked(content="q", tool_calls=""), [Q, A]),
    # ShareGPT's turns
    "turns": ({"conversations": [turn("human", "q"), turn("gpt", "a")]}, [Q, A]),
    "turns by everyone": (
        {"conversations": [turn(name, name) for name in ["system", "user", "assistant", "chatgpt", "tool", "observation", "function_response"]]},
        [
            {"role": role, "content": name}
            for role, name in [
                ("system", "system"), ("user", "user"), ("assistant", "assistant"), ("assistant", "chatgpt"),
                ("tool", "tool"), ("tool", "observation"), ("tool", "function_response"),
            ]
        ],
    ),
    "turns, a call": (
        {"conversations": [turn("human", "q"), turn("function_call", '{"name": "search", "arguments": {"q": "é"}}')]},
        [Q, {"role": "assistant", "content": None, "tool_calls": [SEARCH_CALL]}],
    ),
    "turns, two calls": (
        {"conversations": [turn("human", "q"), turn("function_call", json.dumps([SEARCH_CALL["function"]] * 2))]},
        [Q, {"role": "assistant", "content": None, "tool_calls": [SEARCH_CALL] * 2}],
    ),
    "turns, thinking": ({"conversations": [turn("human", "q"), turn("gpt", "<think>why</think>a")]}, [Q, {**A, "reasoning_content": "why"}]),
    "turns, reasoning": ({"conversations": [turn("human", "q"), turn("gpt", "a", reasoning="why")]}, [Q, {**A, "reasoning_content": "why"}]),
    "turns, system beside": (
        {"conversations": [turn("human", "q"), turn("gpt", "a")], "system": "s"},
        [{"role": "system", "content": "s"}, Q, A],
    ),
    "turns in messages, system beside": ({"messages": [turn("gpt", "a")], "system": "s"}, [{"role": "system", "content": "s"}, A]),
    "turns, empty system beside": ({"conversations": [turn("human", "q"), turn("gpt", "a")], "system": ""}, [Q, A]),
    "turns, roles null": ({"conversations": [turn("human", "q", role=None, content=None), turn("gpt", "a")]}, [Q, A]),
    "turns in messages": ({"messages": [turn("human", "q"), turn("gpt", "a")]}, [Q, A]),
    "messages in conversations": ({"conversations": [{**Q, "from": None}, A]}, [Q, A]),
    # pairs
    "input and output": ({"input": "q", "output": "a"}, [Q, A]),
    "prompt and response": ({"prompt": "q", "response": "a"}, [Q, A]),
    "pair with system": ({"system": "s", "input": "q", "output": "a"}, [{"role": "system", "content": "s"}, Q, A]),
    "pair with thinking": ({"input": "q", "output": "<think>why</think>a"}, [Q, {**A, "reasoning_content": "why"}]),
    "pair after messages": (
        {"input": [{"role": "system", "content": "s"}, Q, A, Q], "output": "a"},
        [{"role": "system", "content": "s"}, Q, A, Q, A],
    ),
    "pair after turns": ({"prompt": [turn("human", "q")], "response": "a"}, [Q, A]),
    "a question that looks like messages": ({"input": "[1]", "output": "a"}, [{"role": "user", "content": "[1]"}, A]),
    "pair with an empty instruction": ({"instruction": "", "input": "q", "output": "a"}, [Q, A]),
    # which comes first
    "messages first": ({"messages": [Q, A], "conversations": [], "input": "x", "output": "y", "system": "s"}, [{"role": "system", "content": "s"}, Q, A]),
    "null messages": ({"messages": None, "conversations": [Q, A], "input": "x", "output": "y"}, [Q, A]),
}  # fmt: skip


@pytest.mark.parametrize(("record", "expected"), GOOD.values(), ids=GOOD)
def test_records_become_messages(record, expected):
    before = copy.deepcopy(record)
    assert messages_of(record) == expected
    assert record == before


def calling_text(arguments):
    call = f'{{"role": "assistant", "content": null, "tool_calls": [{{"name": "f", "arguments": {arguments}}}]}}'
    return f'{{"messages": [{call}]}}'


BAD = {
    "no record": ({}, "no_messages", "the fields with a value: none"),
    "another field": ({"text": "x", "meta": {}, "id": None}, "no_messages", "'text', 'meta'"),
    "half of a pair": ({"input": "x", "rejected": "y"}, "no_messages", "'input', 'rejected'"),
    "two questions": ({"prompt": "q", "query": "p", "response": "a"}, "no_messages", "query beside prompt and response is ambiguous"),
    "two answers": ({"prompt": "q", "response": "a", "output": "b"}, "no_messages", "output beside prompt and response"),
    "a history beside messages": ({"prompt": [Q, A, Q], "response": "a", "history": [["q", "a"]]}, "no_messages", "history"),
    "more beside messages": ({"instruction": [Q, A, Q], "output": "a", "input": "x"}, "no_messages", "input beside it"),
    "a context that is a list": ({"instruction": "q", "output": "a", "context": ["x"]}, "not_text", "context is an array"),
    "a preference": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "no_messages", "tokenmill rl"),
    "a bad answer": ({"prompt": "q", "completion": "a", "label": False}, "bad_loss_flag", "label is false"),
    "an image beside": ({"messages": [Q, A], "images": ["x.png"]}, "not_text", "it has images"),
    "an image in a message": ({"messages": [{**Q, "images": ["x.png"]}, A]}, "not_text", "it has images"),
    "ids in place of messages": ({"input_ids": [1, 2], "labels": [1, 2]}, "already_tokenized", "only tokenmill sft"),
    "two systems": ({"messages": [{"role": "system", "content": "s"}, Q, A], "system": "t"}, "two_systems", "keep one"),
    "two fields of systems": ({"prompt": "q", "response": "a", "system": "s", "system_prompt": "t"}, "two_systems", "system_prompt"),
    "tools in two places": ({"messages": [Q, A], "tools": [SEARCH], "functions": [{"name": "f"}]}, "bad_tools", "two places"),
    "reasoning in two fields": ({"problem": "q", "solution": "a", "reasoning": "x", "cot": "y"}, "reasoning_twice", "reasoning and cot"),
    "an unknown channel": ({"messages": [Q, {**A, "channel": "inner"}]}, "bad_message", "'inner'"),
    "two answers on a channel": ({"messages": [Q, {**A, "channel": "analysis"}, {**A, "channel": "analysis"}]}, "reasoning_twice", "join them"),
    "thoughts on a channel alone": ({"messages": [Q, {**A, "channel": "analysis"}]}, "no_content", "message 2"),
    "an unknown mask": ({"messages": [Q, {**A, "loss_mask": 0}]}, "bad_loss_flag", "loss_mask"),
    "a mask of tokens": ({"messages": [Q, {**A, "mask": [0, 1]}]}, "bad_loss_flag", "mask"),
    "a weight of the loss": ({"messages": [Q, {**A, "loss": 0.5}]}, "bad_loss_flag", "loss=0.5"),
    "a step of no known class": ({"content": [{"class_": "web_observation", "html": "x"}], "details": {}}, "not_text", "web_observation"),
    "a list of answers": ({"question": "q", "answer": ["a", "b"]}, "not_text", "answer is a list of 2 texts"),
    "no answers": ({"prompt": "q", "completion": []}, "not_text", "completion is a list of 0 texts"),
    "an event with arguments of text": ({"history": [{"action": "run", "source": "agent", "args": "x"}]}, "bad_message", "step 1 of 1"),
    "a step with calls of text": ({"agent": {}, "steps": [{"source": "agent", "message": "", "tool_calls": "x"}]}, "bad_message", "step 1 of 1"),
    "a step with an observation of text": ({"agent": {}, "steps": [{"source": "agent", "message": "", "observation": "x"}]}, "bad_message", "step 1 of 1"),
    "ids that are a number": ({"trajectory": [1], "history": [{"role": "tool", "message_type": "x", "tool_call_ids": 5}]}, "bad_message", "step 1 of 1"),
    "a recipient that is a list": ({"messages": [Q, {**A, "channel": "final", "recipient": ["x"]}]}, "bad_message", "message 2 of 2"),
    "tools that are a number": (
        {"messages": [{"role": "developer", "content": [{"type": "developer_content", "tools": 5}]}, {**A, "channel": "final"}]},
        "bad_message",
        "message 1 of 2",
    ),
    "a step that is text": ({"agent": {}, "steps": [{"source": "user", "message": "q"}, "x"]}, "bad_message", "step 2 of 2"),
    "no messages in it": ({"messages": []}, "no_messages", "messages is empty"),
    "no messages in a string": ({"messages": "[]"}, "no_messages", "messages is empty"),
    "messages in a broken string": ({"messages": "[{"}, "no_messages", "messages (a string): not JSON"),
    "messages of text": ({"messages": "hello"}, "no_messages", "not JSON"),
    "messages of null in a string": ({"messages": "null"}, "no_messages", "there is no messages"),
    "an object": ({"messages": {"role": "user"}}, "no_messages", "an object"),
    "a number": ({"conversations": 3}, "no_messages", "conversations is a number"),
    "a message of null": ({"messages": [Q, None]}, "bad_message", "message 2 of 2: it is null"),
    "a message of text": ({"messages": ["hi", A]}, "bad_message", "message 1 of 2: it is a string"),
    "a message of a list": ({"messages": [[], A]}, "bad_message", "it is an array"),
    "an id that is a number": (
        {"messages": [A, {"role": "tool", "content": "", "tool_call_id": 7}]}, "bad_message", "message 2 of 2 ('tool'): its tool_call_id is a number",
    ),
    "a name that is an object": (asked(content="q", name={}), "bad_message", "its name is an object"),
    "no role": ({"messages": [{"content": "x", "value": "y"}, A]}, "unknown_role", "'content', 'value'"),
    "null role": ({"messages": [{"role": None, "content": "x"}, A]}, "unknown_role", "neither role nor from"),
    "misspelt role": ({"messages": [Q, {"role": "assistent", "content": "x"}]}, "unknown_role", "did you mean 'assistant'?"),
    "an unknown speaker": ({"messages": [Q, {"role": "critic", "content": "x"}]}, "unknown_role", "'critic'"),
    "misspelt speaker": ({"conversations": [turn("humn", "q")]}, "unknown_role", "did you mean 'human'?"),
    "a role that is an object": ({"messages": [{"role": {}, "content": "x"}]}, "unknown_role", "its role is an object"),
    "a speaker that is a list": ({"messages": [turn(["gpt"], "x")]}, "unknown_role", "its role is an array"),
    "a long role": ({"messages": [{"role": "x" * 9999, "content": ""}]}, "unknown_role", "x" * 40),
    "null question": (asked(content=None), "no_content", "message 1 of 2 ('user')"),
    "absent question": (asked(body="q"), "no_content", "its keys: 'role', 'body'"),
    "null answer": (answer(content=None), "no_content", "message 2 of 2 ('assistant')"),
    "null answer with reasoning": (answer(content=None, reasoning_content="why"), "no_content", "message 2"),
    "null answer without calls": (answer(content=None, tool_calls=[]), "no_content", "message 2"),
    "null result": (result(None), "no_content", "message 3 of 3 ('tool')"),
    "null system": ({"messages": [{"role": "system", "content": None}, Q, A]}, "no_content", "message 1 of 3"),
    "null turn": ({"conversations": [turn("human", None), turn("gpt", "a")]}, "no_content", "message 1"),
    "a turn without calls": ({"conversations": [turn("human", "q"), turn("function_call", "[]")]}, "no_content", "message 2"),
    "a question that is a number": (asked(content=3), "not_text", "its content is a number"),
    "a question that is an object": (asked(content={"text": "q"}), "not_text", "an object"),
    "a question that is bytes": (asked(content=b"q"), "not_text", "bytes"),
    "an answer that is a boolean": (answer(content=True), "not_text", "a boolean"),
    "a turn that is an object": ({"conversations": [turn("human", {}), turn("gpt", "a")]}, "not_text", "an object"),
    "a pair that is numbers": ({"input": 1, "output": 2}, "not_text", "message 1 of 2 ('user')"),
    "a system that is a number": ({"system": 1, "input": "q", "output": "a"}, "not_text", "message 1 of 3 ('system')"),
    "an image": (asked(content=["see", {"type": "image_url", "image_url": {"url": "x"}}]), "not_text", "part 2 of its content has the type 'image_url'"),
    "an image from a tool": (result([{"type": "image_url", "image_url": {"url": "x"}}]), "not_text", "'image_url'"),
    "a part without a type": (asked(content=[{"type": None, "text": "q"}]), "not_text", "type null"),
    "a part without text": (asked(content=[{"type": "text", "text": None}]), "not_text", "the text of part 1 of its content is null"),
    "a part that is a number": (asked(content=["q", 4]), "not_text", "part 2 of its content is a number"),
    "a result that is a date": (result({"at": datetime(2025, 1, 1, tzinfo=UTC)}), "not_text", "datetime"),
    "a result that is no number": (result([math.nan]), "not_text", "Out of range float"),
    "a result without a floor": (result(orjson.loads("[" * 400 + "]" * 400)), "not_text", "Recursion"),
    "reasoning that is a number": (answer(content="a", reasoning_content=4), "bad_reasoning", "its reasoning_content is a number"),
    "reasoning that is a list": (answer(content="a", reasoning_content=["why"]), "bad_reasoning", "an array"),
    "a user's reasoning that is a list": (asked(content="q", reasoning_content=[]), "bad_reasoning", "an array"),
    "reasoning by the user": (asked(content="q", reasoning_content="why"), "reasoning_not_by_assistant", "message 1"),
    "variables that are no object": ({"messages": [Q, A], "chat_template_kwargs": ["x"]}, "bad_template_kwargs", "an array"),
    "variables that are cut": ({"conversations": [Q, A], "chat_template_kwargs": "{"}, "bad_template_kwargs", "a string"),
    "variables with messages": ({"messages": [Q, A], "chat_template_kwargs": {"messages": []}}, "bad_template_kwargs", "has messages"),
    "reasoning by a tool": ({"messages": [A, {"role": "tool", "content": "", "thinking": "why"}]}, "reasoning_not_by_assistant", "('tool')"),
    "reasoning, two of it": (answer(content="a", reasoning_content="x", reasoning="y"), "reasoning_twice", "different"),
    "reasoning and thinking": (answer(content="<think>y</think>a", reasoning_content="x"), "reasoning_twice", "keep one"),
    "reasoning and an end of thinking": (answer(content="y</think>a", thinking="x"), "reasoning_twice", "keep one"),
    "thinking again": (answer(content="<think>x</think>\n<think>y</think>a"), "reasoning_twice", "thinking follows its first"),
    "thinking ends again": (answer(content="<think>x</think>y</think>a"), "reasoning_twice", "thinking follows its first"),
    "no thinking, then thinking": (answer(content="<think></think><think>x</think>a"), "reasoning_twice", "again"),
    "characters of inline thinking": (
        answer(content="<think>x</think>a", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": True}]),
        "bad_loss_flag",
        "reasoning_content",
    ),
    "thinking cut short": (answer(content="<think>hmm"), "unclosed_think", "never closes it"),
    "thinking cut short, after blanks": (answer(content="\n <think>", reasoning_content="x"), "unclosed_think", ""),
    "calls in an object": (answer(content="", tool_calls={"name": "f"}), "bad_tool_calls", "its tool_calls is an object"),
    "calls in a broken string": (answer(content="", tool_calls="[}"), "bad_tool_calls", "not JSON"),
    "a call of null": (calling(SEARCH_CALL, None), "bad_tool_calls", "tool call 2 is null"),
    "a call of text": (calling("f()"), "bad_tool_calls", "tool call 1 is a string"),
    "a call of a text function": (calling({"function": "f"}), "bad_tool_calls", "the function of tool call 1 is a string"),
    "a call without a name": (calling({"function": {"arguments": {}}}), "bad_tool_calls", "its keys: 'arguments'"),
    "a call with an empty name": (calling({"name": ""}), "bad_tool_calls", "have a function name"),
    "a call with a number for a name": (calling({"name": 5}), "bad_tool_calls", "tool call 1's name is a number"),
    "a call with a number for an id": (calling({**SEARCH_CALL, "id": 5}), "bad_tool_calls", "tool call 1's id is a number"),
    "calls in two places": (answer(tool_calls=[SEARCH_CALL], function_call={"name": "f"}), "bad_tool_calls", "keep tool_calls"),
    "a call by the user": (asked(content="q", tool_calls=[SEARCH_CALL]), "bad_tool_calls", "only the assistant"),
    "an older call by a tool": ({"messages": [A, {"role": "tool", "content": "", "function_call": {"name": "f"}}]}, "bad_tool_calls", "only"),
    "a turn that calls in words": ({"conversations": [turn("function_call", "search é")]}, "bad_tool_calls", "a tool call"),
    "a turn that calls nothing": ({"conversations": [turn("function_call", None)]}, "bad_tool_calls", "null"),
    "arguments in a list": (calling({"name": "f", "arguments": [1]}), "bad_tool_arguments", "are an array"),
    "arguments in a list in a string": (calling({"name": "f", "arguments": "[1]"}), "bad_tool_arguments", "are an array"),
    "arguments in a string in a string": (calling({"name": "f", "arguments": '"{}"'}), "bad_tool_arguments", "are a string"),
    "arguments of null in a string": (calling({"name": "f", "arguments": "null"}), "bad_tool_arguments", "are null"),
    "arguments in words": (calling(SEARCH_CALL, {"name": "f", "arguments": "x=1"}), "bad_tool_arguments", "the arguments of tool call 2: not JSON"),
    "arguments of Python": (calling({"name": "f", "arguments": "{'a': 1}"}), "bad_tool_arguments", "not JSON"),
    "arguments with NaN": (calling({"name": "f", "arguments": '{"a": NaN}'}), "bad_tool_arguments", "not JSON"),
    "arguments that are no number": (calling({"name": "f", "arguments": {"a": math.inf}}), "bad_tool_arguments", "Out of range float"),
    "arguments without a floor": (calling({"name": "f", "arguments": '{"a":' * 400 + "1" + "}" * 400}), "bad_tool_arguments", "Recursion"),
    "arguments under another name": (calling({"name": "f", "parameters": {"a": 1}}), "bad_tool_arguments", "'parameters'; rename it"),
    "tools in an object": ({"messages": [Q, A], "tools": {"name": "f"}}, "bad_tools", "tools is an object"),
    "tools in words beside turns": ({"conversations": [turn("gpt", "a")], "tools": "search"}, "bad_tools", "not JSON"),
    "tools in words": ({"messages": [Q, A], "tools": "search"}, "bad_tools", "not JSON"),
    "tools that are blank": ({"messages": [Q, A], "tools": " "}, "bad_tools", "not JSON"),
    "tools that are false": ({"messages": [Q, A], "tools": False}, "bad_tools", "a boolean"),
    "a tool of text": ({"messages": [Q, A], "tools": [SEARCH, "f"]}, "bad_tools", "tool 2 of 2"),
    "a tool without a name": ({"messages": [Q, A], "tools": [{"type": "function", "function": {"name": None}}]}, "bad_tools", "tool 1 of 1"),
    "a tool with an empty name": ({"messages": [Q, A], "tools": [{"name": ""}]}, "bad_tools", "tool 1 of 1"),
    "a tool of nothing": ({"messages": [Q, A], "tools": [{}]}, "bad_tools", "tool 1 of 1"),
    "a tool of a text function": ({"messages": [Q, A], "tools": [{"function": "f", "name": "f"}]}, "bad_tools", "tool 1"),
    "a tool with a date": ({"messages": [Q, A], "tools": [{"name": "f", "at": datetime(2025, 1, 1, tzinfo=UTC)}]}, "bad_tools", "datetime"),
    "arguments with a key twice": (loads(calling_text('{"a": 1, "a": 2}')), "bad_message", "the key 'a' occurs twice"),
    "arguments with a key twice deep in JSON text": (calling({"name": "f", "arguments": '{"x": [{"a": 1, "a": 1}]}'}), "bad_tool_arguments", "the key 'a' occurs twice"),
    "arguments beyond a double": (calling({"name": "f", "arguments": '{"a": 1e400}'}), "bad_tool_arguments", "1e400 is valid JSON, but no double holds it"),
    "a tool with a key twice": (loads('{"messages": [{"role": "assistant", "content": "a"}], "tools": [{"name": "f", "name": "g"}]}'), "bad_tools", "'name' occurs twice"),
    "a message with two contents": (loads('{"messages": [{"role": "assistant", "content": "a", "content": "b"}]}'), "bad_message", "'content' occurs twice"),
    "a call with two names": (loads('{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"name": "f", "name": "g"}]}]}'), "bad_message", "'name' occurs twice"),
    "a flag of loss in words": ({"messages": [Q, {**A, "train": "no"}]}, "bad_loss_flag", "train='no'"),
    "nobody answers": ({"messages": [Q, {"role": "tool", "content": "r"}]}, "no_assistant", "none of its 2 messages"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "reason", "words"), BAD.values(), ids=BAD)
def test_rejected_rows_have_reasons(record, reason, words):
    before = repr(record)
    found = read(record)
    assert isinstance(found, Rejected), found
    assert found.reason == reason
    assert words in found.detail
    assert len(found.detail) < 400
    assert repr(record) == before


SURROGATES = {
    "question": asked(content=HALF),
    "answer": answer(content=HALF),
    "answer with thinking": answer(content="<think>x</think>" + HALF),
    "part": asked(content=[HALF]),
    "reasoning": answer(content="a", reasoning_content=HALF),
    "result": result(HALF),
    "data from a tool": result({"a": [HALF]}),
    "keys from a tool": result({HALF: 1}),
    "id of a result": {"messages": [A, {"role": "tool", "content": "", "tool_call_id": HALF}]},
    "name": asked(content="q", name=HALF),
    "called function": calling({"name": HALF}),
    "id of a call": calling({"name": "f", "id": HALF}),
    "arguments": calling({"name": "f", "arguments": {"a": HALF}}),
    "arguments in a string": calling({"name": "f", "arguments": json.dumps({"a": HALF}, ensure_ascii=False)}),
    "arguments in a string, escaped": calling({"name": "f", "arguments": '{"a": "\\ud83d"}'}),
    "tools": {"messages": [Q, A], "tools": [{"name": "f", "description": HALF}]},
    "tools in a string, escaped": {"messages": [Q, A], "tools": '[{"name": "\\ud83d"}]'},
    "messages in a string, escaped": {"messages": json.dumps([Q, {**A, "content": HALF}])},
    "turn": {"conversations": [turn("gpt", HALF)]},
    "pair": {"input": "q", "output": HALF},
}


@pytest.mark.parametrize("record", SURROGATES.values(), ids=SURROGATES)
def test_lone_surrogates_are_rejected_anywhere(record):
    found = read(record)
    assert isinstance(found, Rejected), found
    assert found.reason == "lone_surrogate"
    assert "U+FFFD" in found.detail
    found.detail.encode()


def test_every_reason_is_tried():
    assert {reason for _, reason, _ in BAD.values()} | {"lone_surrogate"} == set(get_args(Reason))


@pytest.mark.parametrize(
    ("given", "expected", "text"),
    [
        ({"b": 1, "a": "é"}, {"b": 1, "a": "é"}, '{"b": 1, "a": "é"}'),
        ('{ "a":1,"é":"\\u00e9" }', {"a": 1, "é": "é"}, '{ "a":1,"é":"\\u00e9" }'),
        ({}, {}, "{}"),
        ("{}", {}, "{}"),
        ("", {}, "{}"),
        (None, {}, "{}"),
        ({"a": None}, {"a": None}, '{"a": null}'),
        ('{"id": 123456789012345678901234567890}', {"id": 123456789012345678901234567890}, '{"id": 123456789012345678901234567890}'),
    ],
)  # fmt: skip
def test_arguments_as_object_and_as_text(given, expected, text):
    for call in ({"name": "f", "arguments": given}, {"function": {"name": "f", "arguments": given}}):
        (made,) = messages_of(calling(call))[1]["tool_calls"]
        arguments = made["function"]["arguments"]
        assert type(arguments) is Arguments
        assert arguments == expected
        assert list(arguments) == list(expected)
        assert arguments.text == text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, []),
        ("", []),
        ([], []),
        ("[]", []),
        ("null", []),
        ([SEARCH], [SEARCH]),
        ([SEARCH["function"], SEARCH], [SEARCH["function"], SEARCH]),
        (json.dumps([SEARCH]), [SEARCH]),
        ([{"name": "f", "function": None, "strict": None}], [{"name": "f", "function": None, "strict": None}]),
    ],
)
def test_tools_are_kept_as_given(given, expected):
    found = read({"messages": [Q, A], "tools": given})
    assert isinstance(found, Conversation), found
    assert found.tools == expected


@pytest.mark.parametrize(
    ("record", "messages_field", "tools_field", "tools"),
    [
        ({"chat": [Q, A]}, "chat", "tools", []),
        ({"chat": [turn("human", "q"), turn("gpt", "a")], "messages": 3}, "chat", "tools", []),
        ({"data": {"chat": json.dumps([Q, A])}, "tools": [SEARCH]}, "data.chat", "tools", [SEARCH]),
        ({"chat": [Q, A], "tools": 5, "data": {"functions": [SEARCH]}}, "chat", "data.functions", [SEARCH]),
        ({"chat": [Q, A], "data": None}, "chat", "data.functions", []),
        ({"messages": [Q, A], "functions": [SEARCH]}, None, "functions", [SEARCH]),
    ],
)
def test_fields_are_the_ones_that_are_named(record, messages_field, tools_field, tools):
    found = read(record, messages_field, tools_field)
    assert isinstance(found, Conversation), found
    assert (found.messages, found.tools) == ([Q, A], tools)


@pytest.mark.parametrize(
    ("record", "messages_field", "tools_field", "reason", "words"),
    [
        ({"messages": [Q, A]}, "chat", "tools", "no_messages", "there is no chat; the fields with a value: 'messages'"),
        ({"input": "q", "output": "a"}, "messages", "tools", "no_messages", "there is no messages"),
        ({"data": {}}, "data.chat", "tools", "no_messages", "there is no data.chat"),
        ({"data": "x"}, "data.chat", "tools", "no_messages", "needs an object at chat, but finds a string"),
        ({"messages": [Q, A], "data": [1]}, None, "data.tools", "bad_tools", "an object at tools, but finds an array"),
    ],
)
def test_a_named_field_that_is_not_there_is_named(record, messages_field, tools_field, reason, words):
    found = read(record, messages_field, tools_field)
    assert isinstance(found, Rejected), found
    assert found.reason == reason
    assert words in found.detail


@pytest.mark.parametrize("messages_field", [None, "messages", "conversations"])
def test_the_fields_that_are_read_are_those_that_count(messages_field):
    announced = fields_read(messages_field, "tools")
    counted = set()
    for record in [record for record, *_ in [*GOOD.values(), *BAD.values()]]:
        found = verdict(record, messages_field)
        assert verdict({key: record[key] for key in announced if key in record}, messages_field) == found
        counted |= {key for key in record if verdict({**record, key: None}, messages_field) != found}
    assert counted <= set(announced)


def verdict(record, messages_field):
    found = read(record, messages_field)
    return found.reason if isinstance(found, Rejected) else found


# --- what holds for every record

texts = st.text(st.characters() | st.sampled_from("<>/ \n"), max_size=6) | st.sampled_from(
    ["<think>", "</think>", "x</think>y", "<think>x</think>y", "<think>x</think><think>", "", " ", HALF, "[]", '{"name": "f"}']
)  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def mostly(likely):
    """What is likely to stand somewhere, and now and then null, or anything at all."""
    return st.integers(0, 9).flatmap(lambda lot: likely if lot < 8 else st.none() | anything)


def keyed(**fields):
    return st.fixed_dictionaries({}, optional={name: mostly(likely) for name, likely in fields.items()})


functions = keyed(name=st.just("f"), arguments=st.sampled_from(['{"a": 1}', "{}", ""]) | st.dictionaries(texts, texts))
calls = st.lists(st.fixed_dictionaries({"function": functions}, optional={"id": texts}) | functions, max_size=2)
written = texts | st.lists(texts | st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2)
likely_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "assistant", "tool"]), "content": mostly(written)},
    optional={
        "reasoning_content": mostly(texts),
        "thinking": mostly(texts),
        "tool_calls": mostly(calls),
        "function_call": mostly(functions),
        "tool_call_id": mostly(texts),
        "name": mostly(texts),
    },
)
likely_turns = st.fixed_dictionaries(
    {"from": st.sampled_from(["human", "gpt", "tool", "function_call", "system"]), "value": mostly(texts)}
)
some_messages = st.lists(likely_messages | likely_turns, min_size=1, max_size=3)
beside = {"tools": st.just([SEARCH]) | st.just("[]"), "system": texts}
records = st.one_of(
    *(
        st.fixed_dictionaries({field: mostly(some_messages)}, optional=beside)
        for field in ["messages", "conversations"]
    ),
    *(
        st.fixed_dictionaries({question: texts | some_messages, answer: mostly(texts)}, optional=beside)
        for question, answer in [("input", "output"), ("prompt", "response")]
    ),
    keyed(messages=some_messages, conversations=some_messages, input=texts, output=texts, instruction=texts),
)


def check_message(message):
    """The promises of Message."""
    assert set(message) <= {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"}
    assert message["role"] in {"system", "developer", "user", "assistant", "tool"}
    assert isinstance(message["content"], str) or message.get("tool_calls")
    if message["role"] != "assistant":
        assert not {"reasoning_content", "tool_calls"} & set(message)
    if message["role"] != "tool":
        assert "tool_call_id" not in message
    assert all(message[key] for key in set(message) - {"content"})
    assert message.get("reasoning_content", "x").strip()
    for call in message.get("tool_calls", []):
        assert set(call) - {"id"} == {"type", "function"}
        assert call["type"] == "function"
        assert call["function"]["name"]
        assert json.loads(call["function"]["arguments"].text) == call["function"]["arguments"]
    orjson.dumps(message)  # JSON to the last character


@given(st.dictionaries(texts, anything, max_size=4) | records)
@max_examples(400)
def test_any_record_is_converted_or_rejected_and_unchanged(record):
    before = repr(record)
    found = read(record)
    assert repr(record) == before
    if isinstance(found, Rejected):
        assert found.reason in get_args(Reason)
        found.detail.encode()
        return
    assert any(message["role"] == "assistant" for message in found.messages)
    for message in found.messages:
        check_message(message)


def openai_form(found):
    """A conversation as a record in OpenAI's form."""
    record = {"messages": copy.deepcopy(found.messages), "tools": found.tools}
    for message in record["messages"]:
        for call in message.get("tool_calls", []):
            call["function"] = {"name": call["function"]["name"], "arguments": call["function"]["arguments"].text}
    return record


def all_read(record):
    """The conversation in a record, regardless of fields that aren't read."""
    return replace(read(record), unread=())


examples = st.sampled_from(sorted(GOOD)).map(lambda name: all_read(GOOD[name][0]))

spoken = st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "x", "é"]), max_size=6).map("".join)
answers = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": spoken | st.lists(spoken, max_size=3)},
    optional={
        "reasoning": spoken,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"name": st.just("f")}, optional={"arguments": st.sampled_from(['{"a":1}', "", {"é": None}])}),
            max_size=2,
        ),
    },
)  # fmt: skip


@given(st.lists(answers, min_size=1, max_size=2).map(lambda messages: read({"messages": messages})) | examples)
@max_examples(300)
def test_a_conversation_is_its_own_openai_form(found):
    if isinstance(found, Rejected):
        return
    again = read(openai_form(found))
    assert again == found
    assert openai_form(again) == openai_form(found)  # arguments to the letter


@given(examples, st.data())
@max_examples(100)
def test_nulls_equal_absent_values(found, data):
    record = openai_form(found)

    def nulled(fields, names):
        absent = data.draw(st.sets(st.sampled_from(names)))
        return {**{name: None for name in absent if name not in fields}, **fields}

    for message in record["messages"]:
        for call in message.get("tool_calls", []):
            call["function"] = nulled(call["function"], ["description", "strict"])
        if "tool_calls" in message:
            message["tool_calls"] = [nulled(call, ["id", "name", "arguments"]) for call in message["tool_calls"]]
    keys = ["content", "reasoning_content", "reasoning", "thinking", "tool_calls"]
    keys += ["function_call", "name", "from", "value"]
    record["messages"] = [nulled(message, keys) for message in record["messages"]]
    assert read(nulled(record, ["conversations", "input", "output", "prompt", "response", "system"])) == found


lines = st.text(st.sampled_from("ab \n"), max_size=6)


@given(lines, lines, st.sampled_from(["", "<think>", "\n<think>", " <think>\n"]))
def test_inline_thinking_is_split_as_chat_templates_split_it(thoughts, rest, opening):
    content = f"{opening}{thoughts}</think>{rest}"
    # What Qwen 3's own template does with a content that holds `</think>`.
    before, _, after = content.partition("</think>")
    reasoning = before.rstrip("\n").rpartition("<think>")[2].lstrip("\n")
    expected = {"role": "assistant", "content": after.lstrip("\n")}
    if reasoning.strip():
        expected["reasoning_content"] = reasoning
    assert messages_of(answer(content=content)) == [Q, expected]


PIECES = st.one_of(
    st.none(),
    st.integers(),
    st.sampled_from(["", " ", "a", "<think>", "</think>", "<think>a</think>b", HALF, "\n", "é"]),
)


@given(
    st.sampled_from(["user", "assistant", "function", "nobody"]),
    PIECES,
    st.dictionaries(st.sampled_from(["reasoning_content", "reasoning", "name"]), PIECES),
)
def test_a_message_that_takes_a_fast_path_is_read_as_by_the_full_one(role, content, more):
    def result(read_one):
        try:
            return list(read_one({"role": role, "content": content, **more}).items())
        except RejectionError as error:
            return error.reason, error.detail

    assert result(messages.read_message) == result(messages._read_any)  # noqa: SLF001 - the reference
