"""What a conversation is rendered to is what transformers renders of its row, or the row is counted."""

import csv
import itertools
import json
import random
import re
from collections import Counter
from importlib.metadata import distribution
from pathlib import Path

import pytest
from tokenmill.tasks.chat.check import BUNDLED, renderer_of
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.encoding import Filled
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.programs import Programs
from tokenmill.tasks.chat.template import ChatTemplate
from tokenmill.tasks.pack.formats import ChatRows

from tests.peers.templates.packages import Template
from tests.peers.templates.table import TABLE, TEXTS
from tests.peers.templates.talks import talks
from tests.peers.templates.trial import Trial, base, flags_of

TRL = Path(str(distribution("trl").locate_file("trl/chat_templates")))
TEMPLATES = {path.stem: path.read_text("utf-8") for path in sorted([*TRL.glob("*.jinja"), *BUNDLED.glob("*.jinja")])}

PUBLISHED = {row["template"]: row for row in csv.DictReader(TABLE.open())}
FAMILIES = [
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "gemma4_v5", "glm4moe", "gptoss", "lfm2",
    "lfm2_2_5", "llama3", "llama3_1", "llama3_2", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "phi3",
    "nemotron_3_ultra", "qwen2_5", "qwen2_5_vl", "qwen3", "qwen3_5_think", "qwen3_8", "nano3", "lightning35",
    "cohere2_training", "qwen3_training", "glm4moe_training", "gemma3_training",
]  # fmt: skip


@pytest.fixture(scope="module")
def rows_of():
    """`rows_of(name)`: the reader of rows for a template, and transformers' of the same."""
    definition, made = base(["what is it about"] * 50), {}

    def of(name):
        if name not in made:
            trial = Trial(Template(name, TEMPLATES[name]), definition, {})
            template = ChatTemplate(trial.source, trial.variables)
            renderer = renderer_of(template, trial.vocabulary, LossPolicy(), "auto", "literal")
            rows = ChatRows(trial.vocabulary, "auto", Programs(renderer), "literal", None, "tools")
            made[name] = rows, trial.reference
        return made[name]

    return of


def written(rows, row):
    """The texts of the sequences of a row, or the reason that it has none."""
    found = rows.read(row)
    found = found if isinstance(found, Rejected) else rows.sequences(found)
    if isinstance(found, Rejected):
        return found.reason
    names = {number: token for token, number in rows.maker.renderer.controls.ids.items()}
    given = [each.segments() if isinstance(each, Filled) else each for each in found]
    return ["".join(names[piece.token] if piece.text is None else piece.text for piece in pieces) for pieces in given]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_masks_and_ids_of_families(name, tmp_path):
    """The judges are words that only one message has, the tokenizer, and the generation prompts of transformers."""
    found = Trial(Template(name, TEMPLATES[name]), base(TEXTS), talks()).run(str(tmp_path))
    assert found.accepted, found.reason
    assert (found.wrong, found.ids, found.unended, found.untrue) == ({}, {}, {}, "")
    listed = PUBLISHED.get(f"trl:trl/chat_templates/{name}.jinja", {"right": "47", "by words": "0", "refused": "0"})
    assert {kind: str(found.counts[kind]) for kind in ("right", "by words", "refused")}.items() <= listed.items()


SPELLED = {
    "clean": "<think>\nTHINK\n</think>\n\nA1",
    "on one line": "<think>THINK</think>A1",
    "no opening tag": "THINK\n</think>\n\nA1",
    "an answer about a tag": "The tag </think> closes reasoning.",
    "both tags in an answer": "Write <think> and then </think> here.",
    "an empty thought": "<think>\n\n</think>\n\nA1",
}
LEFT_IN = ("qwen2_5", "qwen3_instruct_2507", "llama3_2", "gemma", "phi3", "lfm2", "cohere")
READ_APART = ("qwen3", "qwen3_5_think", "glm4moe")
OPENED = ("lfm2_2_5", "gptoss", "nemotron_3_nano", "gemma4_v5", "qwen3_8", "nano3")


