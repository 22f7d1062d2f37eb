"""The Nemotron 3 Nano format, case by case through transformers' own machinery; «…» is what an assistant generates."""

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from tests.examples import max_examples
from tests.peers import chat_templates
from tests.peers.conversations import CONVERSATIONS, assistant, call, developer, system, thinking, tool, user

NANO3 = (Path(__file__).parents[2] / "blends" / "templates" / "nano3.jinja").read_text("utf-8")

EMPTY = "<|im_start|>system\n<|im_end|>\n"
"""The system block of a conversation that has no system message and no tools."""
HI = EMPTY + "<|im_start|>user\nHi<|im_end|>\n"
"""What comes before the first answer to `user("Hi")`."""
BYE = "<|im_start|>user\nBye<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
F = call("f")
WRITTEN_F = "<tool_call>\n<function=f>\n</function>\n</tool_call>\n"


def render(messages, tools=None, template=NANO3, **options):
    (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template, **options)
    return text


def marked(messages, tools=None, **options):
    """The text with «…» around what stands in `generation` tags."""
    (text,), (spans,) = render_jinja_template(
        [messages], tools=tools, chat_template=NANO3, return_assistant_tokens_mask=True, **options
    )
    for start, end in reversed(spans):
        text = f"{text[:start]}«{text[start:end]}»{text[end:]}"
    return text


SYSTEM = {
    "no system: an empty block": ([user("Hi")], HI),
    "a system is the header": (
        [system(" Be brief.\n"), user("Hi")],
        "<|im_start|>system\n Be brief.\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n",
    ),
    "an empty system": ([system(""), user("Hi")], HI),
    "only a first system is the header": (
        [user("Hi"), system("Shout."), user("Bye")],
        HI + "<|im_start|>system\nShout.<|im_end|>\n" + BYE,
    ),
    "a second system is a block of its own": (
        [system("One."), system("Two."), user("Hi")],
        "<|im_start|>system\nOne.<|im_end|>\n<|im_start|>system\nTwo.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n",
    ),
    "any other role is a block under its name": (
        [developer("Rhyme."), user("Hi")],
        EMPTY + "<|im_start|>developer\nRhyme.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n",
    ),
    "a user's text stays as it is": ([user("\n  Hi \n")], EMPTY + "<|im_start|>user\n\n  Hi \n<|im_end|>\n"),
    "users in a row": ([user("Hi"), user("Bye")], HI + BYE),
}

ANSWERS = {
    "an answer without reasoning": ([user("Hi"), assistant("Hello")], HI + ANSWER + "<think></think>«Hello<|im_end|>\n»"),
    "reasoning by null is none": ([user("Hi"), thinking(None, "Yo")], HI + ANSWER + "<think></think>«Yo<|im_end|>\n»"),
    "blank reasoning is none": ([user("Hi"), thinking(" \n", "Yo")], HI + ANSWER + "<think></think>«Yo<|im_end|>\n»"),
    "empty reasoning is none": ([user("Hi"), thinking("", "Yo")], HI + ANSWER + "<think></think>«Yo<|im_end|>\n»"),
    "reasoning in its tags": (
        [user("Hi"), thinking("Greet.", "Hello")],
        HI + ANSWER + "<think>\n«Greet.\n</think>\nHello<|im_end|>\n»",
    ),
    "blanks around reasoning stay": (
        [user("Hi"), thinking("\n Greet. ", "\nHello")],
        HI + ANSWER + "<think>\n«\n Greet. \n</think>\n\nHello<|im_end|>\n»",
    ),
    "blanks after an answer go": ([user("Hi"), assistant("Yo \n\n")], HI + ANSWER + "<think></think>«Yo<|im_end|>\n»"),
    "blanks before an answer stay behind empty tags": (
        [user("Hi"), assistant("\n Yo")],
        HI + ANSWER + "<think></think>«\n Yo<|im_end|>\n»",
    ),
    "an empty answer": ([user("Hi"), assistant("")], HI + ANSWER + "<think></think>«<|im_end|>\n»"),
    "no content": ([user("Hi"), assistant(None)], HI + ANSWER + "<think></think>«<|im_end|>\n»"),
    "reasoning and no content": (
        [user("Hi"), thinking("Greet.", None)],
        HI + ANSWER + "<think>\n«Greet.\n</think><|im_end|>\n»",
    ),
    "tags in the content in the prompt's form": (
        [user("Hi"), assistant("<think>\nGreet.\n</think>\nYo")],
        HI + ANSWER + "<think>\n«Greet.\n</think>\nYo<|im_end|>\n»",
    ),
    "empty tags in the content": (
        [user("Hi"), assistant("<think></think>Yo")],
        HI + ANSWER + "<think></think>«Yo<|im_end|>\n»",
    ),
    "tags in the content in another form": (
        [user("Hi"), assistant(" <think>Greet.</think> Yo")],
        HI + ANSWER + "«<think>Greet.</think> Yo<|im_end|>\n»",
    ),
    "one tag in the content is enough": ([user("Hi"), assistant("a</think>b")], HI + ANSWER + "«a</think>b<|im_end|>\n»"),
    "reasoning beside tags in the content": (
        [user("Hi"), thinking("Greet.", "<think>x</think>Yo")],
        HI + ANSWER + "<think>\n«Greet.\n</think>\n<think>x</think>Yo<|im_end|>\n»",
    ),
    "assistants in a row": (
        [user("Hi"), assistant("One."), thinking("Two?", "Two.")],
        HI + ANSWER + "<think></think>«One.<|im_end|>\n»" + ANSWER + "<think>\n«Two?\n</think>\nTwo.<|im_end|>\n»",
    ),
    "without any user every turn is the current one": (
        [thinking("Greet.", "Hello")],
        EMPTY + ANSWER + "<think>\n«Greet.\n</think>\nHello<|im_end|>\n»",
    ),
}  # fmt: skip

