"""Real models' templates and vocabularies: what is rendered is what transformers renders, what is trained on is exactly
what the assistant said.

Each family's format is written down here by hand, as parts that know which message they are of and what of it they are.
Put together they must be the text that transformers renders; those that a policy names must be what is trained on.
"""

import itertools
import json
import re
import unicodedata
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenmill.tasks.chat.check import load_template, renderer_of, text_encoder
from tokenmill.tasks.chat.conversation import Conversation, Rejected, apart
from tokenmill.tasks.chat.encoding import Batch
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from transformers import AutoTokenizer

from tests.examples import max_examples
from tests.peers import chat_templates
from tests.peers.conversations import CHATML, CONVERSATIONS, DEEPSEEK, JINJA

pytestmark = pytest.mark.slow

REASONING, EMPTY, ANSWER, CALLS, END = "reasoning", "empty reasoning", "answer", "calls", "end"
HEADER = -1


class Part(NamedTuple):
    """Text of a rendering: the number of its message, what of it this is ("" for what is never trained on), and
    whether the data wrote it.
    """

    text: str
    number: int
    what: str = ""
    data: bool = False


# The formats, by hand.


def block(number, role, content):
    yield Part(f"<|im_start|>{role}\n", number)
    yield Part(content, number, data=True)
    yield Part("<|im_end|>\n", number)


def chatml(messages, _):
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            yield from block(number, message["role"], message["content"])
            continue
        yield Part("<|im_start|>assistant\n", number)
        yield Part(message["content"] or "", number, ANSWER, data=True)
        yield Part("<|im_end|>", number, END)
        yield Part("\n", number)


def nano3(messages, head, texts=None):
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    first = 1 if messages[0]["role"] == "system" else 0
    yield from head(messages[:first])
    for number, message in list(enumerate(messages))[first:]:
        if message["role"] == "assistant":
            yield from nano3_answer(number, message, (texts or nano3_text)(message, past=number < last))
        elif message["role"] == "tool":
            before = messages[number - 1]["role"] if number > first else None
            behind = messages[number + 1]["role"] if number + 1 < len(messages) else None
            yield Part("<|im_start|>user\n" if before not in {None, "tool"} else "", number)
            yield Part("<tool_response>\n", number)
            yield Part(message["content"], number, data=True)
            yield Part("\n</tool_response>\n" + ("<|im_end|>\n" if behind != "tool" else ""), number)
        else:
            yield from block(number, message["role"], message["content"])


def nano3_answer(number, message, texts):
    prompt, reasoning, answer = texts
    yield Part(f"<|im_start|>assistant\n{prompt}", number)
    yield Part(reasoning, number, REASONING, data=True)
    yield Part(answer, number, ANSWER, data=True)
    calls = message.get("tool_calls", [])
    # The line break belongs to the tag that closes the reasoning where no answer stands between them.
    yield Part("\n" if calls else "", number, REASONING if reasoning and not answer else CALLS)
    for call in calls:
        yield Part("<tool_call>\n<function=", number, CALLS)
        yield Part(call["function"]["name"], number, CALLS, data=True)
        yield Part(">\n", number, CALLS)
        for key, value in call["function"]["arguments"].items():
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
            yield Part(f"<parameter={key}>\n{text}\n</parameter>\n", number, CALLS, data=True)
        yield Part("</function>\n</tool_call>\n", number, CALLS)
    yield Part("<|im_end|>\n", number, END)


def nano3_text(message, *, past):
    """Prompt, reasoning with the tag that closes it, and answer."""
    content, reasoning = message["content"] or "", message.get("reasoning_content", "")
    whole = f"<think>\n{reasoning}\n</think>\n{content}" if reasoning else content
    if past and message.get("tool_calls"):
        said = whole.split("</think>")[-1] if "</think>" in whole else whole.split("<think>")[0]
        return "<think></think>", "", said.strip()
    if past and "<think>" in whole and "</think>" in whole:
        if reasoning and "</think>" not in content and content.strip():
            return "<think></think>", "\n", content.rstrip()
        return "<think></think>", "", whole.split("</think>")[-1].rstrip()
    if reasoning:
        return "<think>\n", f"{reasoning}\n</think>" + ("\n" if content.strip() else ""), content.rstrip()
    if "<think>" in content or "</think>" in content:
        return "", "", content.strip()
    return "<think></think>", "", content.rstrip()


def lightning35(messages, head):
    yield from nano3(messages, head, lightning35_text)