TAKEN = {
    *((name, title) for name in ("nemotron_3_nano", "nano3") for title in list(SPELLED)[2:5]),
    *((name, title) for name in READ_APART for title in list(SPELLED)[3:5]),
}
"""Where a template would take a tag in an answer for its own, and lose a part of it or write it without its prompt."""


@pytest.mark.slow
@pytest.mark.parametrize("title", SPELLED)
@pytest.mark.parametrize("name", [*LEFT_IN, *READ_APART, *OPENED])
def test_inline_thinking(rows_of, name, title):
    rows, reference = rows_of(name)
    content = SPELLED[title]
    question, answer = {"role": "user", "content": "U1"}, {"role": "assistant", "content": content}
    found = written(rows, {"messages": [question, answer]})
    if (name, title) in TAKEN:
        assert found == "thinking_in_answer"
        return
    if name in OPENED and content.startswith("<think>"):
        thoughts, _, rest = content.removeprefix("<think>").partition("</think>")
        reasoning = {"reasoning_content": thoughts.strip()} if thoughts.strip() else {}
        answer = {"role": "assistant", "content": rest.lstrip(), **reasoning}
    stop = "<|user|>" if name == "glm4moe" else ""
    assert found == [reference.render([question, answer], None) + stop]
    assert all(word in found[0] for word in re.findall(r"\w{3,}", content) if word != "think")


