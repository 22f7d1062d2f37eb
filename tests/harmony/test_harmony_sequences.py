"""Sequences of Harmony: their ids are the reference's, and what is trained on is what a model would write at inference."""

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.encoding import ROLES, Batch
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.compose import compose
from tokenmill.tasks.harmony.converters import openai_messages
from tokenmill.tasks.harmony.message import HarmonyMessage, Policy
from tokenmill.tasks.harmony.render import render
from tokenmill.tasks.harmony.sequences import (
    ANALYSIS,
    ANSWER,
    CALL,
    NONE,
    HarmonyConversation,
    HarmonyRenderer,
    encode,
    literal_encoder,
)
from tokenmill.tasks.harmony.vocabulary import IDS, encoding

from tests.examples import max_examples
from tests.harmony.test_render import GOLDEN, any_messages, conversations, reference_tokens
from tests.peers.harmony_tokens import SPECIAL_STRINGS

FULL = LossPolicy()
TAGGED = st.lists(st.sampled_from([*sorted(SPECIAL_STRINGS)[:4], *IDS, "<|", " ", "a", "\n", "assistant", "é"])).map("".join)  # fmt: skip


def trained(encoded, conversation=0):
    """The runs of tokens that are trained on, as text."""
    start, stop = encoded.offsets[conversation : conversation + 2]
    loss = np.concatenate([[0], encoded.loss[start:stop], [0]])
    borders = np.flatnonzero(np.diff(loss)) + start
    return [encoding().decode(encoded.ids[a:b].tolist()) for a, b in zip(borders[::2], borders[1::2], strict=True)]


def written_by_the_model(ids):
    """Which tokens of a conversation a model writes, given what stands before: it is prompted, and writes until it stops.

    Prompts end in `<|start|>assistant`. It stops behind `<|return|>` and `<|call|>`, and an answer with `<|return|>`,
    whatever is stored there.
    """
    start, end, channel = IDS["<|start|>"], IDS["<|end|>"], IDS["<|channel|>"]
    (assistant,), (final,) = encoding().encode("assistant"), encoding().encode("final")
    flags, writing, answering = [], False, False
    for place, token in enumerate(ids):
        if token == start:
            writing, answering = writing and ids[place + 1] == assistant, False
        answering = answering or (token == channel and ids[place + 1] == final)
        is_history = token == end and answering
        flags.append(int(writing and not is_history))
        stops = is_history or token in {IDS["<|return|>"], IDS["<|call|>"]}
        writing = (writing and not stops) or ids[place - 1 : place + 1] == [start, assistant]
    return flags


def sequences(messages, policy=FULL, splits=True, **options):
    return HarmonyRenderer(policy, splits).sequences(HarmonyConversation(messages, **options))


# The ids are the reference's.


@pytest.mark.slow
@given(st.lists(any_messages(), min_size=1, max_size=4))
@max_examples(60)
def test_ids_match_the_reference_for_any_text(messages):
    ids = list(chain(*(encode([[each]], FULL).ids.tolist() for each in messages)))
    assert ids == encoding().encode(render(messages), allowed_special="all")
    assert encode([messages], FULL).ids.tolist() == ids


@given(st.lists(TAGGED, min_size=1, max_size=4))
@max_examples(60)
def test_control_strings_in_bodies_are_text_as_for_the_reference(bodies):
    speakers = [("user", None), ("assistant", "final"), ("user", None), ("assistant", "analysis")]
    messages = [HarmonyMessage(author, body, channel=channel) for (author, channel), body in zip(speakers, bodies, strict=False)]  # fmt: skip
    encoded = encode([messages], FULL)
    assert encoded.ids.tolist() == reference_tokens(messages)
    assert np.count_nonzero(encoded.ids == IDS["<|start|>"]) == len(messages)


# What is trained on.


@given(conversations())
@max_examples(100)
def test_trained_tokens_are_written_at_inference(messages):
    encoded = encode([messages], FULL)
    assert encoded.loss.tolist() == written_by_the_model(encoded.ids.tolist())


