"""What several tests of chats stand on: a small vocabulary with many control tokens, and what is trained on, marked."""

import itertools
from dataclasses import replace

import pytest
from tokenmill.tasks.chat.check import renderer_of
from tokenmill.tasks.chat.conversation import Conversation, Rejected
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.template import ChatTemplate
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from tests.tokenize.small_vocabularies import BOS, EOS, byte_level_bpe

TOKENS = (
    BOS, EOS, "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|eot|>", "<call>", "</call>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>",
)  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return find_vocabulary(TokenizerSource(model=str(byte_level_bpe(tmp_path_factory.mktemp("v"), special=TOKENS))))


@pytest.fixture(scope="module")
def marked(vocabulary):
    """`marked(source, messages, policy)`: the renderings with «…» around what is trained on, or the reason for none."""
    names = {number: token for token, number in vocabulary.controls.items()}
    probed = {}

    def written(source, messages, policy=None):
        if source not in probed:
            template = ChatTemplate(source, {"bos_token": BOS, "eos_token": EOS})
            probed[source] = renderer_of(template, vocabulary, LossPolicy(), "never", "literal")
        found = replace(probed[source], policy=policy or LossPolicy()).sequences(Conversation(list(messages), []))
        if isinstance(found, Rejected):
            return found.reason
        (pieces,) = found
        return "".join(_marked(piece, names) for piece in pieces).replace("»«", "")

    return written


def _marked(piece, names):
    text = names[piece.token] if piece.text is None else piece.text
    if not isinstance(piece.learned, tuple):
        return f"«{text}»" if piece.learned else text
    ends = list(itertools.accumulate(piece.learned, initial=0))
    assert ends[-1] == len(text), "the lengths of the parts are those of the text"
    parts = [text[start:stop] for start, stop in itertools.pairwise(ends)]
    return "".join(f"«{part}»" if number % 2 else part for number, part in enumerate(parts))