SAYS = {"role": "assistant", "content": "A1"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
F = {"type": "function", "function": {"name": "f", "description": "TOOL", "parameters": {}}}
U1 = {"role": "user", "content": "U1"}
UNWRITTEN = [
    ("qwen3", {"messages": [{"role": "developer", "content": "DEV"}, U1, SAYS]}, ["developer messages"]),
    ("nano3", {"messages": [{"role": "developer", "content": "DEV"}, U1, SAYS]}, []),
    ("phi3", {"messages": [U1, SAYS], "tools": [F]}, ["tools"]),
    ("qwen3", {"messages": [U1, SAYS], "tools": [F]}, []),
    ("qwen2_5", {"messages": [U1, {**SAYS, "reasoning_content": "WHY"}]}, ["reasoning"]),
    ("deepseekv3", {"messages": [U1, {**SAYS, "content": "<think>\nWHY\n</think>\n\nA1"}]}, ["reasoning"]),
    ("qwen2_5", {"messages": [U1, {**SAYS, "content": "<think>\nWHY\n</think>\n\nA1"}]}, []),
    ("qwen3", {"messages": [U1, CALLS]}, ["definitions of called tools"]),
    ("qwen3", {"messages": [U1, CALLS], "tools": [F["function"]]}, []),
    ("qwen3", {"messages": [{"role": "user", "content": " -\n"}, SAYS]}, ["questions"]),
    ("qwen3", {"messages": [U1, SAYS, {"role": "user", "content": ""}, SAYS]}, ["questions"]),
    ("qwen3", {"messages": [U1, SAYS, {"role": "user", "content": "..."}, SAYS]}, []),
]


@pytest.mark.parametrize(("name", "row", "expected"), UNWRITTEN)
def test_unwritten_parts_are_counted(rows_of, name, row, expected):
    rows, reference = rows_of(name)
    found = rows.read(row)
    assert [each.partition(" that the template")[0].partition(",")[0] for each in rows.unread(found)] == expected
    text = reference.render(row["messages"], row.get("tools"))
    assert written(rows, row) == [text]
    for kind, word in (("developer", "DEV"), ("tools", "TOOL"), ("reasoning", "WHY")):
        assert word not in str(row) or (word not in text) == any(each.startswith(kind) for each in expected)


THINKS = {**SAYS, "reasoning_content": "WHY"}
TALK = [U1, THINKS, U1, THINKS]
KWARGS = [
    ("qwen3", [U1, SAYS], {"enable_thinking": False}, []),
    ("lightning35", [U1, SAYS], {"medium_effort": True}, []),
    ("lightning35", TALK, {"truncate_history_thinking": False}, []),
    ("nemotron_3_nano", TALK, {"truncate_history_thinking": False}, []),
    ("lightning35", [U1, SAYS], '{"medium_effort": true, "enable_thinking": null}', []),
    ("qwen2_5", [U1, SAYS], {"medium_effort": True}, ["chat_template_kwargs.medium_effort"]),
    ("llama3_2", [U1, SAYS], {"date_string": "26 Nov 2026"}, []),
]


@pytest.mark.parametrize(("name", "messages", "kwargs", "unread"), KWARGS)
def test_variables_of_rows(rows_of, name, messages, kwargs, unread):
    rows, reference = rows_of(name)
    row = {"messages": messages, "chat_template_kwargs": kwargs}
    given = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
    given = {key: value for key, value in given.items() if value is not None}
    assert written(rows, row) == [reference.render(messages, None, **given)]
    assert rows.unread(rows.read(row)) == unread


def trained(rows, row):
    """The characters that are trained on, of each sequence."""
    found, names = (
        rows.sequences(rows.read(row)),
        {number: token for token, number in rows.maker.renderer.controls.ids.items()},
    )
    assert not isinstance(found, Rejected), found
    given = [each.segments() if isinstance(each, Filled) else each for each in found]
    texts = [[names[piece.token] if piece.text is None else piece.text for piece in pieces] for pieces in given]
    flags = [[flags_of(*pair) for pair in zip(*each, strict=True)] for each in zip(given, texts, strict=True)]
    return [
        "".join(char for char, flag in zip("".join(text), itertools.chain(*each), strict=True) if flag)
        for text, each in zip(texts, flags, strict=True)
    ]


CALL = {**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
RESULT = {"role": "tool", "content": "R1", "name": "f"}
LLAMA_CALL = '{"name": "f", "parameters": {"x": 1}}<|eot_id|>'
RETURN, GPTOSS = "<|return|>", "<|channel|>final<|message|>A1"
TRAINED = [
    ("glm4moe", [U1, SAYS], "\n<think></think>\nA1<|user|>"),
    ("glm4moe", [U1, THINKS, U1, THINKS], ["\n<think>WHY</think>\nA1<|user|>"] * 2),
    ("glm4moe", [U1, CALL], "\n<think></think>\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"),
    ("llama3_1", [U1, CALL, RESULT, SAYS], LLAMA_CALL + "A1<|eot_id|>"),
    ("llama3_2", [U1, CALL], LLAMA_CALL),
    ("gptoss", [U1, SAYS, U1, SAYS], GPTOSS + GPTOSS + RETURN),
    ("gptoss", [U1, CALL, RESULT, SAYS], ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>' + GPTOSS + RETURN),
]  # fmt: skip


@pytest.mark.parametrize(("name", "messages", "expected"), TRAINED)
def test_ends_of_turns_and_calls_by_index(rows_of, name, messages, expected):
    rows, _ = rows_of(name)
    row = {"messages": messages, "tools": [F]}
    assert trained(rows, row) == ([expected] if isinstance(expected, str) else expected)


def test_calls_of_which_one_is_excluded(rows_of):
    two = {**CALL, "tool_calls": [*CALL["tool_calls"], {"function": {"name": "g", "arguments": {}}}]}
    assert written(rows_of("gptoss")[0], {"messages": [U1, two], "tools": [F]}) == "tool_calls_left_out"


@pytest.mark.parametrize(
    "call", ["[{{ call.id }}:{{ call.function.arguments|tojson }}]", "{{ (call.function|tojson)[:-1] }}}"]
)
def test_calls_that_are_written_by_id_or_in_pieces(rows_of, monkeypatch, call):
    head = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    calls = "{% for call in m.tool_calls or [] %}" + call + "{% endfor %}<|im_end|>\n{% endfor %}"
    monkeypatch.setitem(
        TEMPLATES, call, head + calls + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    functions = [{"name": "get", "arguments": {"place": place}} for place in ("here", "there")]
    two = {**CALLS, "tool_calls": [{"id": f"call_{n}", "function": each} for n, each in enumerate(functions)]}
    (text,) = trained(rows_of(call)[0], {"messages": [U1, two], "tools": [F]})
    assert '"here"' in text
    assert '"there"' in text


def separate(message):
    """The message with the thinking that begins its content as `reasoning_content`."""
    content = message["content"].lstrip()
    thoughts, closed, answer = content.partition("</think>")
    if message["role"] != "assistant" or not closed or not content.startswith("<think>"):
        return message
    reasoning = thoughts.removeprefix("<think>").strip("\n")
    thought = {"reasoning_content": reasoning} if reasoning.strip() else {}
    return {**message, "content": answer.lstrip("\n"), **thought}


def generated(chance):
    """A row with some of: a system prompt, inline thinking, reasoning, variables of its own; and its messages."""
    word = lambda: f"w{chance.randrange(1000)}"  # noqa: E731
    thoughts = [
        lambda: f"<think>\n{word()}\n</think>\n\n{word()}", lambda: f"<think>{word()}</think>{word()}",
        lambda: f"{word()}\n</think>\n\n{word()}", lambda: f"The tag </think> closes {word()}.",
        lambda: f"Write <think> {word()} </think> here.", lambda: f"<think>\n\n</think>\n\n{word()}",
        lambda: f" <think>{word()}\n\n{word()}</think>\n{word()}\n", word, word, word, word,
    ]  # fmt: skip
    messages = [{"role": "system", "content": word()}] if chance.random() < 0.3 else []
    for _ in range(chance.choice([1, 1, 2, 3])):
        messages += [{"role": "user", "content": word()}, {"role": "assistant", "content": chance.choice(thoughts)()}]
    kwargs = [
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"medium_effort": True},
        {"truncate_history_thinking": False},
    ]
    apart = len(messages) % 2 and chance.random() < 0.5
    row = {"system": messages[0]["content"], "messages": messages[1:]} if apart else {"messages": messages}
    return row | {"chat_template_kwargs": chance.choice([{}, {}, {}, *kwargs])}, messages


@pytest.mark.parametrize(
    "templates",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(None, marks=[pytest.mark.weekly, pytest.mark.timeout(7200)]),
    ],
)
def test_two_thousand_rows(rows_of, templates):
    """Each row under some of the templates, or under all."""
    chance, counted, same = random.Random(36), Counter(), Counter()
    names = [name for name in TEMPLATES if not name.startswith(("idefics3", "llava_next", "smolvlm"))]
    rows = [generated(chance) for _ in range(2000)]
    for turn, place in itertools.product(range(templates or len(names)), range(2000)):
        name = names[turn if templates is None else (place + turn * 17) % len(names)]
        reader, reference = rows_of(name)
        (row, given), kwargs = rows[place], rows[place][0]["chat_template_kwargs"]
        found = written(reader, row)
        if isinstance(found, str):
            counted[found] += 1
            continue
        stop = "<|user|>" if name == "glm4moe" else ""
        stops = [number for number, message in enumerate(given, 1) if message["role"] == "assistant"]
        for text, size in zip(found, stops if len(found) > 1 else stops[-1:], strict=True):
            forms = given[:size], [separate(message) for message in given[:size]]
            texts = [f"{reference.render(form, None, **kwargs)}{stop}" for form in forms]
            assert text in texts, (name, row)
            same[name] += 1
    assert set(counted) <= {"thinking_in_answer", "content_left_out", "template_error", "no_generation_prompt"}
    assert same.keys() == set(names)
    assert counted.total() < same.total() / 3
