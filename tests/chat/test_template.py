"""A rendering knows which of its characters each message wrote, and which are the assistant's own words."""

import json
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.chat.conversation import Arguments, Rejected
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.chat.template import ChatTemplate, Rendering
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources.exact_json import loads

from tests.peers import chat_templates
from tests.peers.conversations import assistant, system, user

CALL = {"type": "function", "function": {"name": "f", "arguments": Arguments({"a": 1}, '{"a": 1}')}}
CHATML = chat_templates.CHATML
BLOCK = "{{ '<' ~ m.role ~ '>' ~ (m.content or '') ~ '</>' }}"


def render(source, *messages, tools=(), **variables):
    found = ChatTemplate(source, {}).render(list(messages), list(tools), **variables)
    assert isinstance(found, Rendering), found
    return found


def blocks(found):
    """What each message wrote."""
    return {number: found.text[start:stop] for number, (start, stop) in found.extents.items()}


def said(found, kind="content"):
    """The characters of a kind, by message."""
    return [(number, found.text[start:stop]) for start, stop, (number, what) in found.spans if what == kind]


TALK = [system("s"), user("yes"), assistant("yes"), user(""), assistant("yes")]
"""The same words by everyone: nothing can be found by searching for it."""

LOOPS = {
    "the plain loop": f"{{% for m in messages %}}{BLOCK}{{% endfor %}}",
    "a loop over a slice, behind a header": f"<system>{{{{ messages[0].content }}}}</>{{% for m in messages[1:] %}}{BLOCK}{{% endfor %}}",
    "a loop with a condition": f"{{% for m in messages if m.role != 'x' %}}{BLOCK}{{% endfor %}}",
    "a macro for each message": f"{{% macro one(m) %}}{BLOCK}{{% endmacro %}}{{% for m in messages %}}{{{{ one(m) }}}}{{% endfor %}}",
    "a macro that loops": f"{{% macro all(messages) %}}{{% for m in messages %}}{BLOCK}{{% endfor %}}{{% endmacro %}}{{{{ all(messages) }}}}",
    "a loop kept in a variable": f"{{% set all %}}{{% for m in messages %}}{BLOCK}{{% endfor %}}{{% endset %}}{{{{ all }}}}",
    "a loop before that writes nothing": f"{{% set ns = namespace(n=0) %}}{{% for m in messages %}}{{% set ns.n = loop.index %}}{{% endfor %}}{{% for m in messages %}}{BLOCK}{{% endfor %}}",
    "a loop before that could write": f"{{% for m in messages %}}{{% if m.role == 'x' %}}{BLOCK}{{% endif %}}{{% endfor %}}{{% for m in messages %}}{BLOCK}{{% endfor %}}",
    "a loop before that reads backwards": f"{{% set ns = namespace(last=0) %}}{{% for m in messages[::-1] %}}{{% if m.role == 'user' %}}{{% set ns.last = loop.index0 %}}{{% break %}}{{% endif %}}{{% endfor %}}{{% for m in messages %}}{BLOCK}{{% endfor %}}",
    "a loop behind that could write": f"{{% for m in messages %}}{BLOCK}{{% endfor %}}{{% for m in messages %}}{{{{ m.x }}}}{{% endfor %}}",
    "a look at the other messages from inside": f"{{% for m in messages %}}{{% for n in messages %}}{{% if n.role == 'x' %}}{{{{ n.role }}}}{{% endif %}}{{% endfor %}}{BLOCK}{{% endfor %}}",
    "a look at the other messages in the middle": "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}{% for n in messages[loop.index:] %}{{ n.x }}{% endfor %}{{ m.content ~ '</>' }}{% endfor %}",
    "loops over other things": "{% for m in messages %}{% for c in '<' %}{{ c }}{% endfor %}{{ m.role }}>{% for part in [m.content] %}{{ part }}{% endfor %}{% for x in [] %}{{ x }}{% endfor %}</>{% endfor %}",
    "texts side by side": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}",
    "a variable of another name": "{% for entry in messages %}{% set m = entry %}{% set content = m['content'] %}<{{ m['role'] }}>{{ content }}</>{% endfor %}",
    "the loop variable written over": "{% for m in messages %}{% set role = m.role %}{% set m = m.content %}<{{ role }}>{{ m }}</>{% endfor %}",
    "messages that are skipped": f"{{% for m in messages %}}{{% if m.role == 'x' %}}{{% continue %}}{{% endif %}}{BLOCK}{{% endfor %}}",
    "a block": f"{{% block all %}}{{% for m in messages %}}{BLOCK}{{% endfor %}}{{% endblock %}}",
    "a call block": f"{{% macro each(l) %}}{{% for m in l %}}{{{{ caller(m) }}}}{{% endfor %}}{{% endmacro %}}{{% call(m) each(messages) %}}{BLOCK}{{% endcall %}}",
    "generation tags": "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}</>{% endgeneration %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_each_message_gets_its_loop_output(source):
    found = render(source, *TALK)
    assert found.text == "<system>s</><user>yes</><assistant>yes</><user></><assistant>yes</>"
    expected = {0: "<system>s</>", 1: "<user>yes</>", 2: "<assistant>yes</>", 3: "<user></>", 4: "<assistant>yes</>"}
    assert blocks(found) == {number: text for number, text in expected.items() if number in found.extents}
    assert set(found.extents) >= {1, 2, 3, 4}
    assert sorted(found.extents.values()) == [found.extents[number] for number in sorted(found.extents)]
    assert said(found) == [(2, "yes"), (4, "yes")], "the assistant's own, not the user's that read the same"
    assert found.text[: found.prologue] == ("" if 0 in found.extents else "<system>s</>")
    assert found.text[found.epilogue :] == ""