def lightning35_text(message, *, past):
    """As `nano3_text`, without its line breaks."""
    content, reasoning = message["content"] or "", message.get("reasoning_content", "")
    whole = f"{reasoning}</think>{content}" if reasoning else content
    if past and message.get("tool_calls"):
        return "<think></think>", "", whole.split("</think>")[-1] if "</think>" in whole else whole.split("<think>")[0]
    if past and (reasoning or "<think>" in whole) and "</think>" in whole:
        return "<think></think>", "", whole.split("</think>")[-1].rstrip()
    if reasoning:
        return "<think>\n", f"{reasoning}</think>", content.rstrip()
    if "<think>" in content or "</think>" in content:
        return "", "", content.strip()
    return "<think></think>", "", content.rstrip()


def qwen(messages, head):
    yield from head(messages[:1])
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=len(messages))
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            current = number > last and (number == len(messages) - 1 or "reasoning_content" in message)
            yield from qwen_answer(number, message, current=current)
        elif message["role"] == "tool":
            before = messages[number - 1]["role"] if number else None
            behind = messages[number + 1]["role"] if number + 1 < len(messages) else None
            yield Part("<|im_start|>user" if before != "tool" else "", number)
            yield Part("\n<tool_response>\n", number)
            yield Part(message["content"], number, data=True)
            yield Part("\n</tool_response>" + ("<|im_end|>\n" if behind != "tool" else ""), number)
        elif message["role"] == "user" or (message["role"] == "system" and number):
            yield from block(number, message["role"], message["content"])


def qwen_answer(number, message, *, current):
    content, reasoning = message["content"] or "", message.get("reasoning_content", "")
    yield Part("<|im_start|>assistant\n", number)
    if current and reasoning:
        yield Part("<think>\n", number, REASONING)
        yield Part(reasoning.strip("\n"), number, REASONING, data=True)
        yield Part("\n</think>\n\n", number, REASONING)
    elif current:
        yield Part("<think>\n\n</think>\n\n", number, EMPTY)
    yield Part(content.lstrip("\n") if current else content, number, ANSWER, data=True)
    for place, call in enumerate(message.get("tool_calls", [])):
        yield Part("\n" if content or place else "", number, CALLS)
        yield Part("<tool_call>\n", number, CALLS)
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        yield Part(f'{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}', number, CALLS, data=True)
        yield Part("\n</tool_call>", number, CALLS)
    yield Part("<|im_end|>", number, END)
    yield Part("\n", number)


