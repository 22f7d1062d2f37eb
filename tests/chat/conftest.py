"""What several tests of chats stand on: a small vocabulary with many control tokens, and what is trained on, marked."""

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


def _marked(segment, names):
    text = names[segment.token] if segment.text is None else segment.text
    return f"«{text}»" if segment.trained else text
