"""What is written is read back as it was, and is, token by token, what the reference writes."""

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_harmony import Author, Conversation, Message, RenderConversationConfig, Role
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.grammar import parse
from tokenmill.tasks.harmony.message import ROLES, HarmonyMessage
from tokenmill.tasks.harmony.render import cross_check, official, render
from tokenmill.tasks.harmony.semantics import faults
from tokenmill.tasks.harmony.vocabulary import encoding

from tests.examples import max_examples
from tests.peers.harmony_tokens import SPECIAL_STRINGS, encode

KEEP = RenderConversationConfig(auto_drop_analysis=False)

GOLDEN = [
    HarmonyMessage("system", "Be an agent."),
    HarmonyMessage("developer", "# Instructions\n\nAnswer briefly."),
    HarmonyMessage("user", "Where is A1?"),
    HarmonyMessage("assistant", "Look it up.", channel="analysis"),
    HarmonyMessage("assistant", '{"id":"A1"}', "functions.get_order", "commentary", "json", terminator="call"),
    HarmonyMessage("functions.get_order", '{"status":"sent"}', "assistant", "commentary"),
    HarmonyMessage("assistant", "1 + 1", "python", "analysis", "code", constrained=False, terminator="call"),
    HarmonyMessage("python", "2", "assistant", "analysis"),
    HarmonyMessage("assistant", "It was sent.", channel="final", terminator="return"),
]
GOLDEN_TEXT = (
    "<|start|>system<|message|>Be an agent.<|end|>"
    "<|start|>developer<|message|># Instructions\n\nAnswer briefly.<|end|>"
    "<|start|>user<|message|>Where is A1?<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Look it up.<|end|>"
    '<|start|>assistant to=functions.get_order<|channel|>commentary <|constrain|>json<|message|>{"id":"A1"}<|call|>'
    '<|start|>functions.get_order to=assistant<|channel|>commentary<|message|>{"status":"sent"}<|end|>'
    "<|start|>assistant to=python<|channel|>analysis code<|message|>1 + 1<|call|>"
    "<|start|>python to=assistant<|channel|>analysis<|message|>2<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It was sent.<|return|>"
)


def reference(message):
    """The reference's form of a message."""
    role = Role(message.author) if message.author in ROLES else Role.TOOL
    author = Author(role=role, name=None if message.author in ROLES else message.author)
    constrain = "<|constrain|>" if message.constrained else ""
    content_type = None if message.content_type is None else constrain + message.content_type
    made = Message.from_author_and_content(author, message.body)
    return made.model_copy(
        update={"recipient": message.recipient, "channel": message.channel, "content_type": content_type}
    )


def reference_tokens(messages):
    """What the reference renders for training; it only lets the last message return when that is an answer."""
    conversation = Conversation.from_messages([reference(message) for message in messages])
    if messages[-1].terminator == "return":
        return encoding().render_conversation_for_training(conversation, KEEP)
    return encoding().render_conversation(conversation, KEEP)


def harmless(text):
    return not any(special in text for special in SPECIAL_STRINGS)


PIECES = [
    "<|",
    "|>",
    "<",
    "end",
    "<|end",
    "<|refusal|>",
    "|",
    " ",
    "\n",
    "\n\n",
    "to=f",
    "json",
    "é",
    "😀",
    "\u0301",
    "\x00",
    "1",
]
BODIES = (st.text() | st.lists(st.sampled_from(PIECES)).map("".join)).filter(harmless)
NAMES = st.sampled_from(["get_order", "f", "a.b-c", "Überprüfe", "x_1", "f."]).map("functions.{}".format)
JSON_OBJECTS = st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=2).map(
    lambda found: str(found).replace("'", '"')
)


@st.composite
def exchanges(draw):
    """A call and its result, maybe after a thought."""
    thoughts = draw(
        st.lists(BODIES.map(lambda body: HarmonyMessage("assistant", body, channel="analysis")), max_size=1)
    )
    if draw(st.booleans()):
        name, body = draw(NAMES), draw(JSON_OBJECTS)
        call = HarmonyMessage("assistant", body, name, "commentary", "json", draw(st.booleans()), "call")
    else:
        name, named = "python", draw(st.sampled_from([None, "code"]))
        call = HarmonyMessage("assistant", draw(BODIES), name, "analysis", named, named is None, "call")
    result = HarmonyMessage(name, draw(BODIES), "assistant", call.channel)
    return [*thoughts, call, result]


@st.composite
def turns(draw):
    steps = draw(st.lists(exchanges(), max_size=2))
    thoughts = draw(
        st.lists(BODIES.map(lambda body: HarmonyMessage("assistant", body, channel="analysis")), max_size=1)
    )
    answer = HarmonyMessage("assistant", draw(BODIES), channel="final")
    return [HarmonyMessage("user", draw(BODIES)), *chain(*steps), *thoughts, answer]


@st.composite
def conversations(draw):
    """A conversation as it should be: with or without instructions, and with an end that is to be learnt or not."""
    before = [HarmonyMessage(role, draw(BODIES)) for role in ("system", "developer") if draw(st.booleans())]
    messages = [*before, *chain(*draw(st.lists(turns(), min_size=1, max_size=3)))]
    return [*messages[:-1], replace(messages[-1], terminator=draw(st.sampled_from(["end", "return"])))]


WORDS = st.text(st.characters(exclude_categories=["Cs", "Z"]), min_size=1, max_size=6).filter(
    lambda word: not any(c.isspace() for c in word) and "<" not in word and not word.startswith("to=") and word != "all"
)


