"""Which characters are trained on, for small templates of every habit; the parts of each answer are written by hand."""

import itertools

import pytest
from tokenmill.tasks.chat.conversation import Arguments
from tokenmill.tasks.chat.loss import LossPolicy

from tests.tokenize.small_vocabularies import EOS

ASKS = "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"


def user(text):
    return {"role": "user", "content": text}


def says(text, reasoning=None, *calls):
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": f"c{number}", "function": {"name": name, "arguments": Arguments({}, "{}")}}
            for number, name in enumerate(calls)
        ]
    return message


def tool(text):
    return {"role": "tool", "content": text}


# What an answer is made of: before it, reasoning, answer, calls, end of turn, behind it.

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ (m.content or '') ~ '<|im_end|>\n' }}{% endfor %}"
    + ASKS
)
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<call>' ~ c.function.name ~ '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + ASKS
)  # fmt: skip
OPENS = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>\n' ~ m.reasoning_content | default('') ~ '\n</think>\n' }}{% endif %}{{ (m.content or '') | trim ~ '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}"
)  # fmt: skip
EITHER = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>\n' ~ m.reasoning_content ~ '</think>' if m.reasoning_content else '<think></think>' }}{% endif %}{{ m.content ~ '<|im_end|>' }}"
    "{% endfor %}{{ ('<|im_start|>assistant\n' ~ ('<think>\n' if enable_thinking | default(true) else '<think></think>')) if add_generation_prompt }}"
)  # fmt: skip
NEVER_IN_PROMPT = EITHER.replace("('<think>\n' if", "('' if")
JSON = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ (m.content or '') }}{% if m.tool_calls %}{{ '[CALLS]' ~ m.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    + ASKS
)
HEADER_IN_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if loop.first %}{{ '<|im_start|>assistant\n' ~ (m.content or '') }}{% endif %}{{ '<call>' ~ c.function.name ~ '</call>' }}{% endfor %}{{ '<|im_end|>' }}{% else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>' }}{% endif %}{% endfor %}"
    + ASKS
)
INST = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% else %}{{ ' ' ~ m.content ~ eos_token }}{% endif %}{% endfor %}"
NO_TOKENS = "{% for m in messages %}{{ '### ' ~ m.role ~ ':\n' ~ m.content ~ '\n***\n' }}{% endfor %}{{ '### assistant:\n' if add_generation_prompt }}"
ROLE_LAST = "{% for m in messages %}{{ ('User: ' if m.role == 'user' else 'Assistant: ') ~ m.content ~ eos_token }}{% endfor %}{{ 'Assistant:' if add_generation_prompt }}"
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}{{ m.content ~ '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}" + ASKS
)  # fmt: skip
TWO_TAGS = TAGGED.replace("{% endif %}{{ m.content", "{% endif %}{% endgeneration %}{% generation %}{{ m.content")
BODY_TWICE_ENDED = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|eot|><|im_end|>\n' }}{% endfor %}" + ASKS
)

ASKED_BEFORE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user\n' ~ m.content ~ '<|im_end|>' }}{% if not loop.last %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}{% else %}{{ m.content ~ '<|im_end|>' }}{% endif %}{% endfor %}" + ASKS
)  # fmt: skip
THINKS_CLOSE = NEVER_IN_PROMPT.replace("'<think>\n' ~ m.reasoning_content", "'<think>' ~ m.reasoning_content")