CALLS = [
    ' to=functions.get_order<|channel|>commentary <|constrain|>json<|message|>{"id":"A1"}<|call|>',
    " to=python<|channel|>analysis code<|message|>1 + 1<|call|>",
]
THOUGHT = "<|channel|>analysis<|message|>Look it up.<|end|>"
FINAL = "<|channel|>final<|message|>It was sent.<|return|>"
AGAIN = [
    *GOLDEN[:-1],
    replace(GOLDEN[-1], terminator="end"),
    HarmonyMessage("user", "And now?"),
    HarmonyMessage("assistant", "Still.", channel="analysis"),
    HarmonyMessage("assistant", "I look.", channel="commentary"),
    HarmonyMessage("assistant", "Yes.", channel="final", terminator="return"),
]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (FULL, [f"{THOUGHT}<|start|>assistant{CALLS[0]}", CALLS[1], FINAL]),
        (LossPolicy(reasoning=False), [f"<|start|>assistant{CALLS[0]}", CALLS[1], FINAL]),
        (LossPolicy(tool_calls=False), [THOUGHT, FINAL]),
        (LossPolicy(reasoning=False, tool_calls=False), [FINAL]),
        (
            LossPolicy(end_of_turn=False),
            [
                THOUGHT.removesuffix("<|end|>"), f"<|start|>assistant{CALLS[0]}".removesuffix("<|call|>"),
                CALLS[1].removesuffix("<|call|>"), FINAL.removesuffix("<|return|>"),
            ],
        ),
        (LossPolicy("last_turn"), [f"{THOUGHT}<|start|>assistant{CALLS[0]}", CALLS[1], FINAL]),
        (LossPolicy("final_only"), [FINAL]),
        (LossPolicy("final_only", end_of_turn=False), [FINAL.removesuffix("<|return|>")]),
        (
            LossPolicy("assistant_bodies"),
            ["Look it up.<|end|>", '{"id":"A1"}<|call|>', "1 + 1<|call|>", "It was sent.<|return|>"],
        ),
        (LossPolicy("assistant_bodies", reasoning=False, tool_calls=False), ["It was sent.<|return|>"]),
    ],
    ids=str,
)  # fmt: skip
def test_policy_names_trained_parts(policy, expected):
    assert trained(encode([GOLDEN], policy)) == expected


LAST = "<|channel|>analysis<|message|>Still.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (LossPolicy("assistant_bodies", end_of_turn=False), ["Look it up.", '{"id":"A1"}', "1 + 1", "It was sent.", "Still.", "I look.", "Yes."]),
        (
            LossPolicy("assistant_bodies"),
            [
                "Look it up.<|end|>", '{"id":"A1"}<|call|>', "1 + 1<|call|>", "It was sent.",
                "Still.<|end|>", "I look.<|end|>", "Yes.<|return|>",
            ],
        ),
        (
            FULL,
            [f"{THOUGHT}<|start|>assistant{CALLS[0]}", CALLS[1], FINAL.removesuffix("<|return|>"), LAST],
        ),
        (LossPolicy("last_turn"), [LAST]),
        (LossPolicy("final_only"), ["<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"]),
    ],
)  # fmt: skip
def test_policies(policy, expected):
    """An answer that has become history ends with an `<|end|>` that nobody would write."""
    assert trained(encode([AGAIN], policy)) == expected


def test_every_token_is_of_one_part():
    encoded = encode([AGAIN, GOLDEN], FULL)
    wanted = {
        NONE: ["user", "system", "developer", "functions.get_order", "python"],
        ANALYSIS: ["Look it up.", "Still."], CALL: ['{"id":"A1"}', "1 + 1"], ANSWER: ["It was sent.", "I look.", "Yes."],
    }  # fmt: skip
    assert encoded.offsets.tolist() == [0, len(reference_tokens(AGAIN)), len(encoded.ids)]
    starts = [*np.flatnonzero(encoded.ids == IDS["<|start|>"]), len(encoded.ids)]
    messages = [*AGAIN, *GOLDEN]
    for message, (start, stop) in zip(messages, pairwise(starts), strict=True):
        (part,) = set(encoded.parts[start:stop].tolist())
        assert message.body in wanted[part] or message.author in wanted[part]
    assert not encoded.loss[encoded.parts == NONE].any()
    assert (encoded.ids.dtype, encoded.loss.dtype, encoded.parts.dtype) == (np.int32, np.int8, np.int8)


def test_last_message_without_answer_is_not_final():
    calling = GOLDEN[:5]
    assert trained(encode([calling], LossPolicy("final_only"))) == []
    assert trained(encode([calling], FULL)) == [f"{THOUGHT}<|start|>assistant{CALLS[0]}"]
    remark = [*GOLDEN, HarmonyMessage("assistant", "I look.", channel="commentary")]
    assert trained(encode([remark], LossPolicy("final_only"))) == []


def test_a_tool_may_be_called_like_a_role():
    odd = [
        HarmonyMessage("user", "?"), HarmonyMessage("template", "1", "assistant"), HarmonyMessage("padding", "", "assistant")
    ]  # fmt: skip
    (pieces,) = sequences([*odd, HarmonyMessage("assistant", "a", channel="final")])
    assert [ROLES[each.role] for each in pieces if each.token == IDS["<|start|>"]] == [
        "user",
        "tool",
        "tool",
        "assistant",
    ]


# Texts and messages, training and scoring: one mask.


def arrays(sequences):
    """Ids and loss of sequences of pieces, as lists."""
    batch = Batch()
    for pieces in sequences:
        batch.add(pieces)
    found = batch.encode(literal_encoder())
    spans = list(pairwise(found.offsets.tolist()))
    return [(found.ids[a:b].tolist(), found.trained[a:b].tolist()) for a, b in spans]


POLICIES = [
    FULL, LossPolicy("assistant_bodies"), LossPolicy("assistant_bodies", end_of_turn=False), LossPolicy("last_turn"),
    LossPolicy("final_only"), LossPolicy(reasoning=False), LossPolicy(tool_calls=False),
]  # fmt: skip


