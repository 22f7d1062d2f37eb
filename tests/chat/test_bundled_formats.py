"""The bundled formats of Nemotron 3 Nano and of 3.5 Lightning and 3 Ultra, against the models' own templates, which `trl` ships.

Its training variants there mark whole answers; a server that generates after the prompt has written the tag that opens
reasoning already, so here the answer begins behind it. «…» is what an assistant generates.
"""

import hashlib
import itertools
import re
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from tests.examples import max_examples
from tests.peers import chat_templates
from tests.peers.conversations import CONVERSATIONS, assistant, call, developer, system, thinking, tool, user

BUNDLED = Path(__file__).parents[2] / "blends" / "templates"
OURS = {name: (BUNDLED / f"{name}.jinja").read_text("utf-8") for name in ("nano3", "lightning35")}
MODELS = {"nano3": "nemotron_3_nano", "lightning35": "nemotron_3_ultra"}
THEIRS = {name: chat_templates.template(model) for name, model in MODELS.items()}
MARKED = {name: chat_templates.template(f"{model}_training") for name, model in MODELS.items()}
FLAGS = ("truncate_history_thinking", "enable_thinking", "add_generation_prompt", "medium_effort")
PROMPT = re.compile(r"<think>\n|<think></think>")
CALL_AFTER_TAG = re.compile(r"(<think>\n|<think></think>)\n*<tool_call>")
"""A lone tag that a content brought along, with calls on the next line: it looks like a prompt and is none."""

HI = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
BYE = "<|im_start|>user\nBye<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
F = call("f")
WRITTEN_F = "<tool_call>\n<function=f>\n</function>\n</tool_call>\n"

every_format = pytest.mark.parametrize("name", OURS)


def render(template, messages, tools=None, **options):
    (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template, **options)
    return text


def spans_of(template, messages, **options):
    """The text, and which of it stands in `generation` tags."""
    (text,), (spans,) = render_jinja_template(
        [messages], chat_template=template, return_assistant_tokens_mask=True, **options
    )
    return text, spans


def marked(messages, **options):
    """The text of nano3 with «…» around what stands in `generation` tags."""
    text, spans = spans_of(OURS["nano3"], messages, **options)
    for start, end in reversed(spans):
        text = f"{text[:start]}«{text[start:end]}»{text[end:]}"
    return text


def instructions(template):
    """What a template says about calls, which a user's tokenizer brings along."""
    text = render(template, [user("Hi")], [{"name": "f"}])
    return text[text.index("</tools>") + len("</tools>") : text.index("<|im_end|>")]


THEIR_INSTRUCTIONS = {name: instructions(template) for name, template in THEIRS.items()}


def check(name, messages, tools=None):
    for values in itertools.product([True, False], repeat=len(FLAGS)):
        options = dict(zip(FLAGS, values, strict=True))
        ours = render(OURS[name], messages, tools, tool_instructions=THEIR_INSTRUCTIONS[name], **options)
        assert ours == render(THEIRS[name], messages, tools, **options)


def test_theirs_is_the_template_of_the_published_recipe():
    """The digest of `src/nemotron/data_prep/templates/lightning35.jinja` in NVIDIA-NeMo/Nemotron at e27b3713."""
    digest = hashlib.sha256(THEIRS["lightning35"].encode()).hexdigest()
    assert digest == "82753bef5cedc4932c1ed509b5c9a12be680fd86d1adb65bc3f7398d11c8eebc"


@every_format
@pytest.mark.parametrize("title", CONVERSATIONS)
def test_the_models_own_template_writes_the_same(name, title):
    check(name, CONVERSATIONS[title]["messages"], CONVERSATIONS[title].get("tools"))


EDGES = {
    "arguments of every type": [assistant("", call("g", a=[1, "é<'\""], b={"k": None}, c=None, d=True, e=1.5, f="", g="x\ny"))],
    "no calls in a list of none": [assistant("Yo") | {"tool_calls": []}],
    "several calls": [thinking("Look.", "Wait. ", F, F), tool("1"), tool("2"), thinking("One.", "1")],
    "results before anything else": [tool("1"), tool("2"), user("Bye"), tool("3")],
}  # fmt: skip


@every_format
@pytest.mark.parametrize("messages", EDGES.values(), ids=EDGES)
def test_the_models_own_template_writes_odd_messages_the_same(name, messages):
    for before in ([user("Hi")], [system("Be brief.")]):
        check(name, [*before, *messages])
        check(name, [*before, *messages, user("Bye")])


TOOLS = [
    {"name": "f"},
    {"type": "function", "strict": True, "function": {"name": "f"}},
    {"name": "f", "description": "\n Does <b>é</b>. "},
    {"name": "f", "parameters": {"properties": {"a": {"enum": ["é", 1], "description": " A. ", "type": "string"}}}},
    {"name": "f", "parameters": {"properties": {"a": {"default": None, "nullable": False, "items": {"type": "s"}, "minimum": 0}}}},
    {"name": "f", "parameters": {"properties": {"a": {"type": ["string", "null"]}, "items": {}, "b": True}}},
    {"name": "f", "parameters": {"required": ["a"], "type": "object", "properties": {}, "additionalProperties": False}},
    {"name": "f", "strict": True, "returns": {"type": "string"}, "type": "function", "parameters": {}, "tags": ["x"]},
]  # fmt: skip


@every_format
@pytest.mark.parametrize("described", TOOLS, ids=str)
def test_the_models_own_template_describes_tools_the_same(name, described):
    check(name, [user("Hi")], [described])
    check(name, [system("Be brief."), user("Hi")], [described, {"name": "g"}])