IM = ["<|im_start|>", "<|im_end|>"]
QWEN = [*IM, "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
BUNDLED = {"nano3": (nano3, IM), "lightning35": (lightning35, IM)}
FORMATS = {**BUNDLED, "chatml": (chatml, IM), "qwen": (qwen, QWEN)}
"""How a family writes, and its control tokens."""
SPLITTING = {*BUNDLED, "qwen"}
"""Families that strip reasoning from history."""
TAGS = ("<think>", "</think>", "<tool_response>")
"""What Qwen's template looks for in contents, and never finds, because data cannot write tokens."""

POLICIES = {
    "all": LossPolicy(),
    "last turn": LossPolicy("last_turn"),
    "final answer": LossPolicy("final_only"),
    "no reasoning": LossPolicy(reasoning=False),
    "no empty reasoning": LossPolicy(empty_reasoning=False),
    "no tool calls": LossPolicy(tool_calls=False),
    "no end of turn": LossPolicy(end_of_turn=False),
    "answers alone": LossPolicy("assistant_all", reasoning=False, tool_calls=False, end_of_turn=False),
    "answers of the last turn alone": LossPolicy("last_turn", reasoning=False, tool_calls=False, end_of_turn=False),
}


# What is expected.


def learned_numbers(messages, on):
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if on == "final_only":
        return [number for number in answers[-1:] if not calls_alone(messages[number])]
    if on == "last_turn":
        return [number for number in answers if "user" not in [message["role"] for message in messages[number:]]]
    return answers


def calls_alone(message):
    return "tool_calls" in message and not (message["content"] or "").strip()


def names(policy):
    """The parts that a policy trains on."""
    empty = policy.reasoning and policy.empty_reasoning
    wanted = {
        REASONING: policy.reasoning,
        EMPTY: empty,
        CALLS: policy.tool_calls,
        ANSWER: True,
        END: policy.end_of_turn,
    }
    return {what for what, kept in wanted.items() if kept and (policy.on != "final_only" or what in {ANSWER, END})}


def spans_of_turns(messages):
    """Every user turn that is answered: what comes before the first user is part of none, unless it is answered."""
    starts = [number for number, message in enumerate(messages) if message["role"] == "user"]
    starts = [0, *starts] if starts[:1] != [0] else starts
    turns = zip(starts, [*starts[1:], len(messages)], strict=True)
    return [(start, stop) for start, stop in turns if "assistant" in [each["role"] for each in messages[start:stop]]]


def left_out(name, messages, learned):
    """Why a family's template cannot be learned from: what it leaves out of the messages that are trained on."""
    calling = [number for number, message in enumerate(messages) if "tool_calls" in message]
    if name == "chatml" and set(calling) & set(learned):
        return {"tool_calls_left_out"}
    return None


@dataclass
class Expected:
    """One sequence: what is between two borders that no token crosses, and which characters of it are trained on."""

    texts: list[str] = field(default_factory=list)
    flags: list[list[bool]] = field(default_factory=list)
    controls: list[bool] = field(default_factory=list)

    def __post_init__(self):
        self._open = False

    def text(self, text, flag):
        if text and not self._open:
            self.texts.append("")
            self.flags.append([])
            self.controls.append(False)
            self._open = True
        if text:
            self.texts[-1] += text
            self.flags[-1] += [flag] * len(text)

    def close(self):
        self._open = False

    def control(self, token, flag):
        self.close()
        self.texts.append(token)
        self.flags.append([flag])
        self.controls.append(True)


def expected(parts, learned, wanted, tokens):
    found = Expected()
    pattern = re.compile(f"({'|'.join(map(re.escape, tokens))})")
    begun = set()
    for part in parts:
        flag = part.number in learned and part.what in wanted
        if part.what and part.number in learned and part.number not in begun:
            begun.add(part.number)
            found.close()  # the serving side encodes its prompt by itself
        if part.data:
            found.text(part.text, flag)
            continue
        for place, text in enumerate(pattern.split(part.text)):
            if place % 2:
                found.control(text, flag)
            else:
                found.text(text, flag)
    return found


class Chat:
    """One family: the product's template and vocabulary, and transformers'."""

    def __init__(self, name, folder, chosen, tokenizer):
        self.name, self._renderers = name, {}
        self.write, self.tokens = FORMATS[name]
        self.vocabulary = find_vocabulary(TokenizerSource(model=str(folder)))
        self.template = load_template(chosen, self.vocabulary, {})
        self.tokenizer = tokenizer
        definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        self.ids = {token["content"]: token["id"] for token in definition["added_tokens"]}
        for token in definition["added_tokens"]:
            token["special"] |= token["content"] in self.tokens
        self.special = {token["content"] for token in definition["added_tokens"] if token["special"]}
        self.literal = Tokenizer.from_str(json.dumps(definition | {"post_processor": None}))
        self.literal.encode_special_tokens = True  # tokenizers' name for: they are text, and encoded as such
        self.composed = (definition.get("normalizer") or {}).get("type") == "NFC"

    def theirs(self, messages, tools, **options):
        """What transformers makes of a conversation with the family's template, a text unless `options` say otherwise."""
        options = {"tokenize": False} | options
        return self.tokenizer.apply_chat_template(
            messages, tools=tools or None, chat_template=self.template.source, **options
        )

    def parts(self, messages, tools):
        return [part for part in self.write(messages, lambda first: self._head(first, tools)) if part.text]

    def _head(self, first, tools):
        """The system block, which is transformers' own, and which of it the data wrote."""
        marks = {token: chr(0xE000 + place) for place, token in enumerate(self.tokens)}
        system = [message for message in first if message["role"] == "system"]
        given = json.loads(_replaced(json.dumps([system, tools], ensure_ascii=False), marks))
        text = self.theirs([*given[0], {"role": "user", "content": "x"}], given[1]).removesuffix(
            "<|im_start|>user\nx<|im_end|>\n"
        )
        unmarked = {mark: token for token, mark in marks.items()}
        for place, piece in enumerate(re.split(f"([{''.join(unmarked)}])", text)):
            yield Part(unmarked.get(piece, piece), HEADER, data=place % 2 == 1)

    def normal(self, text):
        return unicodedata.normalize("NFC", text) if self.composed else text

    def splits(self, talk, policy):
        """Whether a conversation becomes one sequence per turn."""
        reasons = any("reasoning_content" in message for message in talk.messages)
        return self.name in SPLITTING and policy.on == "assistant_all" and reasons

    def expected(self, talk, policy, split="auto"):
        """Every sequence of a conversation, or the reasons for which there may be none."""
        messages, sequences = talk.messages, []
        by_turn = split == "auto" and self.splits(talk, policy)
        for start, stop in spans_of_turns(messages) if by_turn else [(0, len(messages))]:
            learned = [number for number in learned_numbers(messages[:stop], policy.on) if number >= start]
            reasons = left_out(self.name, messages[:stop], learned)
            if reasons:
                return reasons
            sequences.append(expected(self.parts(messages[:stop], talk.tools), learned, names(policy), self.tokens))
        sequences = [each for each in sequences if any(map(any, each.flags))]
        return sequences or {"nothing_trained"}

    def renderer(self, policy, split):
        """Probing a template takes some time, so it is done once."""
        if (policy, split) not in self._renderers:
            found = renderer_of(self.template, self.vocabulary, policy, split, "literal")
            self._renderers[policy, split] = found
        return self._renderers[policy, split]

    def sequences(self, talks, policy, split="auto"):
        """The product's sequences: per conversation a list of (ids, mask, straddled), or a reason."""
        renderer = self.renderer(policy, split)
        rendered = [renderer.sequences(talk) for talk in talks]
        batch = Batch()
        for pieces in (pieces for each in rendered if not isinstance(each, Rejected) for pieces in each):
            batch.add(pieces)
        found = batch.encode(text_encoder(self.vocabulary, renderer.controls, "reference", "literal"))
        ids, loss = (np.split(each, found.offsets[1:-1]) for each in (found.ids, found.trained))
        each_sequence = iter(zip(ids, loss, found.straddled.tolist(), strict=True))
        return [each.reason if isinstance(each, Rejected) else [next(each_sequence) for _ in each] for each in rendered]

    def require_right(self, sequence, wanted):
        """Ids are the tokenizer's, the mask is what is wanted; where a border lies in a token, less."""
        ids, mask, straddled = sequence
        encoded = [
            [self.ids[text]] if control else None for text, control in zip(wanted.texts, wanted.controls, strict=True)
        ]
        lost = straddled
        place = 0
        for text, flags, control in zip(wanted.texts, wanted.flags, encoded, strict=True):
            encoding = None if control else self.literal.encode(text, add_special_tokens=False)
            tokens = control or encoding.ids
            assert ids[place : place + len(tokens)].tolist() == tokens, text
            trained = mask[place : place + len(tokens)].astype(bool).tolist()
            inside = flags if control else [all(flags[start:stop]) for start, stop in encoding.offsets]
            if all(flags) or not any(flags):
                assert trained == inside, text
            else:
                assert all(there or not here for here, there in zip(trained, inside, strict=True)), (
                    f"trained beyond a border: {text}"
                )
                touched = [any(flags[start:stop]) for start, stop in encoding.offsets]
                lost -= sum(there and not here for here, there in zip(trained, touched, strict=True))
                each = [self.literal.encode(part, add_special_tokens=False).ids for part in _runs(text, flags)]
                apart = [*itertools.chain(*each)]
                assert straddled or (apart == tokens and trained == inside), text
                assert apart != tokens or trained == inside, text
            place += len(tokens)
        assert place == len(ids)
        assert lost >= 0, "tokens that were left out are counted"
        self._require_text(ids, mask, straddled, wanted)

    def _require_text(self, ids, mask, straddled, wanted):
        written, said = "", ""
        for text, flags, control in zip(wanted.texts, wanted.flags, wanted.controls, strict=True):
            written += text if control else self.normal(text)
            runs = [text] if control else map(self.normal, _runs(text, flags))
            said += "".join(part for part, flag in zip(runs, _alternating(flags), strict=True) if flag)
        assert self.vocabulary.decode(ids.tolist()) == written
        if not straddled:
            assert self.vocabulary.decode(ids[mask == 1].tolist()) == said


def _replaced(text, marks):
    for token, mark in marks.items():
        text = text.replace(token, mark)
    return text


def _runs(text, flags):
    """The parts of a text that are trained on or not, in turn."""
    borders = [0, *(place for place in range(1, len(text)) if flags[place] != flags[place - 1]), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(borders)]


def _alternating(flags):
    return [flags[0], *(flag for before, flag in itertools.pairwise(flags) if flag != before)]


def read(record):
    """The conversation in a record, with inline thinking as reasoning."""
    found = conversation(record, None, "tools")
    return found if isinstance(found, Rejected) else apart(found, "closed")


READ = {title: read(record) for title, record in CONVERSATIONS.items()}
TALKS = {title: talk for title, talk in READ.items() if isinstance(talk, Conversation)}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chats")
    made = {name: make(directory) for name, make in chat_templates.CHATS.items()}
    loaded = {name: AutoTokenizer.from_pretrained(folder) for name, folder in made.items()}
    chats = {name: Chat(name, folder, "tokenizer", loaded[name]) for name, folder in made.items()}
    return chats | {name: Chat(name, made["chatml"], name, loaded["chatml"]) for name in BUNDLED}


@pytest.fixture
def chat(chats, name):
    return chats[name]


every_family = pytest.mark.parametrize("name", FORMATS)


def test_only_broken_conversations_are_excluded():
    assert READ.keys() - TALKS.keys() == {"no answer at all", "reasoning that never ends"}


@every_family
def test_the_format_by_hand_is_what_transformers_renders(chat, name):
    """So everything that is compared with it below is compared with transformers."""
    different = set()
    for title, talk in TALKS.items():
        text = "".join(part.text for part in chat.parts(talk.messages, talk.tools))
        if text != chat.theirs(talk.messages, talk.tools):
            different.add(title)
    # Where the data spells the tags that a template looks for, the template would take data for structure.
    assert all(any(tag in json.dumps(TALKS[title].messages) for tag in TAGS) for title in different)
    assert len(different) <= (0 if name in {*BUNDLED, "chatml"} else 3)


@every_family
@pytest.mark.parametrize("policy", POLICIES)
def test_every_conversation_follows_the_policy(chat, name, policy):
    passed = 0
    for (title, talk), found in zip(TALKS.items(), chat.sequences(TALKS.values(), POLICIES[policy]), strict=True):
        wanted = chat.expected(talk, POLICIES[policy])
        if isinstance(wanted, set):
            assert found in wanted, title
            continue
        assert not isinstance(found, str), f"{title}: {found}"
        assert len(found) == len(wanted), title
        for sequence, each in zip(found, wanted, strict=True):
            chat.require_right(sequence, each)
        passed += 1
    assert passed >= 40


EDGES = st.sampled_from(["", " ", "\n", "\n\n", "\t", "\u3000", "\r\n"])
BODIES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cn", "Co"]), max_size=8),
    st.sampled_from(["yes", "1234", CHATML, DEEPSEEK, JINJA, "<|im_end|>", "<|im_", "end|>", "<", "<\uff5cUser\uff5c>", "{{ x }}", "{% endgeneration %}", "e\u0301", "<think>", "</think>", "</tool_call>", "<tool_response>", "```json"]),
)  # fmt: skip
TEXTS = st.builds("".join, st.tuples(EDGES, BODIES, BODIES, EDGES))


ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "b\n", "<|im_end|>"]),
    TEXTS | st.integers() | st.none() | st.lists(TEXTS, max_size=2),
    max_size=2,
)
FUNCTION = st.fixed_dictionaries({"name": st.sampled_from(["f", "get_x"]), "arguments": ARGUMENTS})
CALLED = st.lists(st.fixed_dictionaries({"function": FUNCTION}), min_size=1, max_size=2)
ROLES = st.sampled_from(["user", "assistant", "assistant", "tool", "system", "developer"])