@given(st.lists(conversations(), max_size=3), st.sampled_from(POLICIES))
@max_examples(60)
def test_scoring_sees_what_training_sees(given_conversations, policy):
    scored = encode([render(messages) for messages in given_conversations], policy)
    assert np.array_equal(scored.ids, encode(given_conversations, policy).ids)
    for number, messages in enumerate(given_conversations):
        found = sequences(messages, policy)
        start, stop = scored.offsets[number : number + 2]
        if isinstance(found, Rejected):
            assert (found.reason, scored.loss[start:stop].any()) == ("nothing_trained", False)
        else:
            assert arrays(found) == [(scored.ids[start:stop].tolist(), scored.loss[start:stop].tolist())]


def test_non_harmony_text_is_rejected_with_its_position():
    with pytest.raises(InputError, match=r"^text 1, character 24: the text ends within a body.*E04"):
        encode([render(GOLDEN), "<|start|>user<|message|>"], FULL)


# Conversations to sequences.


@pytest.mark.parametrize(
    ("messages", "policy", "reason", "words"),
    [
        ([*GOLDEN, HarmonyMessage("user", "And now?"), GOLDEN[-1]], FULL, "return_not_last", "message 9 of 11"),
        (GOLDEN[:3], FULL, "nothing_trained", ""),
        (GOLDEN[:5], LossPolicy(reasoning=False, tool_calls=False), "nothing_trained", ""),
    ],
)
def test_conversations_without_a_sequence(messages, policy, reason, words):
    found = sequences(messages, policy)
    assert (found.reason, words in found.detail) == (reason, True)


def test_an_answer_behind_an_answer_and_a_call_behind_a_call_are_prompted_for():
    again = [*GOLDEN[:3], *(HarmonyMessage("assistant", body, channel="final") for body in "ab")]
    assert trained(encode([again], FULL)) == [f"<|channel|>final<|message|>{body}" for body in "ab"]
    assert trained(encode([again], LossPolicy("final_only"))) == ["<|channel|>final<|message|>b"]
    grouped = [GOLDEN[2], GOLDEN[4], GOLDEN[6], GOLDEN[5], GOLDEN[7]]
    encoded = encode([grouped], FULL)
    assert trained(encoded) == CALLS
    assert encoded.loss.tolist() == written_by_the_model(encoded.ids.tolist())


def test_text_keeps_its_reasoning():
    assert arrays(sequences(AGAIN)) == [(reference_tokens(AGAIN), encode([AGAIN], FULL).loss.tolist())]
    encoded = encode([], FULL)
    assert [each.tolist() for each in (encoded.ids, encoded.loss, encoded.parts, encoded.offsets)] == [[], [], [], [0]]


WORDS = st.text("ab <|é", max_size=6)


@st.composite
def chats(draw):
    """A chat of several turns, some of them with thoughts, calls, two questions or two answers, maybe greeted."""
    messages = [{"role": "system", "content": "S"}] if draw(st.booleans()) else []
    messages += [{"role": "assistant", "content": "Hi.", "reasoning_content": "Greet."}] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 4))):
        messages += [{"role": "user", "content": draw(WORDS)} for _ in range(draw(st.sampled_from([1, 1, 2])))]
        calls = draw(st.booleans())
        if calls:
            call = {"id": str(turn), "type": "function", "function": {"name": "f", "arguments": {"a": draw(WORDS)}}}
            messages.append(
                {"role": "assistant", "content": draw(WORDS), "reasoning_content": draw(WORDS), "tool_calls": [call]}
            )
            messages.append({"role": "tool", "content": draw(WORDS), "tool_call_id": str(turn)})
        for _ in range(draw(st.sampled_from([0, 1, 2] if calls else [1, 1, 2]))):
            messages.append({"role": "assistant", "content": draw(WORDS), "reasoning_content": draw(WORDS)})
    return messages


def composed(messages, thoughts="last_turn"):
    return compose(openai_messages({"messages": messages}), Policy(thoughts=thoughts), literally=True).messages


@given(chats())
@max_examples(60)
def test_a_turn_is_learned_in_the_conversation_that_ends_with_it(messages):
    """Its sequence is the conversation up to there, composed as such, of which the last turn is learned."""
    everything = composed(messages, "keep_all")
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    turns = pairwise([0, *asked, len(messages)])
    ends = [stop for start, stop in turns if any(each["role"] == "assistant" for each in messages[start:stop])]
    prefixes = [composed(messages[:end]) for end in ends]
    expected = [(encoded.ids.tolist(), encoded.loss.tolist()) for encoded in (encode([each], LossPolicy("last_turn")) for each in prefixes)]  # fmt: skip
    forgotten = len(composed(messages)) < len(everything)
    found = arrays(sequences(everything, forgets=True))
    if forgotten:
        assert found == expected
    else:
        assert [ids for ids, _ in found] == [ids for ids, _ in expected[-1:]]
    for policy, splits in ((FULL, False), (LossPolicy("last_turn"), True), (LossPolicy("final_only"), True)):
        whole, found = encode([composed(messages)], policy), sequences(everything, policy, splits, forgets=True)
        if whole.loss.any():
            assert arrays(found) == [(whole.ids.tolist(), whole.loss.tolist())]
        else:
            assert found.reason == "nothing_trained"