@st.composite
def any_messages(draw):
    """A message that can be written, whether or not it makes sense."""
    author = draw(st.sampled_from(sorted(ROLES)) | WORDS)
    recipient = draw(WORDS if author not in ROLES else st.none() | WORDS)
    content_type = draw(st.none() | WORDS) if recipient else None
    constrained = draw(st.booleans()) if content_type else True
    channel, terminator = draw(st.none() | WORDS), draw(st.sampled_from(["end", "call", "return"]))
    return HarmonyMessage(author, draw(BODIES), recipient, channel, content_type, constrained, terminator)


def test_the_golden_conversation():
    assert render(GOLDEN) == GOLDEN_TEXT
    assert [message.message for message in parse(GOLDEN_TEXT)] == GOLDEN
    assert encoding().decode(reference_tokens(GOLDEN)) == GOLDEN_TEXT


@given(conversations())
@max_examples(60)
def test_a_conversation_is_read_back_and_is_the_references(messages):
    text = render(messages)
    assert [message.message for message in parse(text)] == messages == official(text)
    assert render(parse(text)) == text
    assert cross_check(text, messages) is None
    assert not faults(parse(text), off=frozenset({"S22"}))
    tokens = reference_tokens(messages)
    assert encoding().decode_utf8(tokens) == text
    assert encode(messages).ids.tolist() == tokens


@given(st.lists(any_messages(), min_size=1, max_size=4))
@max_examples(120)
def test_every_written_value_is_read_back_alike(messages):
    text = render(messages)
    assert [message.message for message in parse(text)] == messages
    assert cross_check(text, messages) is None


WILD = st.sampled_from(
    ["a", "", " ", "to=", "to=x", "all", "a b", "a\n", "<|", "<|end|>", "x<|channel|>y", "<|constrain|>j", "\u3000"]
)


@given(
    st.builds(
        HarmonyMessage,
        WILD | st.sampled_from(sorted(ROLES)),
        BODIES,
        st.none() | WILD,
        st.none() | WILD,
        st.none() | WILD,
    )
)
@max_examples(300)
def test_headers_are_rejected_or_read_back(message):
    try:
        text = render([message])
    except InputError:
        return
    assert [found.message for found in parse(text)] == [message]


REFUSED = {
    "a tool without a recipient": HarmonyMessage("python", "x"),
    "an author without a name": HarmonyMessage("", "x"),
    "an empty channel": HarmonyMessage("assistant", "x", channel=""),
    "an empty recipient": HarmonyMessage("assistant", "x", ""),
    "everybody": HarmonyMessage("assistant", "x", "all"),
    "a content type without a recipient": HarmonyMessage("assistant", "x", channel="final", content_type="json"),
    "the same, plain": HarmonyMessage("assistant", "x", channel="final", content_type="json", constrained=False),
    "a blank in a name": HarmonyMessage("assistant", "x", "functions.get order", "commentary"),
    "a tag in a name": HarmonyMessage("assistant", "x", channel="final<|message|>y"),
    "a type that reads as a recipient": HarmonyMessage("assistant", "x", "f", "analysis", "to=g", constrained=False),
    "half a character": HarmonyMessage("user", "x\ud83d"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_unreadable_headers_are_rejected(why):
    with pytest.raises(InputError, match=r"message 1 by .* cannot be written"):
        render([HarmonyMessage("user", "x"), REFUSED[why]])


def test_no_body_with_a_special_string_is_written():
    for special in SPECIAL_STRINGS:
        with pytest.raises(InputError, match=r"at character 3.*escape or reject"):
            render([HarmonyMessage("user", f"é a{special}b")])


def test_constrained_needs_a_content_type():
    message = HarmonyMessage("user", "x", constrained=False)
    assert render([message]) == "<|start|>user<|message|>x<|end|>"
    assert cross_check(render([message]), [message]) is None


def test_zero_messages_give_empty_text():
    with pytest.raises(InputError, match="without messages"):
        render([])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<|start|>user<|message|>x", "does not end"),
        ("no tags", "rejects the text"),
        ("<|start|>user:bob<|message|>x<|end|>", "Unknown role"),
    ],
)
def test_reference_rejections_are_reported(text, says):
    found = official(text)
    assert (found.code, found.name) == ("R01", "reference_refuses")
    assert says in found.detail
    assert cross_check(text, []) == found


@pytest.mark.parametrize(
    "ours",
    [
        [HarmonyMessage("user", "x")],
        [HarmonyMessage("user", "x"), HarmonyMessage("user", "z")],
        [HarmonyMessage("user", "x"), HarmonyMessage("user", "y", terminator="call")],
        [HarmonyMessage("user", "x"), HarmonyMessage("user", "y", channel="final")],
        [HarmonyMessage("user", "x"), HarmonyMessage("user", "y"), HarmonyMessage("user", "y")],
    ],
)
def test_different_reference_readings_are_reported(ours):
    text = "<|start|>user<|message|>x<|end|><|start|>user<|message|>y<|end|>"
    assert cross_check(text, ours).code == "R02"
    assert cross_check(text, parse(text)) is None


@pytest.mark.parametrize("body", ["a" * (1 << 18), " " * (1 << 18), "中" * (1 << 17)])
def test_long_runs_of_a_character_end(body):
    """The library's own encoder takes minutes for them."""
    messages = [HarmonyMessage("user", body)]
    assert cross_check(render(messages), messages) is None
