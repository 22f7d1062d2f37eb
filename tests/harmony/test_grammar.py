"""The strict parser: what it accepts is the grammar's and reads the same in the reference; faults stand where they are."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.harmony.grammar import CODES, TAG, Fault, ParsedMessage, bodies, parse
from tokenmill.tasks.harmony.message import HarmonyMessage
from tokenmill.tasks.harmony.render import cross_check, official, render

from tests.examples import max_examples
from tests.peers.harmony_tokens import SPECIAL_STRINGS

HERE = "‸"
"""Marks the offset of the fault; it is taken out before the text is parsed."""

USER = "<|start|>user<|message|>Hi<|end|>"
CALL = "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"

BAD = {
    "E01": ["‸"],
    "E02": [
        "‸hello",
        "‸\n" + USER,
        USER + "‸\n" + USER,
        USER + "‸ ",
        USER + "‸<|end|>",
        "‸<|message|>x<|end|>",
        "‸<|endoftext|>",
        USER + "‸<|endoftext|>",
        "‸<|end",
        "‸start|>user<|message|>x<|end|>",
    ],
    "E03": [
        "<|start|>‸",
        "<|start|>user‸",
        "<|start|>user‸<|end|>",
        "<|start|>assistant<|channel|>final‸<|return|>",
        "<|start|>assistant‸<|start|>user<|message|>x<|end|>",
        "<|start|>nobody‸<|call|>",
        "<|start|>assistant to=f<|channel|>analysis <|constrain|>json‸<|call|>",
    ],
    "E04": ["<|start|>user<|message|>‸", "<|start|>user<|message|>half a mess‸", USER + "<|start|>user<|message|><|end‸"],
    "E05": ["<|start|>user<|message|>x‸<|start|>user<|message|>y<|end|>", "<|start|>user<|message|>‸<|start|>"],
    "E06": [
        "<|start|>user<|message|>x‸<|message|>y<|end|>",
        "<|start|>user<|message|>‸<|channel|><|end|>",
        "<|start|>user<|message|>‸<|endoftext|><|end|>",
    ],
    "E07": [
        "<|start|>‸<|message|>x<|end|>",
        "<|start|>‸<|channel|>final<|message|>x<|end|>",
        "<|start|>‸ assistant<|channel|>final<|message|>x<|end|>",
        "<|start|>‸to=assistant<|message|>x<|end|>",
        USER + "<|start|>‸<|constrain|>json<|message|>x<|end|>",
    ],
    "E08": [
        "<|start|>‸python<|message|>x<|end|>",
        "<|start|>‸tool<|message|>x<|end|>",
        "<|start|>‸User<|message|>x<|end|>",
        "<|start|>‸user:bob<|message|>x<|end|>",
        USER + "<|start|>‸functions.f<|channel|>commentary to=assistant<|message|>x<|end|>",
        "<|start|>‸nobody <|constrain|>json<|message|>x<|end|>",
    ],
    "E09": [
        "<|start|>assistant<|channel|>‸<|message|>x<|end|>",
        "<|start|>assistant<|channel|>‸ final<|message|>x<|end|>",
        "<|start|>assistant<|channel|>‸to=f<|message|>x<|call|>",
        "<|start|>assistant to=f<|channel|>‸<|constrain|>json<|message|>x<|call|>",
    ],
    "E10": [
        "<|start|>assistant<|channel|>analysis‸<|channel|>final<|message|>x<|end|>",
        "<|start|>assistant to=f <|constrain|>json‸<|channel|>analysis<|message|>x<|call|>",
    ],
    "E11": [
        "<|start|>assistant to=a ‸to=b<|channel|>analysis<|message|>x<|call|>",
        "<|start|>assistant to=a<|channel|>analysis ‸to=b<|message|>x<|call|>",
        "<|start|>assistant<|channel|>analysis to=a ‸to=b<|message|>x<|call|>",
        "<|start|>assistant ‸to=<|channel|>analysis<|message|>x<|call|>",
        "<|start|>assistant ‸to=all<|channel|>analysis<|message|>x<|call|>",
        "<|start|>assistant ‸ to=f<|channel|>analysis<|message|>x<|call|>",
        "<|start|>assistant to=f ‸<|channel|>analysis<|message|>x<|call|>",
        "<|start|>assistant ‸json<|message|>x<|end|>",
        "<|start|>assistant to=f ‸json<|channel|>analysis<|message|>x<|call|>",
        "<|start|>assistant<|channel|>final ‸json<|message|>x<|end|>",
        "<|start|>assistant<|channel|>final ‸<|message|>x<|end|>",
        "<|start|>assistant<|channel|>commentary ‸json to=f<|message|>x<|call|>",
        "<|start|>assistant to=f<|channel|>commentary json ‸code<|message|>x<|call|>",
        "<|start|>assistant to=f<|channel|>commentary ‸json <|constrain|>json<|message|>x<|call|>",
        "<|start|>assistant to=f<|channel|>commentary ‸ <|constrain|>json<|message|>x<|call|>",
        "<|start|>‸assistant\nto=f<|channel|>analysis<|message|>x<|call|>",
        "<|start|>assistant<|channel|>‸ana\u00a0lysis<|message|>x<|end|>",
        "<|start|>assistant<|channel|>‸fi<al<|message|>x<|end|>",
        "<|start|>assistant<|channel|>‸fin<|al<|message|>x<|end|>",
        "<|start|>assistant‸<|endoftext|><|channel|>final<|message|>x<|end|>",
        "<|start|>assistant<|channel|>fin‸<|reserved_200014|>al<|message|>x<|end|>",
    ],
    "E12": [
        "<|start|>assistant to=f<|channel|>commentary <|constrain|>‸ json<|message|>x<|call|>",
        "<|start|>assistant to=f<|channel|>commentary <|constrain|>‸json <|message|>x<|call|>",
        "<|start|>assistant to=f<|channel|>commentary <|constrain|>‸<|message|>x<|call|>",
        "<|start|>assistant to=f<|channel|>commentary <|constrain|>json‸<|constrain|>json<|message|>x<|call|>",
        "<|start|>assistant<|channel|>final ‸<|constrain|>json<|message|>x<|end|>",
        "<|start|>assistant ‸<|constrain|>json<|message|>x<|end|>",
    ],
    "E13": ["<|start|>user<|message|>é‸\ud83d<|end|>", "‸\udc00"],
}  # fmt: skip


def marked(text):
    """The text without its mark, and where that stood."""
    before, mark, after = text.partition(HERE)
    assert mark
    return before + after, len(before)


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in BAD.items() for text in texts])
def test_a_fault_is_found_where_it_is(code, text):
    text, offset = marked(text)
    found = parse(text)
    assert isinstance(found, Fault)
    assert (found.code, found.name, found.offset) == (code, CODES[code], offset)
    assert found.detail
    if text:  # behind good messages, too
        found = parse(USER + CALL + text)
        is_outside = code == "E13" and not text.startswith("<|start|>") and found.code == "E02"
        assert (found.code, found.offset) == ("E02" if is_outside else code, offset + len(USER + CALL))


def test_every_code_has_a_case():
    assert list(BAD) == list(CODES) == [f"E{number:02}" for number in range(1, 14)]


@pytest.mark.parametrize("value", [None, 5, b"<|start|>user<|message|>x<|end|>", ["x"], {}, float("nan")])
def test_non_strings_are_not_text(value):
    found = parse(value)
    assert isinstance(found, Fault)
    assert (found.code, found.name, found.offset) == ("E13", "not_str", 0)
    assert type(value).__name__ in found.detail


def test_the_expression_finds_the_special_strings_and_no_other():
    assert {special for special in SPECIAL_STRINGS if TAG.fullmatch(special)} == SPECIAL_STRINGS
    numbers = range(198_000, 203_000)
    near = {f"<|reserved_{number}|>" for number in numbers} | {f"<|reserved_{number}1|>" for number in numbers}
    near |= {
        "<|reserved_٢٠٠٠١٤|>",
        "<|refusal|>",
        "<|untrusted|>",
        "<|START|>",
        "<| end |>",
        "<|end",
        "<|end|",
        "|end|>",
    }
    assert {text for text in near if TAG.search(text)} == near & SPECIAL_STRINGS


@pytest.mark.parametrize("place", ["", "before ", "é😀 "])
def test_special_string_in_a_body_is_rejected_at_its_offset(place):
    wrong = {}
    for special in SPECIAL_STRINGS:
        head = f"{USER}<|start|>user<|message|>{place}"
        found = parse(f"{head}{special} after<|end|>")
        expected = ("E06", len(head))
        if special == "<|start|>":
            expected = ("E05", len(head))
        elif special in {"<|end|>", "<|call|>", "<|return|>"}:  # the body ends there, and what follows is outside
            expected = ("E02", len(head) + len(special))
        if (found.code, found.offset) != expected:
            wrong[special] = found
    assert not wrong


@pytest.mark.parametrize("special", sorted(SPECIAL_STRINGS - {"<|channel|>", "<|constrain|>", "<|message|>"})[:40])
def test_special_string_in_a_header_is_rejected_at_its_offset(special):
    found = parse(f"<|start|>assistant<|channel|>fin{special}al<|message|>x<|end|>")
    assert isinstance(found, Fault)
    ending = special in {"<|start|>", "<|end|>", "<|call|>", "<|return|>"}
    assert (found.code, found.offset) == ("E03" if ending else "E11", len("<|start|>assistant<|channel|>fin"))


GOOD = {
    USER: HarmonyMessage("user", "Hi"),
    "<|start|>user<|message|><|end|>": HarmonyMessage("user", ""),
    "<|start|>system<|message|>\n a <|b|> |> <|end\n<|end|>": HarmonyMessage("system", "\n a <|b|> |> <|end\n"),
    "<|start|>assistant<|channel|>final<|message|>x<|return|>": HarmonyMessage(
        "assistant", "x", channel="final", terminator="return"
    ),
    CALL: HarmonyMessage("assistant", "{}", "functions.f", "commentary", "json", terminator="call"),
    "<|start|>assistant to=python<|channel|>analysis code<|message|>x<|call|>": HarmonyMessage(
        "assistant", "x", "python", "analysis", "code", constrained=False, terminator="call"
    ),
    "<|start|>assistant to=python code<|message|>x<|call|>": HarmonyMessage(
        "assistant", "x", "python", None, "code", constrained=False, terminator="call"
    ),
    "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>": HarmonyMessage(
        "functions.f", "{}", "assistant", "commentary"
    ),
    "<|start|>user:bob to=assistant<|message|>x<|end|>": HarmonyMessage("user:bob", "x", "assistant"),
    "<|start|>assistant to=to=f<|channel|>analysis<|message|>x<|call|>": HarmonyMessage(
        "assistant", "x", "to=f", "analysis", terminator="call"
    ),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_message_is_read_as_the_reference_reads_it(text):
    (found,) = parse(text)
    assert found.message == GOOD[text]
    assert official(text) == [GOOD[text]]
    assert render([found]) == text


@pytest.mark.parametrize(
    "text",
    [
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "<|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>",
        "<|start|>assistant to=functions.f<|channel|>commentary<|constrain|>json<|message|>{}<|call|>",
    ],
)
def test_what_models_write_otherwise_is_read_and_written_canonically(text):
    (found,) = parse(text)
    assert found.message == GOOD[CALL]
    assert cross_check(text, [found]) is None
    assert render([found]) == CALL


def test_messages_know_their_places():
    text = USER + CALL + "<|start|>assistant<|channel|>final<|message|>é😀\n<|return|>"
    found = parse(text)
    assert [text[each.start : each.end] for each in found] == [USER, CALL, text[len(USER + CALL) :]]
    assert [text[each.body_start : each.body_end] for each in found] == ["Hi", "{}", "é😀\n"]
    assert [each.body for each in found] == ["Hi", "{}", "é😀\n"]
    assert [each.start for each in found] == [0, len(USER), len(USER + CALL)]


def test_message_and_position_are_separate():
    (one, other) = parse(USER + USER)
    assert one != other
    assert one.message == other.message == HarmonyMessage("user", "Hi")
    assert isinstance(one, ParsedMessage)


NAME = r"(?!to=)[^\s<]+"
ROLE = r"(?:system|developer|user|assistant)(?=<\|)"
TO = r" to=(?!all(?:\s|<\|))[^\s<]+"
TYPE = rf"(?: ?<\|constrain\|>[^\s<]+| {NAME})?"
HEADER = rf"(?:{ROLE}(?:<\|channel\|>{NAME}(?:{TO}{TYPE})?)?|{NAME}{TO}(?:<\|channel\|>{NAME})?{TYPE})"
SPECIALS = "|".join(map(re.escape, sorted(SPECIAL_STRINGS)))
BODY = rf"(?:(?!{SPECIALS})[^\ud800-\udfff])*"
GRAMMAR = re.compile(rf"(?:<\|start\|>{HEADER}<\|message\|>{BODY}<\|(?:end|call|return)\|>)+", re.DOTALL)
"""The whole grammar as one expression, written apart from the parser."""

HEADER_PIECES = [
    "assistant", "user", "functions.f", "python", "to=", " to=f", " to=functions.f", " to=assistant", " to=all", " ", "\n",
    "<|channel|>", "<|channel|>analysis", "<|channel|>final", " <|constrain|>", "<|constrain|>json", " json", "<|", "|>",
    "<", "\u00a0", "é", "all", " code", "<|start|>", "<|endoftext|>", "<|reserved_200014|>",
]  # fmt: skip
BODIES = st.text() | st.lists(
    st.sampled_from(["<|", "|>", "end", "<|end", "a", " ", *sorted(SPECIAL_STRINGS)[:9]])
).map("".join)
AUTHORS = [*["assistant"] * 4, "user", "functions.f to=assistant", "functions.f", "python", "to=f", ""]
RECIPIENTS = [*[""] * 4, " to=f", " to=functions.f", " to=assistant", " to=all", " "]
CHANNELS = ["", *["<|channel|>analysis"] * 4, "<|channel|>to=f"]
TYPES = ["", "", " <|constrain|>json", "<|constrain|>json", " json", " <|constrain|> json", " json code"]
HEADERS = st.tuples(*map(st.sampled_from, [AUTHORS, RECIPIENTS, CHANNELS, RECIPIENTS, TYPES])).map("".join)
MESSAGES = st.builds(
    "{}{}{}{}{}".format,
    st.sampled_from(["<|start|>"] * 19 + [" <|start|>"]),
    HEADERS | HEADERS | st.lists(st.sampled_from(HEADER_PIECES), max_size=5).map("".join),
    st.sampled_from(["<|message|>"] * 19 + [""]),
    BODIES | st.text(),
    st.sampled_from(["<|end|>", "<|call|>", "<|return|>"] * 4 + ["", "<|end|>\n"]),
)


ANY_PIECES = st.sampled_from([*HEADER_PIECES, *sorted(SPECIAL_STRINGS)[:8], "<|message|>", "<|start|>", "x"])


@given(st.lists(MESSAGES, max_size=2).map("".join) | st.lists(ANY_PIECES, max_size=12).map("".join))
@max_examples(500)
@example("<|start|>assistant to=all<|channel|>final<|message|>x<|end|>")
@example("<|start|>assistant<|channel|>final <|constrain|>json<|message|>x<|end|>")
def test_exactly_the_grammar_is_accepted_and_the_reference_reads_the_same(text):
    found = parse(text)
    assert isinstance(found, list) == bool(GRAMMAR.fullmatch(text)), found
    if isinstance(found, Fault):
        assert 0 <= found.offset <= len(text)
        return
    assert "".join(text[each.start : each.end] for each in found) == text
    assert list(bodies(text.encode())) == [(each.author, each.body.encode()) for each in found]
    assert cross_check(text, found) is None
    assert [each.message for each in parse(render(found))] == [each.message for each in found]
