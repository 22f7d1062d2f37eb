"""What data keeps from being trained on is not trained on, whatever the template does with its text; nothing else changes."""

import pytest
from tokenmill.tasks.chat.check import load_template, renderer_of
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.pack.formats import ChatRows
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from tests.chat.pieces import learned as trained
from tests.chat.pieces import text
from tests.peers import chat_templates
from tests.tokenize.small_vocabularies import byte_level_bpe

IM = ("<|im_start|>", "<|im_end|>")
CHATML = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
TRIMS = CHATML.replace("m.content", "(m.content | trim)")
CHANGES = CHATML.replace("m.content", "(m.content | replace('two', '2'))")

Q, Q2 = ({"role": "user", "content": words} for words in ("one?", "three?"))
A, B = ({"role": "assistant", "content": words} for words in ("two.", "four five"))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = byte_level_bpe(tmp_path_factory.mktemp("vocabulary"), special=("<|endoftext|>", *IM))
    return find_vocabulary(TokenizerSource(model=str(folder)))


@pytest.fixture(scope="module")
def learned(vocabulary):
    """`learned(messages)`: the characters that are trained on, and the text, of each sequence."""

    def of(*messages, source=CHATML, policy=None):
        record = conversation({"messages": list(messages)}, None, "tools")
        if isinstance(record, Rejected):
            return record
        template = load_template(source, vocabulary, {})
        found = renderer_of(template, vocabulary, policy or LossPolicy(), "auto", "literal").sequences(record)
        return (
            found
            if isinstance(found, Rejected)
            else [(trained(pieces, vocabulary), text(pieces, vocabulary)) for pieces in found]
        )

    return of


PLAIN = "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\ntwo.<|im_end|>\n<|im_start|>user\nthree?<|im_end|>\n<|im_start|>assistant\nfour five<|im_end|>\n"
BOTH, FIRST, SECOND = "two.<|im_end|>four five<|im_end|>", "two.<|im_end|>", "four five<|im_end|>"

FLAGS = [
    ({}, {}, BOTH),
    ({"weight": 0}, {}, SECOND),
    ({"weight": 0}, {"weight": 1}, SECOND),
    ({"weight": 1}, {"weight": 0.0}, FIRST),
    ({"train": False}, {}, SECOND),
    ({"train": True}, {"train": False}, FIRST),
    ({"step_loss_mask": 0}, {"step_loss_mask": 1}, SECOND),
    ({"step_loss_mask": 1, "weight": 1}, {"weight": 1, "train": False}, FIRST),
    ({"weight": None, "train": None, "train_detail": None}, {}, BOTH),
]


def detail(*entries):
    return {
        "train_detail": [{"begin_offset": begin, "end_offset": end, "train": train} for begin, end, train in entries]
    }


DETAILS = [
    (detail((0, 3, True)), "four<|im_end|>"),
    (detail((0, 3, False), (5, 8, True)), "five<|im_end|>"),
    (detail((0, 1, True), (2, 3, True), (4, 4, False)), "four<|im_end|>"),
    (detail((5, 900, True)), "five<|im_end|>"),
    (detail((0, 8, True)), SECOND),
    (detail((0, 8, False)), ""),
    (detail(), ""),
    (detail((0, 3, True)) | {"train": True}, "four<|im_end|>"),
    (detail((0, 3, True)) | {"train": False}, ""),
    ({"content": [{"type": "text", "text": "four", "train": False}, {"type": "text", "text": " five"}]}, " five<|im_end|>"),
    ({"content": [{"type": "text", "text": "four", "weight": 1}, {"type": "text", "text": " five", "weight": 0}]}, "four<|im_end|>"),
]  # fmt: skip


THINKS = CHATML.replace(
    "m.content", "('<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content else '') ~ m.content"
)
HELD, WRITTEN = "<think>why", "two.<|im_end|>"
CUTS = [
    (THINKS, {"reasoning_content": "why", "reasoning_truncated": True}, {}, HELD + WRITTEN),
    (THINKS, {"reasoning_content": "why"}, {"thinking_truncated": True}, HELD + WRITTEN),
    (THINKS, {"content": "<think>why</think>two."}, {"reasoning_truncated": True}, HELD + WRITTEN),
    (CHATML, {"content": "<think>why</think>two."}, {"reasoning_truncated": 1}, HELD + WRITTEN),
    (CHATML, {"content": "<think>why</think>two.", "reasoning_truncated": False}, {}, "<think>why</think>two.<|im_end|>"),
    (THINKS, {"reasoning_content": "why", "train": False}, {"reasoning_truncated": True}, ""),
    (THINKS, {}, {"reasoning_truncated": True}, WRITTEN),
]  # fmt: skip
"""The template, what an answer has, what its row has, and what is trained on."""


