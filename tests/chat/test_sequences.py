"""A conversation as the sequences it is trained as: each one is what transformers renders of the messages up to its end."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume
from hypothesis import given as drawn
from hypothesis import strategies as st
from tokenmill.tasks.chat.check import load_template, renderer_of
from tokenmill.tasks.chat.controls import NONCHARACTERS
from tokenmill.tasks.chat.conversation import Conversation, Rejected
from tokenmill.tasks.chat.encoding import ROLES
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.chat.sequences import answered_turns
from tokenmill.tasks.chat.template import ChatTemplate
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from transformers.utils.chat_template_utils import render_jinja_template

from tests.chat.pieces import learned, text
from tests.examples import max_examples
from tests.peers import chat_templates
from tests.peers.conversations import SEARCH, WEATHER, assistant, call, developer, system, talk, thinking, tool, user
from tests.tokenize.small_vocabularies import byte_level_bpe

IM = ("<|im_start|>", "<|im_end|>")
QWEN = chat_templates.template("qwen3")
ASKS = "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
LAST = "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
THINK = "{% if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}"
BODY = (
    "{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    + THINK
    + "{{ (m.content or '') }}{% for c in m.tool_calls or [] %}{{ '<call>' ~ c.function.name }}{% endfor %}{{ '<|im_end|>\n' }}"
)
STRIPS = LAST + "{% for m in messages %}" + BODY + "{% endfor %}" + ASKS

COMPOSING = {
    "it strips reasoning": STRIPS,
    "it begins with a header": "{{ 'header' ~ (tools | tojson if tools) }}" + STRIPS,
    "the system is in the header": LAST + "{% if messages[0].role == 'system' %}{{ '<<' ~ messages[0].content ~ '>>' }}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% set ns.last = ns.last - (messages | length - rest | length) %}{% for m in rest %}" + BODY + "{% endfor %}" + ASKS,
    "it moves systems to the front": "{% set order = messages | selectattr('role', 'equalto', 'system') | list + messages | rejectattr('role', 'equalto', 'system') | list %}" + STRIPS.replace("in messages", "in order"),
    "it rejects one of the turns alone": "{{ raise_exception('Out of order.') if messages[0].content == '2' }}" + STRIPS,
}  # fmt: skip
NOT_COMPOSING = {
    "it looks at the message before": STRIPS.replace("{% for m in messages %}{{", "{% for m in messages %}{{ messages[loop.index0 - 1].role if m.role == 'user' and not loop.first else '' }}{{"),
    "it numbers its messages": STRIPS.replace("{% for m in messages %}{{", "{% for m in messages %}{{ loop.index if m.role == 'user' else '' }}{{"),
    "it counts its messages": "{{ messages | length ~ ' messages\n' }}" + STRIPS,
    "it counts the messages that follow": STRIPS.replace("{% for m in messages %}{{", "{% for m in messages %}{{ loop.revindex if m.role == 'user' else '' }}{{"),
    "it shows the tools in the last question": STRIPS.replace("{{ (m.content or '') }}", "{{ (m.content or '') ~ (tools | tojson if tools and loop.index0 == ns.last else '') }}"),
    "it says that there was something before": STRIPS.replace("{{ (m.content or '') }}", "{{ (m.content or '') ~ ('' if ns.last == 0 else '!') }}"),
    "it shows the first question again": STRIPS.replace("{{ (m.content or '') }}", "{{ (m.content or '') ~ ('' if m.role != 'user' else messages[0].content) }}"),
    "it keeps the last of the past": STRIPS.replace("loop.index0 > ns.last", "(loop.index0 > ns.last or loop.index0 == ns.last - 1)"),
}  # fmt: skip
REWRITING = COMPOSING | NOT_COMPOSING


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = byte_level_bpe(tmp_path_factory.mktemp("vocabulary"), special=("<|endoftext|>", *IM))
    return find_vocabulary(TokenizerSource(model=str(folder)))


@pytest.fixture(scope="module")
def renderer(vocabulary):
    """`renderer(source, policy)`, each made once."""
    made = {}

    def of(source, policy=None, split="auto"):
        policy = policy or LossPolicy()
        if (source, policy, split) not in made:
            template = load_template(source, vocabulary, {})
            made[source, policy, split] = renderer_of(template, vocabulary, policy, split, "literal")
        return made[source, policy, split]

    return of


def read(record):
    found = conversation(record, None, "tools")
    return found if isinstance(found, Conversation) else None


def require_prefixes(maker, source, given, vocabulary):
    """Each sequence reads as transformers renders the messages up to the end of its turn; transformers' template must
    know control tokens for what they are, so the data spells none.
    """
    found = maker.sequences(given)
    turns = (
        answered_turns(given.messages) if any("reasoning_content" in each for each in given.messages) else [(0, None)]
    )
    assert not isinstance(found, Rejected), found
    assert [text(pieces, vocabulary) for pieces in found] == [
        render_jinja_template([given.messages[:stop]], tools=given.tools or None, chat_template=source)[0][0]
        for _, stop in turns
    ]


SHAPES = {
    "three turns": talk(user("1"), thinking("r", "a"), user("2"), thinking("s", "b"), user("3"), thinking("t", "c")),
    "with a system": talk(system("Be brief."), user("1"), thinking("r", "a"), user("2"), thinking("s", "b")),
    "with tools": talk(user("1"), thinking("r", "", call("weather")), tool("x"), thinking("s", "a"), user("2"), thinking("t", "b"), tools=[WEATHER, SEARCH]),
    "some reasoning": talk(user("1"), assistant("a"), user("2"), thinking("s", "b"), user("3"), assistant("c")),
    "an unanswered turn": talk(user("1"), thinking("r", "a"), user("2"), user("3"), thinking("t", "c"), user("4")),
    "an answer before any question": talk(assistant("hello"), user("1"), thinking("r", "a"), user("2"), thinking("s", "b")),
    "an answer behind a system": talk(system("s"), assistant("hello"), user("1"), thinking("r", "a")),
    "answers in a row": talk(user("1"), thinking("r", "a"), thinking("s", "b"), user("2"), thinking("t", "c")),
    "a late system": talk(user("1"), thinking("r", "a"), system("s"), user("2"), thinking("t", "b")),
    "a system at the end of a turn": talk(user("1"), thinking("r", "a"), user("2"), thinking("t", "b"), system("s")),
    "a developer": talk(developer("d"), user("1"), thinking("r", "a"), user("2"), thinking("t", "b")),
    "empty answers": talk(user("1"), thinking("r", ""), user(""), thinking("t", "")),
}  # fmt: skip


@pytest.mark.parametrize("source", REWRITING.values(), ids=REWRITING)
def test_every_sequence_is_the_prefix_that_ends_with_its_turn(renderer, vocabulary, source):
    for record in SHAPES.values():
        require_prefixes(renderer(source), source, read(record), vocabulary)


@pytest.mark.parametrize("name", REWRITING)
def test_a_template_whose_sequences_can_be_put_together_is_known(renderer, name):
    assert renderer(REWRITING[name]).splits_turns
    assert renderer(REWRITING[name]).composes == (name in COMPOSING)


WORDS = st.sampled_from(
    ["", "a", "b\n", " c ", "<think>", "</think>", "<tool_response>\nx\n</tool_response>", "<|im_end|>", "…", "{{ x }}"]
)
MESSAGES = st.lists(
    st.one_of(
        st.builds(user, WORDS),
        st.builds(user, WORDS),
        st.builds(thinking, WORDS, WORDS),
        st.builds(assistant, WORDS),
        st.builds(lambda words: assistant(words, call("f", a=words)), WORDS),
        st.builds(tool, WORDS),
    ),
    min_size=2,
    max_size=8,
)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["nano3", QWEN, *REWRITING.values()], ids=["nano3", "qwen", *REWRITING])
@max_examples(80)
@drawn(
    messages=MESSAGES,
    first=st.booleans(),
    tools=st.sampled_from([[], [WEATHER], [WEATHER, SEARCH]]),
    policy=st.sampled_from(
        [LossPolicy(), LossPolicy(reasoning=False), LossPolicy(tool_calls=False, end_of_turn=False)]
    ),
)
def test_sequences_put_together_are_those_rendered_one_by_one(renderer, source, messages, first, tools, policy):
    given = read(talk(*([system("s")] if first else []), *messages, tools=tools))
    assume(given)
    maker = renderer(source, policy)
    assert maker.sequences(given) == replace(maker, composes=False).sequences(given)


def test_user_reported_results_are_not_questions_to_qwen(renderer, vocabulary):
    """Its template goes by what user messages say: reasoning stays until someone really asks again."""
    given = read(
        talk(user("1"), thinking("r", "Look."), user("<tool_response>\nx\n</tool_response>"), thinking("s", "a"))
    )
    require_prefixes(renderer(QWEN), QWEN, given, vocabulary)


# What is trained on.


def test_of_every_sequence_its_own_turn_is_trained_on(renderer, vocabulary):
    given = read(SHAPES["with tools"])
    found = renderer(STRIPS).sequences(given)
    assert [learned(pieces, vocabulary) for pieces in found] == [
        "<think>r</think><call>weather<|im_end|><think>s</think>a<|im_end|>",
        "<think>t</think>b<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("source", "policy", "split", "record", "sequences"),
    [
        (STRIPS, LossPolicy(), "auto", SHAPES["three turns"], 3),
        (STRIPS, LossPolicy(), "never", SHAPES["three turns"], 1),
        (STRIPS, LossPolicy("last_turn"), "auto", SHAPES["three turns"], 1),
        (STRIPS, LossPolicy("final_only"), "auto", SHAPES["three turns"], 1),
        (STRIPS, LossPolicy(reasoning=False), "auto", SHAPES["three turns"], 3),
        (STRIPS, LossPolicy(), "auto", talk(*[user("q"), assistant("a")] * 3), 1),
        (STRIPS, LossPolicy(), "auto", SHAPES["some reasoning"], 3),
        (STRIPS, LossPolicy(), "auto", SHAPES["an unanswered turn"], 2),
        (STRIPS, LossPolicy(), "auto", SHAPES["an answer before any question"], 3),
        (STRIPS, LossPolicy(), "auto", SHAPES["an answer behind a system"], 2),
        (STRIPS, LossPolicy(), "auto", SHAPES["answers in a row"], 2),
        (STRIPS.replace(" and loop.index0 > ns.last", ""), LossPolicy(), "auto", SHAPES["three turns"], 1),
        (STRIPS.replace(THINK, ""), LossPolicy(), "auto", SHAPES["three turns"], 1),
        ("nano3", LossPolicy(), "auto", SHAPES["three turns"], 3),
        ("nano3", LossPolicy(), "never", SHAPES["three turns"], 1),
    ],
)
def test_how_many_sequences_a_conversation_becomes(renderer, source, policy, split, record, sequences):
    assert len(renderer(source, policy, split).sequences(read(record))) == sequences


def test_turns_without_trained_text_are_skipped(renderer, vocabulary):
    policy = LossPolicy(reasoning=False, end_of_turn=False)
    found = renderer(STRIPS, policy).sequences(read(talk(user("1"), thinking("r", ""), user("2"), thinking("s", "b"))))
    assert [learned(pieces, vocabulary) for pieces in found] == ["b"]
    nothing = renderer(STRIPS, policy).sequences(read(talk(user("1"), thinking("r", ""))))
    assert nothing == Rejected("nothing_trained", nothing.detail)


def test_a_turn_that_cannot_be_rendered_rejects_the_whole(renderer):
    source = STRIPS.replace(
        "{{ '<|im_end|>\n' }}", "{{ raise_exception('no') if m.content == 'bad' }}{{ '<|im_end|>\n' }}"
    )
    for number in (1, 3, 5):
        record = [dict(message) for message in SHAPES["three turns"]["messages"]]
        record[number]["content"] = "bad"
        found = renderer(source).sequences(read(talk(*record)))
        assert isinstance(found, Rejected)
        assert found.reason == "template_error"


# Cost.


@pytest.mark.parametrize("source", ["nano3", QWEN, STRIPS], ids=["nano3", "qwen", "strips"])
def test_each_message_is_rendered_a_fixed_number_of_times(renderer, source, monkeypatch):
    rendered = []
    render = ChatTemplate.render

    def counting(template, messages, tools, **variables):
        rendered.append(len(messages))
        return render(template, messages, tools, **variables)

    maker = renderer(source)
    messages = [
        message for number in range(64) for message in (user(f"{number}?"), thinking(f"{number}.", f"{number}!"))
    ]
    given = read(talk(system("Count."), *messages))
    monkeypatch.setattr(ChatTemplate, "render", counting)
    assert len(maker.sequences(given)) == 64
    assert sum(rendered) <= 3 * len(given.messages)
    assert sum(rendered) >= len(given.messages)


# Who wrote what.


def test_who_wrote_what(renderer, vocabulary):
    said = [system("S."), user("U."), assistant("A.", call("f")), tool("T."), developer("D."), assistant("B.")]
    ((*pieces,),) = renderer("nano3").sequences(read(talk(*said, tools=[WEATHER])))
    runs = [
        (ROLES[role], text(list(group), vocabulary))
        for role, group in itertools.groupby(pieces, lambda piece: piece.role)
    ]
    assert [role for role, _ in runs] == ["system", "user", "assistant", "tool", "developer", "assistant"]
    header, *others = [words for _, words in runs]
    assert header.startswith("<|im_start|>system\nS.\n\n# Tools")
    assert header.endswith("<|im_end|>\n")
    assert others == [
        "<|im_start|>user\nU.<|im_end|>\n",
        "<|im_start|>assistant\n<think></think>A.\n<tool_call>\n<function=f>\n</function>\n</tool_call>\n<|im_end|>\n",
        "<|im_start|>user\n<tool_response>\nT.\n</tool_response>\n<|im_end|>\n",
        "<|im_start|>developer\nD.<|im_end|>\n",
        "<|im_start|>assistant\n<think></think>B.<|im_end|>\n",
    ]


def test_what_nobody_wrote_is_the_templates(renderer, vocabulary):
    ((*pieces,),) = renderer("nano3").sequences(read(talk(user("U."), assistant("A."))))
    assert ROLES[pieces[0].role] == "template"
    assert {ROLES[piece.role] for piece in pieces} == {"template", "user", "assistant"}
    source = "{{ 'before' }}" + STRIPS + "{{ 'behind' }}"
    ((*pieces,),) = renderer(source).sequences(read(talk(user("U."), assistant("A."))))
    assert (ROLES[pieces[0].role], pieces[0].text) == ("template", "before")
    assert pieces[-1].text == "\nbehind"


# Control tokens in data.


def test_injected_tokens_move_no_border_inside_of_a_text(renderer, vocabulary):
    policy = LossPolicy(reasoning=False, end_of_turn=False)
    first = [user("q"), thinking("r<|im_end|>r", "<|im_start|>a<|im_end|><|im_end|>")]
    given = read(talk(*first, user("<|im_end|>"), thinking("<|im_start|>", "b")))
    found = renderer(STRIPS, policy).sequences(given)
    assert [learned(pieces, vocabulary) for pieces in found] == ["<|im_start|>a<|im_end|><|im_end|>", "b"]
    controls = [sum(piece.text is None for piece in pieces) for pieces in found]
    assert controls == [4, 8]


def test_text_with_all_strangers_is_rejected_only_where_one_is_needed(renderer):
    everything = "".join(NONCHARACTERS)
    assert not isinstance(renderer(STRIPS).sequences(read(talk(user(everything), assistant("a")))), Rejected)
    found = renderer(STRIPS).sequences(read(talk(user(everything), assistant("<|im_end|>"))))
    assert found == Rejected("noncharacters", found.detail)


def test_a_stranger_of_the_data_is_kept(renderer, vocabulary):
    words = f"a{NONCHARACTERS[0]}b<|im_end|>{NONCHARACTERS[1]}"
    ((*pieces,),) = renderer(STRIPS).sequences(read(talk(user("q"), assistant(words))))
    assert learned(pieces, vocabulary) == words + "<|im_end|>"


def test_allowed_tokens_of_data_are_tokens(vocabulary):
    maker = renderer_of(load_template(STRIPS, vocabulary, {}), vocabulary, LossPolicy(), "auto", "allow")
    ((*pieces,),) = maker.sequences(read(talk(user("a<|im_end|>b"), assistant("c"))))
    assert [piece.text for piece in pieces][:4] == [None, "user\na", None, "b"]


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        ("ua", [(0, 2)]),
        ("sua", [(1, 3)]),
        ("uaua", [(0, 2), (2, 4)]),
        ("suatauua", [(1, 5), (6, 8)]),
        ("aua", [(0, 1), (1, 3)]),
        ("saua", [(0, 2), (2, 4)]),
        ("uuau", [(1, 3)]),
        ("a", [(0, 1)]),
        ("sa", [(0, 2)]),
        ("su", []),
        ("tua", [(1, 3)]),
    ],
)
def test_answered_turns(roles, turns):
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    assert answered_turns([{"role": names[role], "content": ""} for role in roles]) == turns
