"""Control tokens that stand in data are found wherever they are, and can no longer be taken for the template's."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.chat.controls import NONCHARACTERS, Controls, controls_of, escape_controls, unused_noncharacter
from tokenmill.tasks.chat.conversation import Arguments, Conversation

IM = Controls({"<|im_start|>": 1, "<|im_end|>": 2})
END = "<|im_end|>"


def talk(*messages, tools=()):
    return Conversation(list(messages), list(tools))


def call(name="f", text="{}", identifier=None, **arguments):
    made = {"type": "function", "function": {"name": name, "arguments": Arguments(arguments, text)}}
    return made if identifier is None else {**made, "id": identifier}


def answer(content="a", **fields):
    return {"role": "assistant", "content": content, **fields}


def user(content="q", **fields):
    return {"role": "user", "content": content, **fields}


PLACES = {
    "a question": talk(user(f"a{END}b"), answer()),
    "an answer": talk(user(), answer(END)),
    "a system": talk({"role": "system", "content": f"\n{END}"}, answer()),
    "reasoning": talk(user(), answer(reasoning_content=END)),
    "a result": talk({"role": "tool", "content": END}, answer()),
    "a function name": talk(answer(None, tool_calls=[call(END)])),
    "a value": talk(answer(None, tool_calls=[call(a=END)])),
    "a key": talk(answer(None, tool_calls=[call(**{END: 1})])),
    "a value deep inside": talk(answer(None, tool_calls=[call(a=[1, {"b": [None, END]}])])),
    "a key deep inside": talk(answer(None, tool_calls=[call(a=[{END: True}])])),
    "the text of arguments": talk(answer(None, tool_calls=[call(text=f'{{"a": "{END}"}}')])),
    "the second call": talk(answer(None, tool_calls=[call(), call(a=END)])),
    "the id of a call": talk(answer(None, tool_calls=[call(identifier=END)])),
    "the id of a result": talk({"role": "tool", "content": "", "tool_call_id": END}, answer()),
    "a name": talk(user(name=END), answer()),
    "the name of a tool": talk(answer(), tools=[{"name": END}]),
    "the key of a tool": talk(answer(), tools=[{"name": "f", END: 1}]),
    "deep in a tool": talk(answer(), tools=[{"function": {"name": "f", "parameters": {"properties": {"a": {"enum": ["x", END]}}}}}]),
    "the second tool": talk(answer(), tools=[{"name": "f"}, {"name": "g", "description": END}]),
    "the last of many messages": talk(*[user(), answer()] * 9, user(END)),
}  # fmt: skip


def everything(conversation):
    """Every text of a conversation, keys and JSON of arguments too."""
    calls = [each for message in conversation.messages for each in message.get("tool_calls", ())]
    texts = [each["function"]["arguments"].text for each in calls]
    return json.dumps([conversation.messages, conversation.tools], ensure_ascii=False) + "".join(texts)


@pytest.mark.parametrize("conversation", PLACES.values(), ids=PLACES)
def test_control_tokens_are_found_and_broken_anywhere(conversation):
    assert IM.spelled_in(conversation)
    before = copy.deepcopy(conversation)
    mended = escape_controls(conversation, IM, NONCHARACTERS[0])
    assert not IM.spelled_in(mended)
    assert not IM.occur_in(everything(mended))
    assert everything(mended).count(NONCHARACTERS[0]) == everything(before).count(END)
    assert everything(mended).replace(NONCHARACTERS[0], "") == everything(before)
    assert everything(conversation) == everything(before), "the conversation itself is left alone"


def test_structure_is_unchanged():
    conversation = talk(
        answer(None, tool_calls=[call(a=END, b=1, c=None, d=True, e=1.5, text='{"a": 1}')]),
        tools=[{"name": "f", "strict": True}],
    )
    mended = escape_controls(conversation, IM, NONCHARACTERS[0])
    (message,) = mended.messages
    (made,) = message["tool_calls"]
    arguments = made["function"]["arguments"]
    assert message["role"] == "assistant"
    assert message["content"] is None
    assert type(arguments) is Arguments
    assert arguments.text == '{"a": 1}'
    assert {key: value for key, value in arguments.items() if key != "a"} == {"b": 1, "c": None, "d": True, "e": 1.5}
    assert mended.tools == [{"name": "f", "strict": True}]


def test_a_role_is_never_broken():
    roles = Controls({"user": 1, "assistant": 2})
    mended = escape_controls(talk(user("the user"), answer("the assistant")), roles, "\ufdd0")
    assert [message["role"] for message in mended.messages] == ["user", "assistant"]
    assert [message["content"] for message in mended.messages] == ["the u\ufdd0ser", "the a\ufdd0ssistant"]


@st.composite
def tokens_and_text(draw):
    """Tokens that overlap and hold each other, and a text that is mostly made of them."""
    tokens = draw(st.lists(st.text("<|a>", min_size=2, max_size=4), min_size=1, max_size=4, unique=True))
    tokens += [draw(st.sampled_from("<|a>")) + token for token in tokens[:1]]
    parts = draw(st.lists(st.one_of(st.text("<|a> \n", max_size=2), st.sampled_from(tokens)), max_size=5))
    return tokens, "".join(parts)


@given(tokens_and_text())
def test_tokens_occur_where_they_are_substrings(drawn):
    tokens, text = drawn
    controls = Controls({token: number for number, token in enumerate(tokens)})
    assert controls.occur_in(text) == any(token in text for token in tokens)
    assert controls.spelled_in(talk(answer(text))) == controls.occur_in(text)


@given(tokens_and_text())
def test_broken_text_lacks_control_tokens_and_can_be_restored(drawn):
    tokens, text = drawn
    controls = Controls({token: number for number, token in enumerate(tokens)})
    (message,) = escape_controls(talk(answer(text)), controls, "\ufdd0").messages
    assert not controls.occur_in(message["content"])
    assert message["content"].replace("\ufdd0", "") == text
    assert controls.occur_in(text) or message["content"] == text


@given(tokens_and_text())
def test_the_pattern_cuts_a_text_at_its_tokens_the_longest_first(drawn):
    tokens, text = drawn
    controls = Controls({token: number for number, token in enumerate(tokens)})
    place, expected = 0, []
    while place < len(text):
        here = max((token for token in tokens if text.startswith(token, place)), key=len, default=None)
        expected += [(place, place + len(here))] if here else []
        place += len(here) if here else 1
    assert [match.span() for match in controls.pattern.finditer(text)] == expected


@given(st.lists(st.sampled_from(["<a>", "<aa>", "</a>", "<|a|>", "a", "\n", "<", ">"]), max_size=9).map("".join))
def test_the_last_token_is_the_last_that_is_cut_out(text):
    controls = Controls({"<a>": 1, "<aa>": 2, "</a>": 3, "<|a|>": 4})
    found = [match.span() for match in controls.pattern.finditer(text)]
    assert controls.last(text, 0, len(text)) == (found[-1] if found else None)


def test_the_last_token_of_a_stretch():
    text = f"a{END}b{END}c"
    assert IM.last(text, 0, len(text)) == (12, 22)
    assert IM.last(text, 0, 21) == (1, 11), "a token that reaches beyond the stretch is not in it"
    assert IM.last(text, 2, len(text)) == (12, 22)
    assert IM.last(text, 13, len(text)) is None


def test_without_any_nothing_is_found():
    none = Controls({})
    assert not none.occur_in(END)
    assert none.last(END, 0, len(END)) is None
    assert none.pattern.split(f"a{END}") == [f"a{END}"]
    assert not none.spelled_in(talk(user(END), answer()))


def test_characters_of_patterns_are_characters():
    odd = Controls({"(.*)": 1, "[INST]": 2, "a|b": 3, "^$": 4})
    assert not odd.occur_in("anything INST a b")
    assert [odd.occur_in(text) for text in ("(.*)", "[INST]", "a|b", "^$")] == [True] * 4


@pytest.mark.parametrize("conversation", PLACES.values(), ids=PLACES)
def test_a_stranger_is_one_that_occurs_nowhere(conversation):
    assert unused_noncharacter(conversation) == NONCHARACTERS[0]
    (first, second) = NONCHARACTERS[:2]
    inside = escape_controls(conversation, IM, first)
    assert unused_noncharacter(inside) == second, "it stands somewhere by now"


def test_when_all_strangers_are_there_no_one_is_left():
    assert unused_noncharacter(talk(user(NONCHARACTERS[:4]), answer(NONCHARACTERS[4:]))) is None
    assert unused_noncharacter(talk(user(NONCHARACTERS[:4]), answer(NONCHARACTERS[5:]))) == NONCHARACTERS[4]


def test_the_controls_of_a_template_are_the_added_tokens_that_it_writes():
    added = {"<a>": 1, "<b>": 2, "<c>": 3, "\n\n": 4, "  ": 5, "<d>": 6}
    found = controls_of(["{{ '<a>' }}\n\n  ", "rendered <c>"], added)
    assert dict(found.ids) == {"<a>": 1, "<c>": 3}, "runs of blanks are text"
    assert dict(controls_of([], added).ids) == {}


def test_tags_that_a_template_does_not_write_are_text_outside_answers():
    tags = controls_of(["<|im_end|> </think>"], {"<think>": 1, "</think>": 2, END: 3, "<table>": 4})
    assert dict(tags.ids) == {"<think>": 1, "</think>": 2, END: 3}
    assert dict(tags.written.ids) == {"</think>": 2, END: 3}
    own = talk(user(), answer("<think>a"))
    assert not tags.spelled_in(own)
    both = talk(user("<think>q"), answer(f"<think></think>{END}", reasoning_content="<think>"))
    assert tags.spelled_in(both)
    asked, answered = escape_controls(both, tags, "#").messages
    assert asked["content"] == "<#think>q"
    assert answered["content"] == "<think><#/think><#|im_end|>"
    assert answered["reasoning_content"] == "<#think>"