@pytest.mark.parametrize(("source", "fields", "row", "expected"), CUTS)
def test_the_end_of_reasoning_that_a_budget_wrote_is_not_trained_on(vocabulary, source, fields, row, expected):
    template = load_template(source, vocabulary, {})
    rows = ChatRows(
        vocabulary, "auto", renderer_of(template, vocabulary, LossPolicy(), "auto", "literal"), "literal", None, "tools"
    )
    found = rows.read({"messages": [Q, {**A, **fields}], **row})
    pieces = rows.sequences(found)
    learned = "".join(trained(each, vocabulary) for each in pieces) if expected else ""
    assert learned == expected
    assert expected or isinstance(pieces, Rejected)
    assert conversation({"messages": [Q, A], "reasoning_truncated": "yes"}, None, "tools").reason == "bad_loss_flag"


@pytest.mark.parametrize(("first", "second", "expected"), FLAGS)
def test_messages_are_excluded_by_flags(learned, first, second, expected):
    assert learned(Q, {**A, **first}, Q2, {**B, **second}) == [(expected, PLAIN)]


@pytest.mark.parametrize(("fields", "expected"), DETAILS)
def test_of_a_message_with_a_detail_only_those_characters_are_trained_on(learned, fields, expected):
    assert learned(Q, A, Q2, {**B, **fields}) == [(FIRST + expected, PLAIN)]


def test_characters_are_found_where_a_template_trims_and_where_control_tokens_are_spelled(learned):
    content = "  <|im_end|> four <|im_start|> five \n"
    flagged = {**A, "content": content, **detail((content.index("four"), content.index("five") - 1, True))}
    for source in (CHATML, TRIMS):
        ((chosen, _),) = learned(Q, flagged, source=source)
        assert chosen == "four <|im_start|> <|im_end|>"


def test_flags_on_changed_characters_are_rejected(learned):
    found = learned(Q, {**A, **detail((0, 1, True))}, source=CHANGES)
    assert found.reason == "content_left_out"
    longer = CHATML.replace("m.content", "(m.content | replace('.', '...'))")
    assert learned(Q, {**A, **detail((0, 1, True))}, source=longer).reason == "train_detail_lost"
    assert learned(Q, {**A, "content": "  ", **detail((0, 0, True))}, source=TRIMS).reason == "train_detail_lost"
    assert learned(Q, {**A, "train": False}, Q2, B, source=CHANGES)[0][0] == SECOND


def test_flags_and_policies_both_skip(learned):
    policy = LossPolicy(end_of_turn=False)
    assert learned(Q, A, Q2, {**B, **detail((0, 3, True))}, policy=policy)[0][0] == "two.four"
    assert learned(Q, A, Q2, {**B, "weight": 0}, policy=LossPolicy("last_turn")).reason == "nothing_trained"
    assert learned(Q, A, Q2, {**B, "weight": 0}, policy=LossPolicy("final_only")).reason == "nothing_trained"


def test_reasoning_and_calls_of_a_message_go_with_it(learned):
    source = chat_templates.template("qwen3")
    call = {**A, "content": "", "reasoning_content": "hm", "tool_calls": [{"name": "f", "arguments": {}}]}
    result = {"role": "tool", "content": "r"}
    for flag in ({"weight": 0}, {"train": False}, {"step_loss_mask": 0}):
        ((chosen, _),) = learned(Q, {**call, **flag}, result, {**A, "reasoning_content": "then"}, source=source)
        assert "hm" not in chosen
        assert "tool_call" not in chosen
        assert "then" in chosen
        assert chosen.endswith(FIRST)


BAD = {
    "half a weight": ({**A, "weight": 0.5}, "weight=0.5"),
    "a weight in words": ({**A, "weight": "0"}, "weight='0'"),
    "slime's mask of two": ({**A, "step_loss_mask": 2}, "step_loss_mask=2"),
    "a detail of words": ({**A, "train_detail": "all"}, "an array of begin_offset"),
    "a detail without an end": ({**A, "train_detail": [{"begin_offset": 0, "train": True}]}, "entry 1"),
    "a detail that ends before it begins": ({**A, **detail((3, 1, True))}, "entry 1"),
    "a question to be trained on": ({**Q, "train": True}, "for the assistant only"),
    "a part of a question to be trained on": ({**Q, **detail((0, 1, True))}, "for the assistant only"),
}


@pytest.mark.parametrize(("message", "words"), BAD.values(), ids=BAD)
def test_a_flag_that_cannot_be_followed_rejects_the_row(learned, message, words):
    found = learned(Q, A, message, B) if message["role"] == "user" else learned(Q, message)
    assert found.reason == "bad_loss_flag"
    assert words in found.detail


def test_flags_by_others_that_only_exclude_are_ignored(learned):
    quiet = {"weight": 0, "train": False, "step_loss_mask": 0}
    assert learned({**Q, **quiet}, A, {**Q2, "step_loss_mask": 1, "weight": 1}, B) == [(BOTH, PLAIN)]