HEAD = "<|im_start|>assistant\n"
PARTS = {
    "plain": (PLAIN, says("yes"), [HEAD, "", "yes", "", "<|im_end|>", "\n"]),
    "blanks are the answer's": (PLAIN, says(" \n yes\n "), [HEAD, "", " \n yes\n ", "", "<|im_end|>", "\n"]),
    "blanks alone": (PLAIN, says(" \n"), [HEAD, "", " \n", "", "<|im_end|>", "\n"]),
    "nothing said": (PLAIN, says(""), [HEAD, "", "", "", "<|im_end|>", "\n"]),
    "the header's own words": (PLAIN, says("<|im_start|>assistant\n"), [HEAD, "", "<|im_start|>assistant\n", "", "<|im_end|>", "\n"]),
    "reasoning": (THINKS, says("yes", "why"), [HEAD, "<think>\nwhy\n</think>\n", "yes", "", "<|im_end|>", "\n"]),
    "the same reasoning and answer": (THINKS, says("yes", "yes"), [HEAD, "<think>\nyes\n</think>\n", "yes", "", "<|im_end|>", "\n"]),
    "no reasoning": (THINKS, says("yes"), [HEAD, "", "yes", "", "<|im_end|>", "\n"]),
    "reasoning and no answer": (THINKS, says("", "why"), [HEAD, "<think>\nwhy\n</think>\n", "", "", "<|im_end|>", "\n"]),
    "a call": (THINKS, says("I look.", None, "f"), [HEAD, "", "I look.", "\n<call>f</call>", "<|im_end|>", "\n"]),
    "calls": (THINKS, says("I look.", None, "f", "g"), [HEAD, "", "I look.", "\n<call>f</call>\n<call>g</call>", "<|im_end|>", "\n"]),
    "a call and no words": (THINKS, says("", None, "f"), [HEAD, "", "", "\n<call>f</call>", "<|im_end|>", "\n"]),
    "a call and no content": (THINKS, says(None, None, "f"), [HEAD, "", "", "\n<call>f</call>", "<|im_end|>", "\n"]),
    "reasoning, words and a call": (THINKS, says("So:", "why", "f"), [HEAD, "<think>\nwhy\n</think>\n", "So:", "\n<call>f</call>", "<|im_end|>", "\n"]),
    "reasoning and a call": (THINKS, says("", "why", "f"), [HEAD, "<think>\nwhy\n</think>\n", "", "\n<call>f</call>", "<|im_end|>", "\n"]),
    "a prompt that opens reasoning": (OPENS, says(" yes ", "why"), [HEAD + "<think>\n", "why\n</think>\n", "yes", "", "<|im_end|>", "\n"]),
    "one of two prompts": (EITHER, says("yes", "why"), [HEAD + "<think>\n", "why</think>", "yes", "", "<|im_end|>", ""]),
    "the other of two prompts": (EITHER, says("yes"), [HEAD + "<think></think>", "", "yes", "", "<|im_end|>", ""]),
    "tags that a prompt does not hold": (NEVER_IN_PROMPT, says("yes", "why"), [HEAD, "<think>\nwhy</think>", "yes", "", "<|im_end|>", ""]),
    "tags that only another prompt holds": (NEVER_IN_PROMPT, says("yes"), [HEAD, "<think></think>", "yes", "", "<|im_end|>", ""]),
    "reasoning that reads like the rest of a prompt": (THINKS_CLOSE, says("yes", "</think>x"), [HEAD, "<think></think>x</think>", "yes", "", "<|im_end|>", ""]),
    "a header that the question ends with": (ASKED_BEFORE, says("yes"), [HEAD, "", "yes", "", "<|im_end|>", ""]),
    "calls as JSON": (JSON, says("I look.", None, "f"), [HEAD, "", "I look.", '[CALLS][{"type": "function", "id": "c0", "function": {"name": "f", "arguments": {}}}]', "<|im_end|>", "\n"]),
    "calls as JSON and no content": (JSON, says(None, None, "f"), [HEAD, "", "", '[CALLS][{"type": "function", "id": "c0", "function": {"name": "f", "arguments": {}}}]', "<|im_end|>", "\n"]),
    "a header inside of the loop over calls": (HEADER_IN_CALLS, says("I look.", None, "f", "g"), [HEAD, "", "I look.", "<call>f</call><call>g</call>", "<|im_end|>", ""]),
    "a header inside of the loop over calls, and no content": (HEADER_IN_CALLS, says(None, None, "f"), [HEAD, "", "", "<call>f</call>", "<|im_end|>", ""]),
    "no token but at the end": (ROLE_LAST, says("yes"), ["Assistant:", "", " yes", "", EOS, ""]),
    "no prompt": (INST, says("yes"), ["", "", " yes", "", EOS, ""]),
    "no tokens at all": (NO_TOKENS, says("yes"), ["### assistant:\n", "", "yes", "", "\n***\n", ""]),
    "generation tags": (TAGGED, says("yes"), [HEAD, "", "yes", "", "<|im_end|>\n", ""]),
    "generation tags around reasoning": (TAGGED, says("yes", "why"), [HEAD, "<think>why</think>", "yes", "", "<|im_end|>\n", ""]),
    "generation tags in two": (TWO_TAGS, says("yes", "why"), [HEAD, "<think>why</think>", "yes", "", "<|im_end|>\n", ""]),
}  # fmt: skip

