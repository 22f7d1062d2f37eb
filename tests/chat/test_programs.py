"""Filled programs are the segments that the template is rendered to, whatever the conversation says."""

import itertools
import random
from collections import Counter
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
from tokenmill.tasks.chat import programs as programs_module
from tokenmill.tasks.chat.check import BUNDLED, renderer_of, text_encoder
from tokenmill.tasks.chat.conversation import Conversation, Rejected
from tokenmill.tasks.chat.encoding import Batch, Filled
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.chat.programs import Programs
from tokenmill.tasks.chat.template import ChatTemplate

from tests.peers.conversations import SEARCH, WEATHER, assistant, talk, user
from tests.peers.templates.packages import Template
from tests.peers.templates.table import TEXTS
from tests.peers.templates.talks import talks
from tests.peers.templates.trial import Trial, base

TRL = Path(str(distribution("trl").locate_file("trl/chat_templates")))
SHIPPED = {path.stem: path for path in sorted(TRL.glob("*.jinja"))}
POLICIES = [
    LossPolicy(),
    LossPolicy(reasoning=False),
    LossPolicy(tool_calls=False, end_of_turn=False),
    LossPolicy(empty_reasoning=False),
    LossPolicy(reasoning=False, end_of_turn=False),
    LossPolicy("last_turn"),
    LossPolicy("final_only"),
]

PLAIN = ["a", "Is it late?", "It is.\n", "  so ", "\n\nyes\n\n", "1 < 2 > 0", "<b>x</b>", "日本語 🙂", "if x:\n\treturn '\"y\"'\n", "{{ x }} {% if %}"]  # fmt: skip
ODD = [
    "", " ", "\n", "\u3000", "<think>", "</think>", "a</think>b", "<think>\nx\n</think>\n\ny", "<think", "ink>", "<", ">", "</",
    "<tool_call>", "</tool_call>", "<tool_response>x</tool_response>", "  <tool_response>\nx\n</tool_response> ", "<|im_end|>",
    "<|im_", "end|>", "|>", "<|eot_id|>", "<\uff5cUser\uff5c>", "[INST]", "</s>", "\ue0000\ue001", "\ue000", "\ufdd0", "\x1f", "'", '"',
    "None", "user", "assistant", "…", "\\u0041", "\x1c", "a\u2028", "/no_think", "<unk>", "<s>",
]  # fmt: skip
LEAVES = [1, 2.5, True, None, [], {}, ["x", "y"], {"deep": {"list": [1, None, "z"]}}, "in Oslo", " spaced ", "<b>"]