PIECES = st.sampled_from(
    ["", " ", "\n", "x", "<think>", "</think>", "<think>\n", "\n</think>\n", "<think></think>", "\u3000"]
)
TEXTS = st.lists(PIECES, max_size=5).map("".join)
ARGUMENTS = st.dictionaries(st.sampled_from("abc"), st.none() | st.booleans() | TEXTS | st.lists(st.integers(), max_size=2), max_size=2)  # fmt: skip
SPOKEN = st.one_of(
    *(TEXTS.map(role) for role in (user, tool, system, developer)),
    st.builds(assistant, st.none() | TEXTS),
    st.builds(thinking, st.none() | TEXTS, st.none() | TEXTS),
    st.builds(lambda why, text, arguments: thinking(why, text, call("f", **arguments)), TEXTS, st.none() | TEXTS, ARGUMENTS),
)  # fmt: skip


@every_format
@max_examples(300)
@given(messages=st.lists(SPOKEN, min_size=1, max_size=6), tools=st.sampled_from([None, [], [{"name": "f"}]]))
def test_the_models_own_template_writes_any_messages_the_same(name, messages, tools):
    check(name, messages, tools)


@every_format
@max_examples(300)
@given(messages=st.lists(SPOKEN, min_size=1, max_size=6), truncating=st.booleans())
def test_an_answer_is_what_theirs_marks_behind_the_generation_prompt(name, messages, truncating):
    text, spans = spans_of(OURS[name], messages, truncate_history_thinking=truncating)
    theirs, answers = spans_of(MARKED[name], messages, truncate_history_thinking=truncating)
    assert text == theirs
    prompts = [PROMPT.match(theirs, start) for start, _ in answers]
    assert len(spans) == len(answers) == sum(message["role"] == "assistant" for message in messages)
    for (start, end), (first, last), prompt in zip(spans, answers, prompts, strict=True):
        assert (start, end) == (prompt.end() if prompt else first, last) or (
            start == first and CALL_AFTER_TAG.search(theirs, first, last)
        )


# What the models' own templates do not have.

TALK = [user("Hi"), thinking("Greet.", "Hello"), thinking("Look.", " Wait. ", F), user("Bye")]
WHOLE = HI + ANSWER + "<think>\n«Greet.\n</think>\nHello<|im_end|>\n»"
WHOLE += ANSWER + f"<think>\n«Look.\n</think>\n Wait.\n{WRITTEN_F}<|im_end|>\n»" + BYE
BUDGET = "\n\n{thinking token budget: 100}"


@pytest.mark.parametrize("options", [dict(zip(FLAGS[:2], each, strict=True)) for each in itertools.product([True, False], repeat=2)])  # fmt: skip
def test_options_by_their_own_names_or_together(options):
    for prompt in (True, False):
        expected = marked(TALK, add_generation_prompt=prompt, **options)
        assert marked(TALK, add_generation_prompt=prompt, chat_template_kwargs=options) == expected
        assert (WHOLE in expected) == (not options["truncate_history_thinking"])


@pytest.mark.parametrize(
    ("messages", "budget", "expected"),
    [
        ([user("Hi")], None, HI),
        ([user("Hi")], 0, HI.replace("Hi<", "Hi\n\n{thinking token budget: 0}<")),
        ([user("Hi"), user("Bye")], 100, HI + BYE.replace("Bye<", f"Bye{BUDGET}<")),
        ([user("Hi"), user("Bye"), system("Go.")], 100, HI + BYE.replace("Bye<", f"Bye{BUDGET}<") + "<|im_start|>system\nGo.<|im_end|>\n"),
    ],
)  # fmt: skip
def test_budget_is_in_the_last_user_message(messages, budget, expected):
    assert marked(messages, reasoning_budget=budget) == expected
    assert marked(messages, chat_template_kwargs={"reasoning_budget": budget}) == expected


def test_an_options_own_name_wins():
    options = {"enable_thinking": True, "truncate_history_thinking": True, "reasoning_budget": 7}
    own = {"enable_thinking": False, "truncate_history_thinking": False, "reasoning_budget": 100}
    found = marked(TALK, add_generation_prompt=True, chat_template_kwargs=options, **own)
    assert found == WHOLE.replace("Bye<", f"Bye{BUDGET}<") + ANSWER + "<think></think>"


def test_the_instructions_written_here_show_the_form_that_calls_have():
    names = {"a": "its value", "b": "a value may\ntake several lines"}
    before = HI + ANSWER + "<think></think>\n"
    shown = render(OURS["nano3"], [user("Hi"), assistant("", call("f", **names))]).removeprefix(before)
    shown = shown.removesuffix("<|im_end|>\n").replace("=f>", "=name_of_the_function>")
    shown = shown.replace("=a>", "=name_of_a_parameter>").replace("=b>", "=name_of_another_parameter>")
    written = instructions(OURS["nano3"])
    assert written.startswith("\n\n")
    assert f"\n\n{shown}\n" in written


def test_lightning_flags_only_under_their_names():
    options = {"enable_thinking": False, "truncate_history_thinking": False, "medium_effort": True}
    nested = render(OURS["lightning35"], TALK, chat_template_kwargs=options, add_generation_prompt=True)
    assert nested == render(OURS["lightning35"], TALK, add_generation_prompt=True)


def test_lightning_takes_bare_calls_and_rejects_empty_conversations():
    check("lightning35", [user("Hi"), assistant("") | {"tool_calls": [{"name": "f"}]}])
    for template in (OURS["lightning35"], THEIRS["lightning35"]):
        with pytest.raises(jinja2.exceptions.UndefinedError):
            render(template, [])