FLAGS = [LossPolicy("assistant_all", *flags) for flags in itertools.product([True, False], repeat=3)]


@pytest.mark.parametrize(("source", "message", "parts"), PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("followed", [False, True])
def test_the_parts_of_an_answer(marked, source, message, parts, followed):
    before, reasoning, answer, calls, end, behind = parts
    messages = [user("q"), message, *([user("yes"), says("last")] if followed else [])]
    for policy in FLAGS:
        wanted = [
            before, *_if(policy.reasoning, reasoning), *_if(True, answer), *_if(policy.tool_calls, calls),
            *_if(policy.end_of_turn, end), behind,
        ]  # fmt: skip
        expected = "".join(wanted).replace("»«", "")
        found = marked(source, messages, policy)
        if "«" not in expected and not followed:
            assert found == "nothing_trained"
        else:
            assert expected in found
            assert followed or found.count("«") == expected.count("«")


def _if(learned, part):
    return [f"«{part}»" if learned and part else part]


TURNS = [user("1"), says("a", "r"), user("2"), says("b", None, "f"), tool("t"), says("c", "s"), says("d")]
PICKED = {"assistant_all": {1, 3, 5, 6}, "last_turn": {3, 5, 6}, "final_only": {6}}


@pytest.mark.parametrize(("on", "numbers"), PICKED.items())
def test_which_messages_are_trained_on(marked, on, numbers):
    assert set(LossPolicy(on).trained(TURNS)) == numbers
    found = marked(THINKS, TURNS, LossPolicy(on))
    written = {1: "«<think>\nr\n</think>\na<|im_end|>»", 3: "«b\n<call>f</call><|im_end|>»",
               5: "«<think>\ns\n</think>\nc<|im_end|>»", 6: "«d<|im_end|>»"}  # fmt: skip
    assert [text in found for text in written.values()] == [number in numbers for number in written]


def test_the_final_answer_has_neither_reasoning_nor_calls(marked):
    final = LossPolicy("final_only")
    assert marked(THINKS, [user("1"), says("a"), user("2"), says("b", "r", "f")], final).endswith(
        HEAD + "<think>\nr\n</think>\n«b»\n<call>f</call>«<|im_end|>»\n"
    )
    assert marked(THINKS, [user("1"), says("b", "r", "f"), tool("t"), says("c")], final).count("«") == 1


LAST_WORD = [user("1"), says("a"), user("2")]


def test_a_user_who_has_the_last_word(marked):
    assert marked(PLAIN, LAST_WORD, LossPolicy("last_turn")) == "nothing_trained"
    assert marked(PLAIN, LAST_WORD, LossPolicy("final_only")).count("«a<|im_end|>»") == 1
    assert marked(PLAIN, LAST_WORD).count("«a<|im_end|>»") == 1


def test_system_and_developer_messages_are_never_trained_on(marked):
    system, developer = {"role": "system", "content": "s"}, {"role": "developer", "content": "d"}
    found = marked(PLAIN, [system, user("1"), says("a"), developer, says("b")])
    assert found.replace("«", "").replace("»", "").count("<|im_start|>") == 5
    assert [part.split("»")[0] for part in found.split("«")[1:]] == ["a<|im_end|>", "b<|im_end|>"]


LEFT_OUT = {
    "a message": ("{% for m in messages %}{% if not m.tool_calls %}" + PLAIN[len("{% for m in messages %}"): -len("{% endfor %}" + ASKS)] + "{% endif %}{% endfor %}" + ASKS, "message_left_out"),
    "the calls": (PLAIN, "tool_calls_left_out"),
    "the content": (THINKS.replace("m.content or ''", "m.content if not m.tool_calls else ''"), "content_left_out"),
    "the content as it is": (THINKS.replace("m.content or ''", "m.content | upper if m.tool_calls else (m.content or '')"), "content_left_out"),
    "its beginning": (THINKS.replace("{{ '<|im_start|>' ~ m.role", "{{ ('+' if m.tool_calls else '<|im_start|>') ~ m.role"), "no_generation_prompt"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_omitted_text_is_not_learned(marked, source, reason):
    talk = [user("q"), says("I look.", None, "f"), tool("t"), says("yes")]
    assert marked(source, talk) == reason
    assert marked(source, [user("q"), says("yes")]).endswith(HEAD + "«yes<|im_end|>»\n")
    assert "«yes" in marked(source, talk, LossPolicy("final_only")), "what is not learned may be left out"


@pytest.mark.parametrize(
    "other",
    ["m.content ~ messages[1].content", "messages[1].reasoning_content ~ m.content", "m.content ~ messages[3].content"],
)
def test_text_of_other_messages_is_not_learned(marked, other):
    source = PLAIN.replace("(m.content or '')", f"({other} if loop.last else m.content)")
    talk = [user("q"), says("yes", "why"), user("q"), says("no", "why"), user("q"), says("yes")]
    assert marked(source, talk, LossPolicy("last_turn")) == "messages_mixed"
    assert marked(source, [user("q"), says("yes")]) != "messages_mixed", "its own words may stand there twice"


def test_blank_content_may_be_excluded(marked):
    source = PLAIN.replace("(m.content or '')", "(m.content | upper)")
    assert marked(source, [user("q"), says(" "), user("q"), says("\n")]).count("«") == 2
    assert marked(source, [user("q"), says("a")]) == "content_left_out"


# Prompts, ends and orders of other families.

TURN = "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}"
ASKS_IN_LOOP = (
    "{% for m in messages %}" + TURN + "{% if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% endfor %}"
)  # fmt: skip
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
    "{% endif %}" + TURN + "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)  # fmt: skip
BARE_WHEN_EMPTY = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ ('\n' ~ m.content if m.content) ~ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
LINES = (
    "{{ '<|im_start|>' }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)
CALLS_FIRST = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' ~ c.function.name ~ '</call>' }}{% endfor %}{{ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
TAGGED_EPILOGUE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ m.content ~ '<|im_end|>' }}{% endgeneration %}{% else %}" + TURN + "{% endif %}{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
)  # fmt: skip
NEXT_ENDS = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
EMPTY_THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n' }}{% endif %}{{ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}"
)
RESULT_IN_CALL = (
    "{% for m in messages if m.role != 'tool' %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' ~ c.function.name ~ '</call>' }}{% for r in messages if r.role == 'tool' %}{{ r.content }}{% endfor %}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)

RESULTS_BEHIND = (
    "{% for m in messages if m.role != 'tool' %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' ~ c.function.name ~ '</call>' }}{% endfor %}"
    "{% if m.tool_calls %}{% for r in messages if r.role == 'tool' %}{{ '<|eot|>' ~ r.content }}{% endfor %}{% endif %}"
    "{{ m.content }}{% if not m.tool_calls %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


ENDLESS = {
    "lines": LINES,
    "no tokens at all": NO_TOKENS.replace("***", ""),
    "generation tags": TAGGED.replace("<|im_end|>\n' }}{% endgeneration %}", " ' }}{% endgeneration %}"),
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_blanks_do_not_end_a_turn(marked, source):
    assert marked(source, [user("q"), says("yes")]) == "no_end_of_turn"


YES = [user("q"), says("yes")]
CALLED = [user("q"), says("I look.", None, "f")]
NO_EMPTY, NO_CALLS, NO_END = (
    LossPolicy(empty_reasoning=False),
    LossPolicy(tool_calls=False),
    LossPolicy(end_of_turn=False),
)
HABITS = {
    "a prompt inside of the loop": (ASKS_IN_LOOP, YES, None, "assistant\n«yes<|im_end|>»\n"),
    "a prompt inside of the loop, twice": (ASKS_IN_LOOP, [says("hi"), *YES], None, "assistant\n«hi<|im_end|>»\n"),
    "a default system text": (
        DEFAULT_SYSTEM, [says("hi"), *YES], None, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>assistant\n«hi<|im_end|>»\n",
    ),
    "a header that no probe has shown": (BARE_WHEN_EMPTY, [user("q"), says("")], None, "no_generation_prompt"),
    "the header of other answers": (BARE_WHEN_EMPTY, YES, None, "assistant\n«yes<|im_end|>»"),
    "calls before the answer": (CALLS_FIRST, CALLED, None, "«<call>f</call>I look.<|im_end|>»"),
    "calls before the answer, without calls": (CALLS_FIRST, CALLED, NO_CALLS, "<call>f</call>«I look.<|im_end|>»"),
    "calls before the final answer": (CALLS_FIRST, CALLED, LossPolicy("final_only"), "<call>f</call>«I look.<|im_end|>»"),
    "calls before the answer, without ends": (CALLS_FIRST, CALLED, NO_END, "«<call>f</call>I look.»<|im_end|>"),
    "generation tags behind the loop": (TAGGED_EPILOGUE, YES, None, f"«yes<|im_end|>{EOS}»"),
    "a turn that the next header ends": (
        NEXT_ENDS, [*YES, user("r"), says("no")], None,
        "<|im_start|>user\nq<|im_start|>assistant\n«yes<|im_start|>»user\nr<|im_start|>assistant\n«no<|im_start|>»",
    ),
    "empty reasoning behind the prompt": (EMPTY_THOUGHTS, YES, None, "<think>\n«\n</think>\nyes<|im_end|>»\n"),
    "empty reasoning is a policy": (EMPTY_THOUGHTS, YES, NO_EMPTY, "<think>\n\n</think>\n«yes<|im_end|>»\n"),
    "reasoning that is not empty": (
        EMPTY_THOUGHTS, [user("q"), says("yes", "why")], NO_EMPTY, "<think>\n«why\n</think>\nyes<|im_end|>»\n",
    ),
    "the result of a tool in the turn of the assistant": (
        RESULT_IN_CALL, [user("q"), says("", None, "f"), tool("rain"), says("no")], None, "messages_mixed",
    ),
    "results behind the calls": (
        RESULTS_BEHIND, [user("q"), says(None, None, "f", "g"), tool("rain"), tool("no"), says("no")], None,
        "assistant\n«<call>f</call><call>g</call><|eot|>»rain<|eot|>no<|im_start|>assistant\n«no<|im_end|>»",
    ),
    "results between the calls and their text": (
        RESULTS_BEHIND, [user("q"), says("I look.", None, "f"), tool("rain"), says("no")], None, "parts_mixed",
    ),
    "a prompt that opens reasoning is closed by the model": (OPENS, YES, None, HEAD + "<think>\n«\n</think>\nyes<|im_end|>»\n"),
    "a message that is ended twice ends with the last token": (BODY_TWICE_ENDED, YES, NO_END, HEAD + "«yes<|eot|>»<|im_end|>\n"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "messages", "policy", "expected"), HABITS.values(), ids=HABITS)
def test_habits_of_other_families(marked, source, messages, policy, expected):
    assert expected in marked(source, messages, policy)