class Maker:
    """Random conversations, some of them of the same shape with other texts."""

    def __init__(self, seed, odd=0.15):
        self.random = random.Random(seed)
        self.odd = odd

    def text(self):
        if self.random.random() < self.odd:
            return "".join(self.random.choices(ODD + PLAIN, k=self.random.choice([1, 1, 1, 2, 3])))
        return " ".join(self.random.choices(PLAIN, k=self.random.choice([1, 1, 2, 3])))

    def calls(self):
        names = self.random.choices(["weather", "search"], k=self.random.choice([1, 1, 2]))
        keys = [self.random.sample(["place", "days", "deep"], self.random.randrange(3)) for _ in names]
        return [
            {"id": f"call{n:05d}", "type": "function", "function": {"name": name, "arguments": {key: self.random.choice(LEAVES) for key in each}}}
            for n, (name, each) in enumerate(zip(names, keys, strict=True))
        ]  # fmt: skip

    def answer(self, *, tools):
        message = {"role": "assistant", "content": self.text()}
        if self.random.random() < 0.4:
            message["reasoning_content"] = self.text()
        if tools and self.random.random() < 0.5:
            message["tool_calls"] = self.calls()
            message["content"] = self.random.choice([None, "", message["content"]])
        flag = self.random.random()
        if flag < 0.06:
            message["train"] = flag < 0.03
        elif flag < 0.09 and message["content"]:
            message["train_detail"] = [{"begin_offset": 0, "end_offset": 2, "train": True}]
        return message

    def turn(self, *, tools):
        messages = [user(self.text()) for _ in range(self.random.choice([1, 1, 1, 1, 1, 1, 1, 2]))]
        for _ in range(self.random.choice([1, 1, 1, 1, 1, 0, 2])):
            messages.append(self.answer(tools=tools))
            for call in messages[-1].get("tool_calls", []):
                name = call["function"]["name"]
                messages.append({"role": "tool", "content": self.text(), "tool_call_id": call["id"], "name": name})
        if tools and messages[-1]["role"] == "tool":
            messages.append(self.answer(tools=False))
        if self.random.random() < 0.04:
            messages.append({"role": self.random.choice(["system", "developer"]), "content": self.text()})
        return messages

    def record(self):
        tools = self.random.choice([[], [], [WEATHER], [WEATHER, SEARCH]])
        first = self.random.choice([[], [], [{"role": "system", "content": self.text()}]])
        turns = [self.turn(tools=tools) for _ in range(self.random.choice([1, 1, 1, 2, 2, 3]))]
        record = {"messages": [*first, *itertools.chain(*turns)]}
        return record | ({"tools": tools} if tools else {})

    def again(self, value, name=""):
        """The record with other texts."""
        if isinstance(value, dict):
            return {key: self.again(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [self.again(each) for each in value]
        text = isinstance(value, str) and name in {"content", "reasoning_content", "place", "days", "deep"}
        return self.text() if text and value.strip() else value

    def conversations(self, count):
        """At most `count` conversations, four of a shape."""
        for _ in range(count // 4):
            record = self.record()
            again = [self.again({"messages": record["messages"]}) for _ in range(3)]
            for each in [record, *({**messages, "tools": record.get("tools")} for messages in again)]:
                found = conversation(each, None, "tools")
                if isinstance(found, Conversation):
                    yield found


@pytest.fixture(autouse=True)
def _learned_at_once(monkeypatch):
    monkeypatch.setattr(programs_module, "RENDERED_FIRST", 1)


@pytest.fixture(scope="module")
def definition():
    return base(TEXTS)


@pytest.fixture(scope="module")
def renderer(definition):
    """`renderer(path, policy, split, special)`, and its vocabulary."""
    made = {}

    def of(path, policy=LossPolicy(), split="auto", special="literal"):  # noqa: B008 - frozen
        if path not in made:
            source = path.read_text("utf-8")
            made[path] = Trial(Template("", source), definition, talks())
        trial = made[path]
        template = ChatTemplate(trial.source, trial.variables)
        return renderer_of(template, trial.vocabulary, policy, split, special), trial.vocabulary

    return of


def as_segments(found):
    if isinstance(found, Rejected):
        return found
    return [each.segments() if isinstance(each, Filled) else each for each in found]


def is_filled(found):
    return not isinstance(found, Rejected) and isinstance(found[0], Filled)


def compare(programs, conversations):
    """How many conversations were filled, rendered, and rejected; all as the renderer has them."""
    counts = Counter()
    for given in conversations:
        found = programs.sequences(given)
        assert as_segments(found) == programs.renderer.sequences(given), given
        kind = "rejected" if isinstance(found, Rejected) else "filled" if is_filled(found) else "rendered"
        counts[kind] += 1
    return counts


SETTINGS = [(LossPolicy(), "auto", "literal"), (LossPolicy("last_turn", tool_calls=False), "never", "allow")]


@pytest.mark.slow
@pytest.mark.parametrize("path", [*sorted(BUNDLED.glob("*.jinja")), *SHIPPED.values()], ids=lambda path: path.stem)
def test_programs_match_every_rendering(renderer, path):
    counts = Counter()
    for number, (policy, split, special) in enumerate(SETTINGS):
        maker, _ = renderer(path, policy, split, special)
        counts += compare(Programs(maker), Maker(f"{path.stem} {number}").conversations(16))
    assert counts["filled"] > (4 if path.parent == BUNDLED else -1)


# What is learned, and what is not.


def test_shapes_are_learned_after_repetition(renderer, monkeypatch):
    monkeypatch.setattr(programs_module, "RENDERED_FIRST", 3)
    maker, _ = renderer(BUNDLED / "nano3.jinja")
    programs = Programs(maker)
    kinds = []
    for number in range(6):
        record = talk(user(f"{number}?"), assistant(f" {number}. "))
        kinds.append(type(programs.sequences(conversation(record, None, "tools"))[0]))
    assert kinds == [list, list, list, Filled, Filled, Filled]


@pytest.mark.parametrize(
    "words",
    ["</think>", "a<think>b", "<|im_end|>", "\n ", "\u3000"],
    ids=["closed", "opened", "control", "blank", "wide blank"],
)
def test_contents_that_a_template_may_treat_otherwise_are_rendered(renderer, words):
    maker, _ = renderer(BUNDLED / "nano3.jinja")
    programs = Programs(maker)
    for answer in ("a", "b", words, "c"):
        given = Conversation([user("?"), assistant(answer)], [])
        found = programs.sequences(given)
        assert as_segments(found) == maker.sequences(given)
        assert is_filled(found) == (answer in {"b", "c"})


LOOP = "{%% for m in messages %%}{{ '<|im_start|>' ~ m.role ~ '\n' }}%s{{ '<|im_end|>\n' }}{%% endfor %%}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"  # fmt: skip
UNKNOWN = {
    "the length of a content": "{{ m.content if m.content | length > 3 else 'short' }}",
    "a character of it": "{{ m.content }}{{ 'x' if m.content[0] == 'a' }}",
    "another case": "{{ m.content | upper if m.role == 'user' else m.content }}",
    "its lines": "{{ m.content }}{{ m.content.splitlines() | length if m.role == 'user' }}",
    "two contents are compared": "{{ m.content }}{{ 'again' if m.content == messages[0].content and not loop.first }}",
    "a number of characters": "{{ m.content }}{{ m.content.count('a') if m.role == 'user' }}",
    "words": "{{ m.content.split() | join(' ') if m.role == 'user' else m.content }}",
    "other characters are stripped": "{{ m.content.strip('ab') if m.role == 'user' else m.content }}",
}


@pytest.mark.parametrize("body", UNKNOWN.values(), ids=UNKNOWN)
def test_a_template_that_looks_into_contents_is_rendered(vocabulary, body):
    maker = renderer_of(ChatTemplate(LOOP % body, {}), vocabulary, LossPolicy(), "auto", "literal")
    programs = Programs(maker)
    for words in ("a", "b", "a b", "long enough", "a", "ab", "\n\na b a\n"):
        given = Conversation([user(words), assistant("an answer"), user("a")], [])
        found = programs.sequences(given)
        assert found == maker.sequences(given)
        assert not is_filled(found)


KNOWN = {
    "as it is": "{{ m.content }}",
    "without blanks": "{{ m.content | trim }}",
    "parts": "{{ m.content.split('</x>')[-1].lstrip('\n') }}",
    "parts behind a piece of the tag": "{{ ('x' ~ m.content).split('</x>')[-1] }}",
    "a search": "{{ m.content if '<x>' not in m.content else 'x' }}",
    "its ends": "{{ 'x' if m.content.startswith('<x>') or m.content.endswith('</x>') }}{{ m.content }}",
    "replaced": "{{ m.content | replace('<x>', '') }}",
    "joined": "{{ [m.content, 'z'] | join(' ') }}",
    "as JSON": "{{ m.content | tojson if m.role == 'user' else m.content }}",
    "not empty": "{{ m.content if m.content and m.content is string and m.content | length > 0 }}",
    "a macro": "{% macro say(text) %}{{ text.strip() }}{% endmacro %}{{ say(m.content) }}",
    "a block": "{% set text %}{{ m.content }}!{% endset %}{{ text | trim }}",
}
WORDS = ["a", " b\n", "<x>", "c</x>d", "</x>", "<", "<x", "x>", 'say "é"\t\\n', "\x7f", "e"]


@pytest.mark.parametrize("body", KNOWN.values(), ids=KNOWN)
def test_filling_applies_content_filters(vocabulary, body):
    maker = renderer_of(ChatTemplate(LOOP % body, {}), vocabulary, LossPolicy(), "auto", "literal")
    filled = 0
    programs = Programs(maker)
    for first, second in itertools.product(WORDS, WORDS):
        given = Conversation([user(first), assistant(second)], [])
        found = programs.sequences(given)
        assert as_segments(found) == maker.sequences(given), (first, second)
        filled += is_filled(found)
    assert filled >= 20


@pytest.fixture(scope="module")
def vocabulary(renderer):
    return renderer(BUNDLED / "nano3.jinja")[1]


def test_a_content_cannot_complete_a_control_token(vocabulary):
    source = LOOP % "{{ '<|im_' ~ m.content }}"
    maker = renderer_of(ChatTemplate(source, {}), vocabulary, LossPolicy(), "auto", "literal")
    programs = Programs(maker)
    for words in ("a", "b", "end|>c", "c"):
        given = Conversation([user(words), assistant(words)], [])
        assert as_segments(programs.sequences(given)) == maker.sequences(given)


def test_names_like_placeholders_are_not_holes(renderer):
    maker, _ = renderer(BUNDLED / "nano3.jinja")
    programs = Programs(maker)
    for words in ("a", "b", "c"):
        call = {"function": {"name": "f", "arguments": {"\ue0000\ue001": words, "\ue00099\ue001": words}}}
        given = conversation(talk(user(words), assistant("", call)), None, "tools")
        assert as_segments(programs.sequences(given)) == maker.sequences(given)


@pytest.mark.slow
def test_memory_is_bounded(renderer, monkeypatch):
    monkeypatch.setattr(programs_module, "MAX_RUNS", 60)
    maker, _ = renderer(BUNDLED / "nano3.jinja")
    programs, most = Programs(maker), 0
    for given in Maker(5, odd=0).conversations(200):
        assert as_segments(programs.sequences(given)) == maker.sequences(given)
        most = max(most, len(programs._programs))  # noqa: SLF001 - nobody else sees it
    assert 1 < most < 10


# The arrays.


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES[:5])
def test_filled_batches_equal_their_segments(renderer, policy):
    maker, vocabulary = renderer(BUNDLED / "nano3.jinja", policy)
    programs, filled, plain = Programs(maker), Batch(), Batch()
    for given in Maker(policy.end_of_turn).conversations(120):
        found = programs.sequences(given)
        for each in [] if isinstance(found, Rejected) else found:
            before = filled.characters
            filled.add(each)
            plain.add(each.segments() if isinstance(each, Filled) else each)
            if isinstance(each, Filled):
                used = {*each.layout.sources, *itertools.chain(*(parts for _, parts, _ in each.layout.mixed))}
                texts = [text for number, text in enumerate(each.table.texts(each.values)) if number in used]
                assert filled.characters - before == sum(map(len, texts))
    encoder = text_encoder(vocabulary, maker.controls, "reference", "literal")
    ours, theirs = filled.encode(encoder), plain.encode(encoder)
    assert len(ours.ids) > 5_000
    for name in ("ids", "trained", "offsets", "role_starts", "roles", "straddled"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
