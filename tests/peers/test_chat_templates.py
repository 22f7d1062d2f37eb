"""Each folder loads without a network, and the conversations are what they claim.

What the templates write is compared with formats by hand in tests/chat/test_mask_families.py.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from tests.peers import chat_templates
from tests.peers.conversations import CONVERSATIONS, WEATHER, user
from tests.peers.templates.packages import Template
from tests.peers.templates.table import TEXTS
from tests.peers.templates.talks import talks
from tests.peers.templates.trial import Trial, base

pytestmark = pytest.mark.slow

DEEPSEEK_USER, DEEPSEEK_END = "<\uff5cUser\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("chats")


@pytest.fixture(scope="module")
def tokenizers(directory):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        return {name: AutoTokenizer.from_pretrained(make(directory)) for name, make in chat_templates.CHATS.items()}


def test_qwen_lists_tools(tokenizers):
    written = tokenizers["qwen"].apply_chat_template([user("Rain?")], tokenize=False, tools=[WEATHER])
    assert written.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{json.dumps(WEATHER, ensure_ascii=False)}\n</tools>" in written.partition("<|im_end|>")[0]


@pytest.mark.parametrize(
    ("name", "opened"),
    [("chatml", "?<|im_end|>\n<|im_start|>assistant\n"), ("deepseek", "?<\uff5cAssistant\uff5c><think>\n")],
)
def test_the_prompt_behind_a_question(tokenizers, name, opened):
    written = tokenizers[name].apply_chat_template([user("2 * 3?")], tokenize=False, add_generation_prompt=True)
    assert written.endswith(opened)


@pytest.mark.parametrize(
    ("name", "control", "end"),
    [
        ("chatml", ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        ("qwen", ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"], "<|im_end|>"),
        ("deepseek", [DEEPSEEK_USER, "<\uff5cAssistant\uff5c>", "<\uff5ctool▁sep\uff5c>", "<think>"], DEEPSEEK_END),
    ],
)
def test_template_output_uses_vocabulary_tokens(tokenizers, name, control, end):
    tokenizer = tokenizers[name]
    assert [len(tokenizer.encode(text, add_special_tokens=False)) for text in control] == [1] * len(control)
    assert tokenizer.eos_token == end


def test_qwens_added_tokens_have_their_published_ids(tokenizers):
    added = tokenizers["qwen"].added_tokens_decoder
    published = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>", 151656: "<|video_pad|>"}
    published |= {151657: "<tool_call>", 151658: "</tool_call>", 151659: "<|fim_prefix|>", 151664: "<|file_sep|>"}
    published |= {151665: "<tool_response>", 151667: "<think>", 151668: "</think>"}
    assert {number: added[number].content for number in published} == published
    assert sorted(added) == list(range(151643, 151669))
    assert [number for number in sorted(added) if added[number].special] == list(range(151643, 151657))


def test_there_are_enough_conversations_and_json_holds_them():
    assert len(CONVERSATIONS) >= 44
    assert json.loads(json.dumps(CONVERSATIONS)) == CONVERSATIONS
    texts = [json.dumps(record, sort_keys=True) for record in CONVERSATIONS.values()]
    assert len(set(texts)) == len(texts), "two names for one conversation"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    "control", ["<|im_end|>", "<|im_start|>assistant", DEEPSEEK_USER, DEEPSEEK_END, "<|endoftext|>"]
)
def test_every_family_is_injected_in_every_role(role, control):
    messages = [message for record in CONVERSATIONS.values() for message in record["messages"]]
    assert any(control in message["content"] for message in messages if message["role"] == role and message["content"])


def test_a_folder_is_made_once_even_when_two_ask(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(chat_templates.deepseek_chat, [tmp_path, tmp_path])
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deepseek", "deepseek_chat"]


def test_vocabularies_are_unchanged(directory, tokenizers):
    config = json.loads((directory / "qwen" / "tokenizer_config.json").read_text("utf-8"))
    assert config["eos_token"] == "<|endoftext|>"
    assert not (directory / "qwen" / "chat_template.jinja").exists()


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """What came of a template that `trl` ships."""
    store, conversations, definition = str(tmp_path_factory.mktemp("store")), talks(), base(TEXTS)
    return lambda name: Trial(Template(name, chat_templates.template(name)), definition, conversations).run(store)


@pytest.mark.parametrize(
    ("name", "refused"),
    [("gemma4_v5", 4), ("glm4moe", 0), ("gptoss", 4), ("llama3_1", 4), ("nemotron_3_nano", 0), ("phi3_training", 10)],
)
def test_every_turn_ends_in_a_trained_end(tried, name, refused):
    outcome = tried(name)
    assert (outcome.accepted, outcome.wrong, outcome.ids, outcome.unended, outcome.untrue) == (True, {}, {}, {}, "")
    assert outcome.counts["refused"] == refused