HISTORY = {
    "reasoning of the past goes and leaves its line break": (
        [user("Hi"), thinking("Greet.", "Hello"), user("Bye")],
        HI + ANSWER + "<think></think>«\nHello<|im_end|>\n»" + BYE,
    ),
    "an answer of the past that had none has no line break": (
        [user("Hi"), assistant("Hello"), user("Bye")],
        HI + ANSWER + "<think></think>«Hello<|im_end|>\n»" + BYE,
    ),
    "reasoning of the past without content leaves nothing": (
        [user("Hi"), thinking("Greet.", ""), user("Bye")],
        HI + ANSWER + "<think></think>«<|im_end|>\n»" + BYE,
    ),
    "what follows the last tag is kept": (
        [user("Hi"), thinking("a</think>b", "c</think> d "), user("Bye")],
        HI + ANSWER + "<think></think>« d<|im_end|>\n»" + BYE,
    ),
    "one tag alone keeps its text": (
        [user("Hi"), assistant("a</think>b"), assistant("c<think>d"), user("Bye")],
        HI + ANSWER + "«a</think>b<|im_end|>\n»" + ANSWER + "«c<think>d<|im_end|>\n»" + BYE,
    ),
    "the last exchange keeps its reasoning": (
        [user("Hi"), thinking("Greet.", "Hello"), user("Bye"), thinking("Part.", "Bye.")],
        HI + ANSWER + "<think></think>«\nHello<|im_end|>\n»" + BYE + ANSWER + "<think>\n«Part.\n</think>\nBye.<|im_end|>\n»",
    ),
    "a call of the past loses reasoning and line break": (
        [user("Hi"), thinking("Greet.", "\nWait. ", F), user("Bye")],
        HI + ANSWER + f"<think></think>«Wait.\n{WRITTEN_F}<|im_end|>\n»" + BYE,
    ),
    "a call of the past without content": (
        [user("Hi"), thinking("Greet.", None, F), user("Bye")],
        HI + ANSWER + f"<think></think>«\n{WRITTEN_F}<|im_end|>\n»" + BYE,
    ),
    "a call of the past whose reasoning never ends keeps what comes before": (
        [user("Hi"), assistant("Wait. <think>Or", F), user("Bye")],
        HI + ANSWER + f"<think></think>«Wait.\n{WRITTEN_F}<|im_end|>\n»" + BYE,
    ),
    "a call of the past whose reasoning never began keeps what comes after": (
        [user("Hi"), assistant("Or</think> Wait.", F), user("Bye")],
        HI + ANSWER + f"<think></think>«Wait.\n{WRITTEN_F}<|im_end|>\n»" + BYE,
    ),
}  # fmt: skip