@st.composite
def records(draw):
    """Any order of roles; reasoning and calls by some of the assistant's messages."""
    made = []
    for role, text in draw(st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6)):
        message = {"role": role, "content": text}
        if role == "assistant" and draw(st.booleans()):
            message["reasoning_content"] = draw(TEXTS)
        if role == "assistant" and draw(st.integers(0, 3)) == 0:
            message |= {"content": draw(st.none() | TEXTS), "tool_calls": draw(CALLED)}
        made.append(message)
    return {"messages": made}


@every_family
@settings(
    max_examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(record=records(), policy=st.sampled_from(list(POLICIES.values())))
def test_any_conversation_follows_the_policy(chat, name, record, policy):
    talk = read(record)
    assume(isinstance(talk, Conversation))
    text = "".join(part.text for part in chat.parts(talk.messages, talk.tools))
    if name in BUNDLED or not any(tag in json.dumps(talk.messages) for tag in TAGS):
        assert text == chat.theirs(talk.messages, talk.tools)
    (found,) = chat.sequences([talk], policy)
    wanted = chat.expected(talk, policy)
    if isinstance(wanted, set):
        assert found in wanted
        return
    assert not isinstance(found, str), found
    assert len(found) == len(wanted)
    for sequence, each in zip(found, wanted, strict=True):
        chat.require_right(sequence, each)