def test_prologue_and_epilogue():
    source = "{{ bos }}{% for m in messages %}{{ m.content }}{% endfor %}{{ 'A:' if add_generation_prompt }}"
    found = render(source, user("q"), assistant("a"), bos="<s>", add_generation_prompt=True)
    assert (found.text, found.prologue, found.epilogue) == ("<s>qaA:", 3, 5)


def test_without_a_loop_everything_is_prologue():
    found = render("{{ messages[0].content }}", user("q"), assistant("a"))
    assert (found.extents, found.prologue, found.epilogue) == ({}, 1, 1)


@pytest.mark.parametrize(
    "source",
    [f"{{% for m in messages %}}{BLOCK}{{% endfor %}}" * 2,
     "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all }}{{ all }}"],
)  # fmt: skip
def test_repeated_messages_are_rejected(source):
    found = ChatTemplate(source, {}).render(TALK, [])
    assert found == Rejected("template_error", found.detail)
    assert "two places" in found.detail or "in the turn of another" in found.detail


CARRIED = {
    "as it is": ("{{ m.content }}", " a b "),
    "plus": ("{{ '<' + m.content + '>' }}", " a b "),
    "tilde": ("{{ 1 ~ m.content ~ none }}", " a b "),
    "trim": ("{{ m.content | trim }}", "a b"),
    "strip": ("{{ m.content.strip() ~ m.content.strip('x')[:0] }}", "a b"),
    "lstrip and rstrip": ("{{ m.content.lstrip().rstrip(' b') }}", "a"),
    "slices": ("{{ m.content[1:-1] }}", "a b"),
    "split": ("{{ m.content.split('b')[0] }}", " a "),
    "split and join": ("{{ m.content.split('a') | join('-') }}", "  b "),
    "the method join": ("{{ '-'.join(m.content.split('a')) }}", "  b "),
    "partition": ("{{ m.content.partition('a')[2] }}", " b "),
    "replace": ("{{ m.content | replace('a', 'xx') }}", "  b "),
    "the method replace": ("{{ m.content.replace('a', 'xx') }}", "  b "),
    "prefix": ("{{ m.content.removeprefix(' a').removesuffix(' ') }}", " b"),
    "default": ("{{ m.content | default('x', true) }}", " a b "),
    "a choice": ("{{ m.content if m.content is string else '' }}", " a b "),
    "a variable": ("{% set c = 'x' ~ m.content %}{{ c }}", " a b "),
    "a namespace": ("{% set ns = namespace(c='') %}{% set ns.c = ns.c ~ m.content %}{{ ns.c }}", " a b "),
    "a block": ("{% set c %} {{ m.content }} {% endset %}{{ c | trim }}", "a b"),
    "a macro": ("{% macro f(x) %}{{ x | trim }}{% endmacro %}{{ f(m.content) }}", "a b"),
    "a call block": ("{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{{ m.content }}{% endcall %}", " a b "),
    "a filter block": ("{% filter trim %} {{ m.content }} {% endfilter %}", "a b"),
    "string": ("{{ m.content | string }}", " a b "),
    "a list": ("{{ [m.content, 'x'] | first }}", " a b "),
    "map": ("{{ [m] | map(attribute='content') | join }}", " a b "),
    "generation tags": ("{% generation %}{{ m.content }}{% endgeneration %}", " a b "),
}  # fmt: skip