CALLS = {
    "a call": (
        [user("Hi"), assistant(None, call("g", a=1, b="x\ny"))],
        HI + ANSWER + "<think></think>«\n<tool_call>\n<function=g>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\nx\ny\n</parameter>\n</function>\n</tool_call>\n<|im_end|>\n»",
    ),
    "an empty content is as none": (
        [user("Hi"), assistant("", F)],
        HI + ANSWER + f"<think></think>«\n{WRITTEN_F}<|im_end|>\n»",
    ),
    "words and reasoning before calls": (
        [user("Hi"), thinking("Look.", "Wait. ", F, F)],
        HI + ANSWER + f"<think>\n«Look.\n</think>\nWait.\n{WRITTEN_F}{WRITTEN_F}<|im_end|>\n»",
    ),
    "reasoning alone before a call": (
        [user("Hi"), thinking("Look.", None, F)],
        HI + ANSWER + f"<think>\n«Look.\n</think>\n{WRITTEN_F}<|im_end|>\n»",
    ),
    "values: JSON inside of lists and mappings, else as Python writes them": (
        [user("Hi"), assistant("", call("g", a=[1, "é<'\""], b={"k": None, "t": True}, c=None, d=True, e=1.5, f=""))],
        HI + ANSWER + "<think></think>«\n<tool_call>\n<function=g>\n<parameter=a>\n[1, \"é<'\\\"\"]\n</parameter>\n"
        '<parameter=b>\n{"k": null, "t": true}\n</parameter>\n<parameter=c>\nNone\n</parameter>\n'
        "<parameter=d>\nTrue\n</parameter>\n<parameter=e>\n1.5\n</parameter>\n<parameter=f>\n\n</parameter>\n"
        "</function>\n</tool_call>\n<|im_end|>\n»",
    ),
    "no calls in a list of none": (
        [user("Hi"), assistant("Yo") | {"tool_calls": []}],
        HI + ANSWER + "<think></think>«Yo<|im_end|>\n»",
    ),
    "a result is a user's block": (
        [user("Hi"), tool("\n1 ")],
        HI + "<|im_start|>user\n<tool_response>\n\n1 \n</tool_response>\n<|im_end|>\n",
    ),
    "results in a row share the block": (
        [user("Hi"), tool("1"), tool("2"), user("Bye"), tool("3")],
        HI + "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\n<|im_end|>\n"
        + BYE + "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<|im_end|>\n",
    ),
    "a result with nothing before it has no opening line": (
        [system("Be brief."), tool("1"), tool("2"), user("Bye")],
        "<|im_start|>system\nBe brief.<|im_end|>\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response>\n<|im_end|>\n" + BYE,
    ),
    "a result does not end the current exchange": (
        [user("Hi"), thinking("Look.", None, F), tool("1"), thinking("One.", "1")],
        HI + ANSWER + f"<think>\n«Look.\n</think>\n{WRITTEN_F}<|im_end|>\n»"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<|im_end|>\n"
        + ANSWER + "<think>\n«One.\n</think>\n1<|im_end|>\n»",
    ),
}  # fmt: skip

CASES = SYSTEM | ANSWERS | HISTORY | CALLS


@pytest.mark.parametrize(("messages", "expected"), CASES.values(), ids=CASES)
def test_messages(messages, expected):
    assert marked(messages) == expected
    assert render(messages) == re.sub("[«»]", "", expected)


KEPT = [user("Hi"), thinking("Greet.", "Hello"), thinking("Look.", " Wait. ", F), user("Bye")]
WHOLE = HI + ANSWER + "<think>\n«Greet.\n</think>\nHello<|im_end|>\n»"
WHOLE += ANSWER + f"<think>\n«Look.\n</think>\n Wait.\n{WRITTEN_F}<|im_end|>\n»" + BYE
BUDGET = "\n\n{thinking token budget: 100}"

