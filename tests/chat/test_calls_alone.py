"""Messages that call tools and say nothing: what of them is trained on where a policy leaves parts out."""

import re

import pytest
from tokenmill.tasks.chat.conversation import Arguments
from tokenmill.tasks.chat.loss import LossPolicy

from tests.peers import chat_templates

INTRODUCED = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ (m.content or '') }}"
    "{% if m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{{ ']' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)  # fmt: skip
"""Calls have a token of their own before the loop over them."""
FIRST = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.reasoning_content %}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' ~ (c | tojson) ~ '</tool_call>' }}{% endfor %}{{ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)  # fmt: skip
"""Calls are JSON, and come before the content."""
WITHIN = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<|im_start|>' ~ m.role ~ '\n[CALLS]' ~ m.content ~ c.function.name }}{% endfor %}"
    "{% if not m.tool_calls %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)  # fmt: skip
"""The loop over calls writes the header and the content."""
WITHOUT_REASONING, WITHOUT_CALLS = LossPolicy(reasoning=False), LossPolicy(tool_calls=False)


@pytest.fixture(scope="module")
def trained(marked):
    """`trained(source, messages, policy)`: the text that is trained on, or the reason for none."""

    def text(source, messages, policy):
        found = marked(source, messages, policy)
        return found if found == "nothing_trained" else "".join(re.findall("«(.*?)»", found, re.DOTALL))

    return text


def asked(content, reasoning=None):
    """A question, and an answer that calls `f`."""
    function = {"name": "f", "arguments": Arguments({}, "{}")}
    answer = {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}
    thought = {"reasoning_content": reasoning} if reasoning else {}
    return [{"role": "user", "content": "q"}, {**answer, **thought}]


NANO, GLM = (chat_templates.template(f"{name}_training") for name in ("nemotron_3_nano", "glm4moe"))
NANO_CALL = "\n<tool_call>\n<function=f>\n</function>\n</tool_call>\n"
GLM_CALL = "\n<tool_call>f\n</tool_call>"


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize(
    ("source", "tags", "call", "end"),
    [
        (NANO, "<think></think>", NANO_CALL, "<|im_end|>\n"),
        (GLM, "\n<think></think>", GLM_CALL, "<|observation|>"),
        (INTRODUCED, "", "[TOOL_CALLS][f]", "<|im_end|>"),
    ],
    ids=["nemotron", "glm", "introduced"],
)
def test_empty_tags_of_reasoning_are_reasoning_and_what_introduces_calls_is_a_call(
    trained, source, tags, call, end, content
):
    assert trained(source, asked(content), LossPolicy()) == tags + call + end
    assert trained(source, asked(content), WITHOUT_REASONING) == call + end
    assert trained(source, asked(content), WITHOUT_CALLS) == tags + end


@pytest.mark.parametrize("content", [None, "", " \n"])
@pytest.mark.parametrize("reasoning", [None, "why"])
@pytest.mark.parametrize("source", [NANO, GLM, INTRODUCED], ids=["nemotron", "glm", "introduced"])
def test_calls_without_text_are_not_final_answers(trained, source, reasoning, content):
    final = LossPolicy("final_only")
    assert trained(source, asked(content, reasoning), final) == "nothing_trained"
    before = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]
    assert trained(source, [*before, *asked(content, reasoning)], final) == "nothing_trained"
    assert trained(source, asked("Look:", reasoning), final).startswith("Look:")


@pytest.mark.parametrize("content", [None, "", "Look:"])
@pytest.mark.parametrize("reasoning", [None, "why"])
def test_calls_before_the_content_are_calls_even_if_it_is_empty(trained, reasoning, content):
    call = '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>'
    thought, rest = "<think>why</think>" if reasoning else "", f"{content or ''}<|im_end|>"
    assert trained(FIRST, asked(content, reasoning), LossPolicy()) == thought + call + rest
    assert trained(FIRST, asked(content, reasoning), WITHOUT_REASONING) == call + rest
    assert trained(FIRST, asked(content, reasoning), WITHOUT_CALLS) == thought + rest
    assert trained(FIRST, asked(content), LossPolicy(empty_reasoning=False)) == call + rest


def test_empty_content_within_calls(trained):
    assert trained(WITHIN, asked(""), LossPolicy()) == "[CALLS]f<|im_end|>"
