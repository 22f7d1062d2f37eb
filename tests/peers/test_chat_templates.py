"""Each folder loads without a network and writes conversations as the model's makers say; the conversations are what they claim."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from tests.peers import chat_templates
from tests.peers.conversations import CONVERSATIONS, WEATHER, assistant, call, system, thinking, tool, user
from tests.peers.templates.packages import Template
from tests.peers.templates.table import TEXTS
from tests.peers.templates.talks import talks
from tests.peers.templates.trial import Trial, base

pytestmark = pytest.mark.slow

TALK = [system("Be brief."), user("2 * 3?"), assistant("6"), user("* 2?"), assistant("12")]
CALLING = [user("Rain?"), assistant("", call("weather", place="Ulm")), tool("no"), assistant("Dry.")]
SIGNATURE = json.dumps(WEATHER, ensure_ascii=False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("chats")


@pytest.fixture(scope="module")
def tokenizers(directory):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        return {name: AutoTokenizer.from_pretrained(make(directory)) for name, make in chat_templates.CHATS.items()}


@pytest.fixture(scope="module")
def write(tokenizers):
    """`write(name, messages, …)`: the text that transformers renders with the folder's template."""

    def written(name, messages, **options):
        messages = [with_json_arguments(message) for message in messages] if name == "deepseek" else messages
        return tokenizers[name].apply_chat_template(messages, tokenize=False, **options)

    return written


def with_json_arguments(message):
    calls = [
        one | {"function": one["function"] | {"arguments": json.dumps(one["function"]["arguments"])}}
        for one in message.get("tool_calls", [])
    ]
    return message | ({"tool_calls": calls, "content": message["content"] or ""} if calls else {})


def chatml(*blocks):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in blocks)


def test_chatml_is_a_block_per_message(write):
    blocks = [("system", "Be brief."), ("user", "2 * 3?"), ("assistant", "6"), ("user", "* 2?"), ("assistant", "12")]
    assert write("chatml", TALK) == chatml(*blocks)
    prompt = write("chatml", TALK[:2], add_generation_prompt=True)
    assert prompt == chatml(*blocks[:2]) + "<|im_start|>assistant\n"


def test_chatml_ignores_tools(write):
    assert write("chatml", TALK, tools=[WEATHER]) == write("chatml", TALK)


def test_qwen_shows_reasoning_only_in_the_last_answer(write):
    asked = [("system", "Be brief."), ("user", "2 * 3?"), ("assistant", "6"), ("user", "* 2?")]
    assert write("qwen", TALK) == chatml(*asked, ("assistant", "<think>\n\n</think>\n\n12"))
    reasons = [*TALK[:2], thinking("Six.", "6"), TALK[3], thinking("Twelve.", "12")]
    assert write("qwen", reasons) == chatml(*asked, ("assistant", "<think>\nTwelve.\n</think>\n\n12"))


def test_qwen_lists_tools_and_writes_calls_as_json(write):
    written = write("qwen", CALLING, tools=[WEATHER])
    header, rest = written.split("<|im_start|>user\nRain?<|im_end|>\n")
    assert header.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{SIGNATURE}\n</tools>" in header
    assert rest == chatml(
        ("assistant", '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'),
        ("user", "<tool_response>\nno\n</tool_response>"),
        ("assistant", "<think>\n\n</think>\n\nDry."),
    )


def test_deepseek_opens_reasoning_in_its_prompt_but_not_in_its_answers(write):
    start = "<\uff5cbegin▁of▁sentence\uff5c>Be brief.<\uff5cUser\uff5c>2 * 3?<\uff5cAssistant\uff5c>"
    rest = "6<\uff5cend▁of▁sentence\uff5c><\uff5cUser\uff5c>* 2?<\uff5cAssistant\uff5c>12<\uff5cend▁of▁sentence\uff5c>"
    assert write("deepseek", TALK) == start + rest
    assert write("deepseek", TALK[:2], add_generation_prompt=True) == start + "<think>\n"


def test_deepseek_writes_calls_and_results(write):
    assert write("deepseek", CALLING) == (
        "<\uff5cbegin▁of▁sentence\uff5c><\uff5cUser\uff5c>Rain?<\uff5cAssistant\uff5c><\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>weather\n"
        '```json\n{"place": "Ulm"}\n```<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c><\uff5cend▁of▁sentence\uff5c>'
        "<\uff5ctool▁outputs▁begin\uff5c><\uff5ctool▁output▁begin\uff5c>no<\uff5ctool▁output▁end\uff5c><\uff5ctool▁outputs▁end\uff5c>Dry.<\uff5cend▁of▁sentence\uff5c>"
    )


@pytest.mark.parametrize(
    ("name", "control", "end"),
    [
        ("chatml", ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        ("qwen", ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"], "<|im_end|>"),
        (
            "deepseek",
            ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5ctool▁sep\uff5c>", "<think>"],
            "<\uff5cend▁of▁sentence\uff5c>",
        ),
    ],
)
def test_what_the_template_writes_are_tokens_of_the_vocabulary(tokenizers, name, control, end):
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


@pytest.mark.parametrize("name", chat_templates.CHATS)
@pytest.mark.parametrize("title", CONVERSATIONS)
def test_it_writes_every_conversation(tokenizers, write, name, title):
    record = CONVERSATIONS[title]
    text = write(name, record["messages"], tools=record.get("tools"))
    spoken = [message["content"] for message in record["messages"] if message["role"] == "user"]
    assert all(content in text for content in spoken)


def test_there_are_enough_conversations_and_json_holds_them():
    assert len(CONVERSATIONS) >= 44
    assert json.loads(json.dumps(CONVERSATIONS)) == CONVERSATIONS
    texts = [json.dumps(record, sort_keys=True) for record in CONVERSATIONS.values()]
    assert len(set(texts)) == len(texts), "two names for one conversation"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("control", ["<|im_end|>", "<|im_start|>assistant", "<\uff5cUser\uff5c>", "<\uff5cend▁of▁sentence\uff5c>", "<|endoftext|>"])  # fmt: skip
def test_every_family_is_injected_in_every_role(role, control):
    messages = [message for record in CONVERSATIONS.values() for message in record["messages"]]
    assert any(control in message["content"] for message in messages if message["role"] == role and message["content"])


def test_a_folder_is_made_once_even_when_two_ask(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(chat_templates.deepseek_chat, [tmp_path, tmp_path])
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deepseek", "deepseek_chat"]


def test_the_vocabularies_stay_as_they_were(directory, tokenizers):
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