OPTIONS = {
    "the past keeps its reasoning": (KEPT, {"truncate_history_thinking": False}, WHOLE),
    "the past loses its reasoning, said aloud": (
        [user("Hi"), thinking("Greet.", "Hello"), user("Bye")],
        {"truncate_history_thinking": True},
        HI + ANSWER + "<think></think>«\nHello<|im_end|>\n»" + BYE,
    ),
    "a prompt opens reasoning": ([user("Hi")], {"add_generation_prompt": True}, HI + ANSWER + "<think>\n"),
    "a prompt opens reasoning, said aloud": (
        [user("Hi")],
        {"add_generation_prompt": True, "enable_thinking": True},
        HI + ANSWER + "<think>\n",
    ),
    "a prompt without reasoning": (
        [user("Hi")],
        {"add_generation_prompt": True, "enable_thinking": False},
        HI + ANSWER + "<think></think>",
    ),
    "reasoning that is there is written either way": (
        [user("Hi"), thinking("Greet.", "Yo")],
        {"enable_thinking": False},
        HI + ANSWER + "<think>\n«Greet.\n</think>\nYo<|im_end|>\n»",
    ),
    "a budget stands in the last user message": (
        [user("Hi"), assistant("Yo"), user("Bye "), tool("1")],
        {"reasoning_budget": 100},
        HI + ANSWER + f"<think></think>«Yo<|im_end|>\n»<|im_start|>user\nBye {BUDGET}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<|im_end|>\n",
    ),
    "a budget of nothing is a budget": (
        [user("Hi")],
        {"reasoning_budget": 0},
        EMPTY + "<|im_start|>user\nHi\n\n{thinking token budget: 0}<|im_end|>\n",
    ),
    "no budget": ([user("Hi")], {"reasoning_budget": None}, HI),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "options", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_options_by_their_own_names_or_together(messages, options, expected):
    assert marked(messages, **options) == expected
    prompt = {"add_generation_prompt": options.get("add_generation_prompt", False)}
    together = {name: value for name, value in options.items() if name not in prompt}
    assert marked(messages, **prompt, chat_template_kwargs=together) == expected


def test_an_options_own_name_wins():
    options = {"enable_thinking": True, "truncate_history_thinking": True, "reasoning_budget": 7}
    own = {"enable_thinking": False, "truncate_history_thinking": False, "reasoning_budget": 100}
    found = marked(KEPT, add_generation_prompt=True, chat_template_kwargs=options, **own)
    assert found == WHOLE.replace("Bye<", f"Bye{BUDGET}<") + ANSWER + "<think></think>"


TOOLS = {
    "a tool with nothing but a name": (
        {"name": "f"},
        "<function>\n<name>f</name>\n<parameters>\n</parameters>\n</function>",
    ),
    "a tool inside of a type": (
        {"type": "function", "strict": True, "function": {"name": "f"}},
        "<function>\n<name>f</name>\n<parameters>\n</parameters>\n</function>",
    ),
    "a description without the blanks around it": (
        {"name": "f", "description": "\n Does <b>é</b>. "},
        "<function>\n<name>f</name>\n<description>Does <b>é</b>.</description>\n<parameters>\n</parameters>\n</function>",
    ),
    "a parameter's name, type, description and values, in this order": (
        {"name": "f", "parameters": {"properties": {"a": {"enum": ["é", 1], "description": " A. ", "type": "string"}}}},
        ("<function>\n<name>f</name>\n<parameters>\n<parameter>\n<name>a</name>\n<type>string</type>\n"
        '<description>A.</description>\n<enum>["é", 1]</enum>\n</parameter>\n</parameters>\n</function>'),
    ),
    "a parameter's other keys as they come": (
        {
            "name": "f",
            "parameters": {"properties": {"a": {"default": None, "nullable": False, "items": {"type": "s"}, "minimum": 0}}},
        },
        ("<function>\n<name>f</name>\n<parameters>\n<parameter>\n<name>a</name>\n<default>None</default>\n"
        '<nullable>False</nullable>\n<items>{"type": "s"}</items>\n<minimum>0</minimum>\n</parameter>\n</parameters>\n</function>'),
    ),
    "several types as Python writes them": (
        {"name": "f", "parameters": {"properties": {"a": {"type": ["string", "null"]}, "items": {}, "b": True}}},
        ("<function>\n<name>f</name>\n<parameters>\n<parameter>\n<name>a</name>\n<type>['string', 'null']</type>\n</parameter>\n"
        "<parameter>\n<name>items</name>\n</parameter>\n<parameter>\n<name>b</name>\n</parameter>\n</parameters>\n</function>"),
    ),
    "other keys of the parameters stand before the required": (
        {"name": "f", "parameters": {"required": ["a"], "type": "object", "properties": {}, "additionalProperties": False}},
        ("<function>\n<name>f</name>\n<parameters>\n<additionalProperties>False</additionalProperties>\n"
        '<required>["a"]</required>\n</parameters>\n</function>'),
    ),
    "other keys of the tool stand last": (
        {"name": "f", "strict": True, "returns": {"type": "string"}, "type": "function", "parameters": {}, "tags": ["x"]},
        ("<function>\n<name>f</name>\n<parameters>\n</parameters>\n<strict>True</strict>\n"
        '<returns>{"type": "string"}</returns>\n<tags>["x"]</tags>\n</function>'),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("described", "expected"), TOOLS.values(), ids=TOOLS)
def test_a_tool_is_described_line_by_line(described, expected):
    intro = "# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
    text = render([user("Hi")], [described], tool_instructions="\n\nGo.")
    assert text == f"<|im_start|>system\n{intro}{expected}\n</tools>\n\nGo.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_tools_follow_the_system_message_after_a_blank_line():
    text = render([system("Be brief."), user("Hi")], [{"name": "f"}, {"name": "g"}], tool_instructions="")
    header = "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
    functions = [f"<function>\n<name>{name}</name>\n<parameters>\n</parameters>\n</function>\n" for name in "fg"]
    assert text == header + "".join(functions) + "</tools><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_leave_no_trace(tools):
    assert render([user("Hi")], tools) == HI


def test_the_instructions_written_here_show_the_form_that_calls_have():
    text = render([user("Hi")], [{"name": "f"}])
    instructions = text[text.index("</tools>") + len("</tools>") : text.index("<|im_end|>")]
    names = {"a": "its value", "b": "a value may\ntake several lines"}
    shown = render([user("Hi"), assistant("", call("f", **names))]).removeprefix(HI + ANSWER + "<think></think>\n")
    shown = shown.removesuffix("<|im_end|>\n")
    shown = shown.replace("=f>", "=name_of_the_function>")
    shown = shown.replace("=a>", "=name_of_a_parameter>").replace("=b>", "=name_of_another_parameter>")
    assert instructions.startswith("\n\n")
    assert f"\n\n{shown}\n" in instructions


THEIRS = chat_templates.template("nemotron_3_nano")
PROMPT = re.compile(r"<\|im_start\|>assistant\n(<think>\n|<think></think>|)$")


@pytest.fixture(scope="module")
def their_instructions():
    """What the model's own template says about calls."""
    text = render([user("Hi")], [{"name": "f"}], template=THEIRS)
    return text[text.index("</tools>") + len("</tools>") : text.index("<|im_end|>")]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_models_own_template_writes_the_same(their_instructions, name):
    check(CONVERSATIONS[name]["messages"], CONVERSATIONS[name].get("tools"), their_instructions)


def check(messages, tools, instructions):
    for truncating, thought, prompt in itertools.product([True, False], repeat=3):
        options = {"truncate_history_thinking": truncating, "enable_thinking": thought, "add_generation_prompt": prompt}
        theirs = render(messages, tools, template=THEIRS, **options)
        assert render(messages, tools, tool_instructions=instructions, **options) == theirs


PIECES = st.sampled_from(
    ["", " ", "\n", "x", "<think>", "</think>", "<think>\n", "\n</think>\n", "<think></think>", "\u3000"]
)
TEXTS = st.lists(PIECES, max_size=5).map("".join)
ARGUMENTS = st.dictionaries(st.sampled_from("abc"), st.none() | st.booleans() | TEXTS | st.lists(st.integers(), max_size=2), max_size=2)  # fmt: skip
SPOKEN = st.one_of(
    TEXTS.map(user),
    TEXTS.map(tool),
    TEXTS.map(system),
    TEXTS.map(developer),
    st.builds(assistant, st.none() | TEXTS),
    st.builds(thinking, st.none() | TEXTS, st.none() | TEXTS),
    st.builds(lambda why, text, arguments: thinking(why, text, call("f", **arguments)), TEXTS, st.none() | TEXTS, ARGUMENTS),
)  # fmt: skip


@max_examples(300)
@given(messages=st.lists(SPOKEN, min_size=1, max_size=6))
def test_the_models_own_template_writes_any_messages_the_same(messages):
    check(messages, None, "")


@max_examples(200)
@given(messages=st.lists(SPOKEN, min_size=1, max_size=6))
def test_every_answer_is_generated_after_a_prompt_to_the_end_of_its_block(messages):
    (text,), (spans,) = render_jinja_template([messages], chat_template=NANO3, return_assistant_tokens_mask=True)
    assert len(spans) == sum(message["role"] == "assistant" for message in messages)
    for start, end in spans:
        (prompt,) = PROMPT.search(text[:start]).groups()
        assert text[start:end].endswith("<|im_end|>\n")
        # A lone tag that the content brought along, with calls on the next line, looks like a prompt and is none.
        assert (
            prompt
            or not text[start:end].startswith(("<think>\n", "<think></think>"))
            or "<tool_call>" in text[start:end]
        )


@pytest.fixture(scope="module")
def tokenizer():
    """A token for every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, chat_template=NANO3)


@pytest.mark.parametrize("name", ["a call of the past without content", "the last exchange keeps its reasoning"])
def test_transformers_own_mask_selects_what_is_generated(tokenizer, name):
    messages, expected = CASES[name]
    found = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    trained = [number for number, chosen in zip(found["input_ids"], found["assistant_masks"], strict=True) if chosen]
    assert tokenizer.decode(trained) == "".join(re.findall("«(.*?)»", expected, re.DOTALL))
