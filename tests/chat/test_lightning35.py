"""The format of Nemotron 3.5 Lightning and Nemotron 3 Ultra, against Ultra's own template, which `trl` ships.

Its training variant there marks whole answers; a server that generates after the prompt has written the tag that opens
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

from tests.chat.test_nano3 import ANSWER, BYE, EMPTY, HI, SPOKEN, WRITTEN_F, F
from tests.examples import max_examples
from tests.peers import chat_templates
from tests.peers.conversations import CONVERSATIONS, assistant, thinking, user

OURS = (Path(__file__).parents[2] / "blends" / "templates" / "lightning35.jinja").read_text("utf-8")
THEIRS, MARKED = (chat_templates.template(f"nemotron_3_ultra{kind}") for kind in ("", "_training"))
OPTIONS = [
    dict(zip(("truncate_history_thinking", "enable_thinking", "medium_effort", "add_generation_prompt"), each, strict=True))
    for each in itertools.product([True, False], repeat=4)
]  # fmt: skip
PROMPT = re.compile(r"<think>\n|<think></think>")
CALL_AFTER_TAG = "<think>\n<tool_call>"
"""A lone tag that a content brought along, with calls on the next line: it looks like a prompt and is none."""


def rendered(template, messages, tools=None, **options):
    """Text and the spans of it that are generated."""
    (text,), (spans,) = render_jinja_template(
        [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **options
    )
    return text, spans


def written(template, messages, tools=None, **options):
    (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template, **options)
    return text


@pytest.fixture(scope="module")
def instructions():
    """What the model's own template says about calls, which a user's tokenizer brings along."""
    text = written(THEIRS, [user("Hi")], [{"name": "f"}])
    return text[text.index("</tools>") + len("</tools>") : text.index("<|im_end|>")]


def test_theirs_is_the_template_of_the_published_recipe():
    """The digest of `src/nemotron/data_prep/templates/lightning35.jinja` in NVIDIA-NeMo/Nemotron at e27b3713."""
    digest = hashlib.sha256(THEIRS.encode()).hexdigest()
    assert digest == "82753bef5cedc4932c1ed509b5c9a12be680fd86d1adb65bc3f7398d11c8eebc"


def check(messages, tools, instructions):
    for options in OPTIONS:
        text = written(THEIRS, messages, tools, **options)
        assert written(OURS, messages, tools, tool_instructions=instructions, **options) == text


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_models_own_template_writes_the_same(instructions, name):
    check(CONVERSATIONS[name]["messages"], CONVERSATIONS[name].get("tools"), instructions)


@max_examples(300)
@given(messages=st.lists(SPOKEN, min_size=1, max_size=6), tools=st.sampled_from([None, [], [{"name": "f"}]]))
def test_the_models_own_template_writes_any_messages_the_same(instructions, messages, tools):
    check(messages, tools, instructions)


@max_examples(300)
@given(messages=st.lists(SPOKEN, min_size=1, max_size=6))
def test_an_answer_is_what_theirs_marks_behind_the_generation_prompt(messages):
    text, spans = rendered(OURS, messages)
    theirs, marked = rendered(MARKED, messages)
    assert text == theirs
    prompts = [PROMPT.match(theirs, start) for start, _ in marked]
    assert len(spans) == len(marked)
    for (start, end), (first, last), prompt in zip(spans, marked, prompts, strict=True):
        assert (start, end) == (prompt.end() if prompt else first, last) or (
            start == first and CALL_AFTER_TAG in theirs[first:last]
        )


CASES = {
    "reasoning without line breaks around its end": (
        [user("Hi"), thinking("Greet.", "Hello")],
        {},
        HI + ANSWER + "<think>\n«Greet.</think>Hello<|im_end|>\n»",
    ),
    "blanks of reasoning and answer stay, but the last": (
        [user("Hi"), thinking("r\n", "\na\n")],
        {},
        HI + ANSWER + "<think>\n«r\n</think>\na<|im_end|>\n»",
    ),
    "the past has no line break": (
        [user("Hi"), thinking("Greet.", "Hello"), user("Bye")],
        {},
        HI + ANSWER + "<think></think>«Hello<|im_end|>\n»" + BYE,
    ),
    "words before calls of the past keep their blanks": (
        [user("Hi"), assistant(" c ", F), user("Bye")],
        {},
        HI + ANSWER + f"<think></think>« c \n{WRITTEN_F}<|im_end|>\n»" + BYE,
    ),
    "the past keeps its reasoning": (
        [user("Hi"), thinking("Greet.", "Hello"), user("Bye")],
        {"truncate_history_thinking": False},
        HI + ANSWER + "<think>\n«Greet.</think>Hello<|im_end|>\n»" + BYE,
    ),
    "less effort is asked for in the last user message": (
        [user("Bye"), assistant("Yo"), user("Hi ")],
        {"medium_effort": True, "enable_thinking": False, "add_generation_prompt": True},
        EMPTY + BYE + ANSWER + "<think></think>«Yo<|im_end|>\n»"
        "<|im_start|>user\nHi \n\n{reasoning effort: efficient}<|im_end|>\n" + ANSWER + "<think></think>",
    ),
    "a call without arguments, bare": (
        [user("Hi"), assistant("") | {"tool_calls": [{"name": "f"}]}],
        {},
        HI + ANSWER + f"<think></think>«\n{WRITTEN_F}<|im_end|>\n»",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "options", "expected"), CASES.values(), ids=CASES)
def test_messages(messages, options, expected):
    text, spans = rendered(OURS, messages, **options)
    for start, end in reversed(spans):
        text = f"{text[:start]}«{text[start:end]}»{text[end:]}"
    assert text == expected
    assert re.sub("[«»]", "", expected) == written(THEIRS, messages, **options)


def test_flags_have_no_other_place_than_their_own_names():
    options = {"enable_thinking": False, "truncate_history_thinking": False, "medium_effort": True}
    messages = [user("Hi"), thinking("Greet.", "Hello"), user("Bye")]
    nested = written(OURS, messages, chat_template_kwargs=options, add_generation_prompt=True)
    assert nested == written(OURS, messages, add_generation_prompt=True)


def test_no_messages_are_an_error():
    for template in (OURS, THEIRS):
        with pytest.raises(jinja2.exceptions.UndefinedError):
            written(template, [])