@pytest.mark.parametrize(("expression", "kept"), CARRIED.values(), ids=CARRIED)
def test_words_are_known_in_every_template_operation(expression, kept):
    source = f"{{% for m in messages %}}<a>{{% if m.role == 'assistant' %}}{expression}{{% endif %}}</a>{{% endfor %}}"
    found = render(source, user(" a b "), assistant(" a b "), user(" a b "))
    assert "".join(text for _, text in said(found)) == kept
    start, stop = found.extents[1]
    assert all(start <= first <= last <= stop for first, last, (_, kind) in found.spans if kind == "content")


@pytest.mark.parametrize("change", ["upper", "title", "e", "tojson", "reverse", "indent", "list | join"])
def test_words_that_are_written_anew_are_nobodys(change):
    source = f"{{% for m in messages %}}<a>{{{{ m.content | {change} }}}}</a>{{% endfor %}}"
    assert "".join(text for _, text in said(render(source, assistant("<b>a</b>")))) == ""


def test_reasoning_and_content_are_separate():
    source = "{% for m in messages %}<t>{{ m.reasoning_content }}</t>{{ m.content }}{{ m.thinking }}{% endfor %}"
    found = render(source, assistant("same", reasoning_content="same"))
    assert found.text == "<t>same</t>samesame"
    places = [(first, what) for first, _, (_, what) in found.spans if what in {"content", "reasoning"}]
    assert places == [(3, "reasoning"), (11, "content"), (15, "reasoning")]


def test_calls_are_known_by_their_loop_or_by_their_json():
    message = assistant(None, tool_calls=[CALL, CALL])
    calls = "{% for c in m.tool_calls %}<c>{{ c.function.name }}</c>{% endfor %}"
    loop = render(f"{{% for m in messages %}}<m>{calls}</m>{{% endfor %}}", message)
    assert [first for first, _, (_, kind) in loop.spans if kind == "call"] == [3, 6, 11, 14]
    text = render("{% for m in messages %}<m>{{ m.tool_calls | tojson }}</m>{% endfor %}", message)
    ((number, written),) = said(text, "call")
    assert (number, f"<m>{written}</m>") == (0, text.text)
    one = render("{% for m in messages %}<m>{{ m.tool_calls[1] | tojson }}</m>{% endfor %}", message)
    assert said(one, "call") == [(0, one.text[3:-4])]


def test_empty_words_have_a_place():
    found = render("{% for m in messages %}<a>{{ m.content }}</a>{% endfor %}", user(""), assistant(""), assistant(" "))
    assert [(first, last) for first, last, (_, kind) in found.spans if kind == "content"] == [(10, 10), (17, 18)]


def test_absent_fields_are_undefined():
    source = "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ enable_thinking is defined }}"
    assert render(source, user("q")).text == "TrueTrueFalseFalse"
    assert render("{{ tools | length }}", user("q"), tools=[{"name": "f"}]).text == "1"


def test_variables_of_the_template_and_of_one_rendering():
    template = ChatTemplate("{{ a }}{{ b }}{{ add_generation_prompt }}", {"a": 1, "b": [2]})
    assert template.variables == {"a": 1, "b": [2]}
    assert template.render([user("q")], []).text == "1[2]False"
    assert template.render([user("q")], [], b=3, add_generation_prompt=True).text == "13True"
    assert template.render([user("q")], []).text == "1[2]False"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content | int(base=99) }}{{ [].index(1) }}", "ValueError"),
        ("{{ 'a'.nothing() }}", "nothing"),
        ("{{ {} < 1 }}", "TypeError"),
        ("{{ [1, 'a'] | sort }}", "TypeError"),
        ("{{ missing() }}", "missing"),
        ("{% include 'x' %}", "loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion"),
    ],
)
def test_a_conversation_that_a_template_dies_of_is_rejected(source, named):
    found = ChatTemplate(source, {}).render([user("q")], [])
    assert isinstance(found, Rejected)
    assert found.reason == "template_error"
    assert named in found.detail


def test_messages_are_left_as_they_were():
    message = assistant("a", reasoning_content="r", tool_calls=[CALL])
    before = {**message, "tool_calls": [dict(CALL)]}
    render("{% for m in messages %}{{ m.content }}{% endfor %}", message)
    assert message == before
    assert type(message["content"]) is str


WORDS = st.text("ab <>\n", max_size=4)
ROLES = st.sampled_from([user, assistant, lambda text: {"role": "tool", "content": text}])
MESSAGES = st.lists(st.builds(lambda role, text: role(text), ROLES, WORDS), min_size=1, max_size=8)


@given(MESSAGES)
def test_any_conversation_is_cut_where_its_messages_meet(messages):
    found = render(CHATML, *messages)
    expected = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    assert found.text == "".join(expected)
    assert blocks(found) == dict(enumerate(expected))
    answers = [(n, message["content"]) for n, message in enumerate(messages) if message["role"] == "assistant"]
    assert said(found) == answers


NUMBERS = (
    "1.0", "1.10", "1e5", "1E+05", "-0.0", "-0", "0.1", "1e-7", "1e16", "12345678901234567890", "9405511899223197000001",
    '{"deep": [1.50, {"y": 0.10, "n": -9223372036854775809}], "plain": 2.5}',
)  # fmt: skip
PRINTS = (
    "{{ m.tool_calls[0].function.arguments | tojson }}",
    "{{ m.tool_calls[0].function.arguments | tojson(indent=2) }}",
    "{% for k, v in m.tool_calls[0].function.arguments.items() %}{{ k ~ '=' ~ v ~ ';' }}{{ v | tojson }}{% endfor %}",
    "{{ tools | tojson }}",
)


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_equal_transformers(number):
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - takes a second

    arguments = f'{{"n": {number}}}'
    function = '{"type": "function", "function": {"name": "f", "arguments": %s}}'
    call = f'{{"role": "assistant", "content": null, "tool_calls": [{function}]}}'
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"default": {number}}}}}}}]'
    row = json.loads(f'{{"messages": [{call % arguments}], "tools": {tools}}}')
    for expression in PRINTS:
        source = "{% for m in messages %}" + expression + "{% endfor %}"
        (theirs,), _ = render_jinja_template([row["messages"]], tools=row["tools"], chat_template=source)
        for said, defined in [(arguments, tools), (json.dumps(arguments), json.dumps(tools))]:
            found = conversation(loads(f'{{"messages": [{call % said}], "tools": {defined}}}'), None, "tools")
            assert render(source, *found.messages, tools=found.tools).text == theirs


def test_date_is_the_variable():
    source = "{{ strftime_now('%d %B %Y, %H:%M') }}"
    at = ChatTemplate(source, {"date": "2026-03-01T12:30"}).render([], [])
    assert not isinstance(at, Rejected)
    assert at.text == datetime(2026, 3, 1, 12, 30).strftime("%d %B %Y, %H:%M")  # noqa: DTZ001
    guarded = ChatTemplate("{{ strftime_now('%Y') if strftime_now is defined else 'some day' }}", {}).render([], [])
    assert not isinstance(guarded, Rejected)
    assert guarded.text == "some day"


@pytest.mark.parametrize(
    ("form", "variables", "named"),
    [
        ("%d", {}, "template_variables.date"),
        ("%9999999Y", {"date": "2026-03-01"}, "SecurityError"),
        ("%s", {"date": "2026-03-01"}, "SecurityError"),
    ],
)
def test_undated_templates_report_a_missing_date(form, variables, named):
    found = ChatTemplate(f"{{{{ strftime_now('{form}') }}}}", variables).render([], [])
    assert isinstance(found, Rejected)
    assert named in found.detail


@pytest.mark.parametrize("date", ["today", "", 7, None])
def test_a_date_is_a_date(date):
    with pytest.raises(InputError, match=r"^template_variables\.date: "):
        ChatTemplate("{{ strftime_now('%d') }}", {"date": date})


def test_text_added_to_safe_text_is_escaped():
    found = ChatTemplate("{{ '<b>' | safe + '<i>' }}{{ '%s and %s' | format('<b>', 1) }}", {}).render([], [])
    assert not isinstance(found, Rejected)
    assert found.text == "<b>&lt;i&gt;<b> and 1"
