"""Templates mean what they mean to transformers, and can neither break out nor run away."""

import json
import os
import re
import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenmill.tasks.chat import filters
from tokenmill.tasks.chat import template as chat_template
from tokenmill.tasks.chat.conversation import Arguments, Conversation, Rejected
from tokenmill.tasks.chat.template import ChatTemplate, Rendering
from tokenmill.tasks.errors import InputError
from transformers.utils.chat_template_utils import render_jinja_template

from tests.forking import fork
from tests.peers import chat_templates
from tests.peers.conversations import assistant, call, system, tool, user

CALLS = [call("weather", place="Ülm", days=[1, None]) | {"id": "c1"}, call("clock") | {"id": "c2"}]
for each in CALLS:
    given = each["function"]["arguments"]
    each["function"]["arguments"] = Arguments(given, json.dumps(given, ensure_ascii=False))
SAID = assistant(" Let me see. ", *CALLS, reasoning_content="Ask <b>")
TOLD = tool('{"rain": false}') | {"tool_call_id": "c1", "name": "weather"}
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
TALK = Conversation(
    [system("Be brief."), user("Is it\nraining?"), SAID, TOLD, assistant("No & no."), user("Thanks")],
    [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}],
)
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
SIMPLE = Conversation([user("a"), assistant("b")], [])


def ours(source, talk=TALK):
    found = ChatTemplate(source, VARIABLES).render(talk.messages, talk.tools)
    return found.text if isinstance(found, Rendering) else None


def theirs(source, talk=TALK, *, text_arguments=False):
    """What transformers makes of it, None where it refuses; with arguments of calls as objects, or as their JSON text."""
    messages = [with_text_arguments(message) if text_arguments else message for message in talk.messages]
    messages = [{**message, "content": message["content"] or ""} for message in messages]  # where None would be printed
    try:
        (text,), _ = render_jinja_template([messages], tools=talk.tools or None, chat_template=source, **VARIABLES)
    except Exception:  # noqa: BLE001 - whatever a template can die of
        return None
    return text


def with_text_arguments(message):
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": call["function"]["arguments"].text}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


IDIOMS = {
    "macro": "{% macro block(role, text='-') %}<{{ role }}>{{ text | trim }}{% endmacro %}{% for m in messages %}{{ block(m.role, m.content) }}{% endfor %}{{ block('x') }}",
    "macro with many arguments": "{% macro f() %}{{ varargs | join(',') }}{{ kwargs | tojson }}{% endmacro %}{{ f(1, 'a', b=2) }}{{ f.name }}",
    "macro inside of a loop": "{% for m in messages %}{% macro f() %}[{{ m.role }}]{% endmacro %}{{ f() }}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.n }}/{{ ns.last }}/{{ ns.missing }}/{{ ns['n'] }}",
    "namespace of a mapping": "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a ~ ns.b }}{{ ns.a is defined and ns.c is not defined }}",
    "set block": "{% set head %} {{ messages[0].content }} {% endset %}[{{ head }}|{{ head | trim }}|{{ head | length }}]",
    "set block with a filter": "{% set head | upper | trim %} {{ messages[0].content }} {% endset %}{{ head }}",
    "set several": "{% set a, b = 1, 'x' %}{{ a }}{{ b }}",
    "filter block": "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}{% filter replace('a', 'o') | trim %} banana {% endfilter %}",
    "call block": "{% macro wrap(tag) %}<{{ tag }}>{{ caller() }}</{{ tag }}>{% endmacro %}{% for m in messages %}{% call wrap(m.role) %}{{ m.content }}{% endcall %}{% endfor %}",
    "call block with arguments": "{% macro each(l) %}{% for x in l %}{{ caller(x, loop.index) }}{% endfor %}{% endmacro %}{% call(m, n) each(messages) %}{{ n }}:{{ m.role }};{% endcall %}",
    "with": "{% with a = messages[1], b = 2 %}{{ a.content }}{{ b }}{% endwith %}{{ a is defined }}",
    "blocks": "{% block head %}<{{ messages | length }}>{% endblock %}{{ self.head() }}",
    "neighbours in a loop": "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role != m.role %}|{% endif %}{{ m.role }}{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}!{% endif %}{% endfor %}",
    "where a loop is": "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }};{% endfor %}",
    "loop without anything in it": "{% for m in [] %}x{% else %}none{% endfor %}{% for m in messages %}{% else %}x{% endfor %}",
    "loop with a condition": "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ m.role }}{{ loop.last }}{% endfor %}",
    "loop that is left": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.role }}{% endfor %}.",
    "loop that skips": "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}.",
    "loop in a loop": "{% for m in messages %}{% for n in ['a', m.role] %}{{ n[0] }}{{ loop.index }}{% endfor %}{{ m.role }}{{ loop.index }}{% endfor %}",
    "loop over messages in a loop over messages": "{% for m in messages %}{% for n in messages[:loop.index] %}{% if n.role == 'x' %}{{ n.role }}{% endif %}{% endfor %}{{ m.role }}{% endfor %}",
    "loop over the rest": "{% for m in messages[1:] %}{{ m.role }}{% endfor %}",
    "loop backwards": "{% for m in messages[::-1] %}{{ m.role }}{% endfor %}",
    "loop over the last": "{% for m in messages[-2:] %}{{ loop.length }}{{ m.role }}{% endfor %}",
    "loop over what is filtered": "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ m.content }}{% endfor %}{% for m in messages | rejectattr('content') %}x{% endfor %}",
    "loop over pairs": "{% for key, value in messages[1].items() %}{{ key }}={{ value }};{% endfor %}{% for key, value in messages[3] | items %}{{ key }}={{ value }};{% endfor %}{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}",
    "loop over characters": "{% for c in messages[5].content %}{{ c }}-{% endfor %}",
    "recursive loop": "{% for x in [1, [2, [3, []]], 4] recursive %}{% if x is number %}{{ x }}{% else %}({{ loop(x) }}){% endif %}{{ loop.depth0 }}{% endfor %}",
    "loop whose variable is set anew": "{% for m in messages %}{% set m = m.role %}{{ m }}{% endfor %}",
    "tools": "{% for tool in tools %}{{ tool | tojson }}{{ tool.function.name }}{{ tool['function']['parameters'].properties | length }}{% endfor %}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ {'é': '<&\"'} | tojson }}{{ {'é': 1} | tojson(ensure_ascii=true) }}{{ {'b': 1, 'a': [1, 2]} | tojson(sort_keys=true, separators=(',', ':')) }}{{ none | tojson }}{{ 1.5 | tojson }}",
    "json of calls": "{{ messages[2].tool_calls | tojson }}{% for c in messages[2].tool_calls %}{{ c | tojson }}{{ c.function | tojson }}{{ c.function.arguments | tojson(indent=4) }}{% endfor %}",
    "calls": "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson if v is not string else v }}{{ ', ' if not loop.last }}{% endfor %}){{ c.id }}{% endfor %}{% endif %}{% endfor %}",
    "arguments beside text": "{% for c in messages[2].tool_calls %}{{ '\n' + c.function.arguments + '\n' }}{% endfor %}",
    "arguments by tilde": "{% for c in messages[2].tool_calls %}{{ c.function.name ~ ':' ~ c.function.arguments }}{% endfor %}",
    "arguments alone": "{% for c in messages[2].tool_calls %}{{ c.function.arguments }}{% endfor %}",
    "arguments asked what they are": "{% for c in messages[2].tool_calls %}{{ c.function.arguments is string }}{{ c.function.arguments is mapping }}{{ c.function.arguments | length }}{% endfor %}",
    "absent fields": "{% for m in messages %}{{ m.name }}{{ m['name'] }}{{ m.get('name', '?') }}{{ 'name' in m }}{{ m.name is defined }}{{ m.tool_calls | length if m.tool_calls }}{{ m.reasoning_content | default('none') }}{{ m.thinking | default('none') }}{% endfor %}{{ documents }}{{ nothing }}",
    "absent variables": "{{ enable_thinking is defined }}{{ enable_thinking | default(true) }}{{ (x | default({})).y }}{{ add_generation_prompt }}",
    "a field of something absent": "{{ messages[0].nothing.more }}",
    "a call of something absent": "{{ messages[0].nothing() }}",
    "out of range": "{{ messages[99] is defined }}{{ messages[99].role }}",
    "strip": "{% for m in messages %}[{{ m.content.strip() }}|{{ m.content.lstrip() }}|{{ m.content.rstrip('. ') }}|{{ m.content | trim }}|{{ m.content | trim('N') }}]{% endfor %}",
    "split": "{{ messages[1].content.split('\n')[-1] }}{{ messages[1].content.split() | join('+') }}{{ messages[1].content.split('i', 1) }}{{ messages[1].content.rsplit('i', 1)[0] }}{{ messages[1].content.splitlines() }}{{ messages[1].content.partition('\n')[2] }}",
    "tests of text": "{{ messages[1].content.startswith('Is') and messages[1].content.endswith('?') }}{{ 'rain' in messages[1].content }}{{ messages[1].content.find('r') }}{{ messages[1].content.count('i') }}{{ messages[1].content is string }}{{ messages[1].content is iterable }}{{ 'a'.isdigit() }}",
    "replace": "{{ messages[1].content.replace('\n', ' ') }}{{ messages[1].content | replace('i', 'I') }}{{ 'aaa' | replace('a', 'b', 2) }}{{ 'aaa'.replace('a', 'b', 2) }}{{ 'ab' | replace('', '-') }}{{ 12 | replace('1', 'x') }}",
    "replace without a count": "{{ 'aaa' | replace('a', 'b', none) }}",
    "slices of text": "{{ messages[1].content[:5] }}{{ messages[1].content[-4:] }}{{ messages[1].content[0] }}{{ messages[1].content[::-1] }}",
    "upper and lower": "{{ 'aß' | upper }}{{ 'ÄB'.lower() }}{{ 'ab cd' | title }}{{ 'ab cd' | capitalize }}{{ 'Ab'.swapcase() }}",
    "join": "{{ messages | map(attribute='role') | join(', ') }}{{ ['a', 1, none, 2.5] | join }}{{ ', '.join(['a', 'b']) }}{{ [] | join('x') }}{{ 'abc' | join('-') }}{{ {'a': 1, 'b': 2} | join(',') }}",
    "join by name": "{{ messages | join(', ', attribute='role') }}{{ ['a', 'b'] | join(d='+') }}",
    "join by a path": "{{ messages[2].tool_calls | join('; ', attribute='function.name') }}{{ messages | join(',', 'missing') }}",
    "join of what is no text": "{{ ', '.join([1, 2]) }}",
    "indent": "{{ 'a\nb\n\nc' | indent }}{{ 'a\nb' | indent(2, true) }}{{ 'a\n\nb' | indent(2, blank=true) }}{{ 'a\nb' | indent('> ') }}{{ {'a': [1]} | tojson(indent=2) | indent(4) }}",
    "indent of the last line": "[{{ 'a\nb\n' | indent(2) }}]",
    "indent of an empty first line": "[{{ '\na' | indent(2, true) }}][{{ '' | indent(2, true) }}]",
    "escape": "{{ '<&>\"' | e }}{{ ('<' | safe) ~ '&' }}{{ '<b>' }}",
    "escape what is traced": "{% for m in messages %}{{ m.content | e }}{{ (m.content | safe) ~ '<' }}{% endfor %}",
    "defaults": "{{ x | default('d') }}{{ '' | default('d', true) }}{{ none | default('d') }}{{ false | d('x', boolean=true) }}",
    "numbers": "{{ 7 // 2 }}{{ 7 / 2 }}{{ -7 % 3 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 2 ** 0.5 }}{{ 3 * 'ab' }}{{ [0] * 3 }}{{ 1 + 2.5 }}{{ true + 1 }}{{ '7' | int + 1 }}{{ 'x' | int(5) }}{{ 'ff' | int(base=16) }}{{ 2.567 | round(1) }}{{ 2.5 | round(method='ceil') | int }}{{ -3 | abs }}",
    "lists": "{{ [1] + [2] }}{{ (1,) + (2,) }}{{ [3, 1, 2] | sort }}{{ [1, 1, 2] | unique | list }}{{ [1, 2] | first }}{{ [1, 2] | last }}{{ [1, 2] | sum }}{{ [1, 2] | max }}{{ [1, 2] | reverse | list }}{{ range(3) | list }}{{ range(1, 7, 3) | list }}{{ 'abc' | list }}{{ messages | sum(attribute='x', start=0) if false }}",
    "mappings": "{{ dict(a=1, **{'b': 2}) }}{{ {'a': 1}.get('b') }}{{ {'a': {'b': 3}}['a'].b }}{{ {'a': 1}.keys() | list }}{{ {'a': 1}.values() | list }}",
    "map and select": "{{ ['a ', ' b'] | map('trim') | list }}{{ [1, 2, 3] | select('odd') | list }}{{ [1, none] | reject('none') | list }}{{ ['ab', 'b'] | map('replace', 'b', 'c') | join }}{{ messages | selectattr('role', 'in', ['user']) | map(attribute='content') | list }}",
    "tilde": "{{ 1 ~ none ~ 'a' ~ 2.5 ~ [1] ~ x }}{{ messages[0].content ~ '\n' ~ messages[1].content }}{{ ('a' ~ 'b') | upper }}",
    "plus of text and number": "{{ 'a' + 1 }}",
    "plus of text and none": "{{ 'a' + none }}",
    "choices": "{{ 'a' if messages else 'b' }}{{ 'a' if false }}{% if messages[0].role == 'user' %}u{% elif messages[0]['role'] == 'system' %}s{% else %}x{% endif %}{{ not true or (1 < 2 <= 2) and 3 in [3] and 4 not in [3] }}",
    "raw": "{% raw %}{{ x }}{% endraw %}{# gone #}",
    "white space": "  {% if true %}\n  a\n  {%- endif %}\n{% for x in [1, 2] %}\n  {{ x }}\n{% endfor %}\n  {{- ' b ' -}}  \n c\n",
    "refusal": "{{ raise_exception('no') }}",
    "refusal that does not happen": "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}ok",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}{% endgeneration %}</a>{% endif %}{% endfor %}",
    "set in a generation": "{% set x = 'outer' %}{% generation %}{% set x = 'inner' %}{{ x }}{% endgeneration %}{{ x }}",
    "set before a generation": "{% for m in messages %}{% set x = m.role %}{% generation %}{{ x }}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "nested conditions of text": "{% for m in messages %}{{ ('<|' + m.role + '|>\n') if m.role in ['user', 'assistant'] else '' }}{{ (m.content if m.content is string else '') | trim }}{% endfor %}",
    "a whole message": "{% for m in messages %}{{ m }}{% endfor %}",
    "a message with reasoning as JSON": "{{ messages[2] | tojson }}",
    "a message as JSON": "{{ messages[3] | tojson }}{{ messages[0] }}",
    "equal messages": "{{ messages[0] == {'role': 'system', 'content': 'Be brief.'} }}{{ messages[0] == messages[1] }}{{ messages.index(messages[1]) }}",
    "loops of both kinds": "{% for m in messages %}{% set ns = namespace(calls=0) %}{% for c in m.tool_calls or [] %}{% set ns.calls = ns.calls + 1 %}{% endfor %}{{ ns.calls }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("source", IDIOMS.values(), ids=IDIOMS)
def test_idioms_match_transformers(source):
    assert ours(source) in {theirs(source), theirs(source, text_arguments=True)}


def test_idioms_do_not_fail():
    refused = {name for name, source in IDIOMS.items() if theirs(source, text_arguments=True) is None}
    assert refused <= {
        "a field of something absent", "a call of something absent", "out of range", "join of what is no text",
        "plus of text and number", "plus of text and none", "refusal", "calls",
    }  # fmt: skip
    assert theirs(IDIOMS["calls"]) is not None


# Runaway: N is small enough for transformers, or the number that follows.

NESTED = "{% set ns = namespace(x=FIRST, y=FIRST) %}{% for i in range(N) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
LISTS, PAIRS = NESTED.replace("FIRST", "[1]"), NESTED.replace("FIRST", "(1,)").replace("[", "(").replace("]", ")")
TABLES = NESTED.replace("FIRST", "{}")
for each in ("x", "y"):
    TABLES = TABLES.replace(f"[ns.{each}, ns.{each}]", f"{{1: ns.{each}, 2: ns.{each}}}")
COMPARED = [
    "ns.x == ns.y", "ns.x != ns.y", "ns.x < ns.y", "ns.x <= ns.y", "ns.x > ns.y", "ns.x >= ns.y", "1 < 2 and ns.x <= ns.y <= ns.x", "ns.x in [ns.y]",
    "ns.x not in [ns.y]", "[ns.x] in [[ns.y]]", "ns.x in {1: ns.y}.values()", "(1, ns.x) in {1: ns.y}.items()",
    "{1: ns.x}.items() == {1: ns.y}.items()", "ns.x is eq ns.y", "ns.x is ne ns.y", "ns.x is lessthan ns.y", "ns.x is ge ns.y", "ns.x is in [ns.y]",
    "[ns.x] | select('eq', ns.y) | list | length", "[ns.x] | reject('in', [ns.y]) | list | length",
    "[{'a': ns.x}] | selectattr('a', 'equalto', ns.y) | list | length", "[{'a': ns.x}] | rejectattr('a', '<', ns.y) | list | length",
    "ns.x in ([ns.y] | map('list'))", "[ns.y].index(ns.x)", "[ns.y].count(ns.x)", "[ns.x, ns.y] | sort | length", "[ns.x, ns.y] | max | length",
    "[{'a': ns.x}, {'a': ns.y}] | sort(attribute='a') | length", "[{'a': ns.x}, {'a': ns.y}] | min(attribute='a') | length",
    "{1: ns.x, 2: ns.y} | dictsort(by='value') | length", "[[ns.x, ns.y]] | map('sort') | list | length",
    "([ns.x, ns.y] | map('list')) | sort | length",
]  # fmt: skip
HASHED = [
    "{ns.x: 1} | length", "ns.x in {1: 2}", "ns.x in {1: 2}.keys()", "{1: 2}[ns.x] is defined", "messages[0][ns.x] is defined", "{1: 2}.get(ns.x)",
    "[ns.x] | unique | list | length", "[{'a': ns.x}] | unique(attribute='a') | list | length", "dict([[ns.x, 1]]) | length", "dict({1: ns.x}.items()) | length",
    "{1: ns.x}.items() | unique | list | length",
]  # fmt: skip
CHANGED = "{% for i in [1, 2] %}{{ loop.changed(ns.x if i == 1 else ns.y) }}{% endfor %}"
KEPT = "{% set ns = namespace(l=[], t='ab' * N * 100) %}{% for i in range(N) %}{% set ns.l = ns.l + [WORK] %}{% endfor %}{{ ns.l | length }}"
GROWING = "{% set ns = namespace(t='ab') %}{% for i in range(N) %}WORK{% endfor %}{{ ns.t | length }}"
RUNAWAY = {
    "loops in loops": ("{% for a in range(N) %}{% for b in range(N) %}{% endfor %}{% endfor %}x", 99_999),
    "loops in loops that write": ("{% for a in range(N) %}{% for b in range(N) %}{{ a }}{% endfor %}{% endfor %}x", 99_999),
    "a range": ("{{ range(N) | length }}", 10**9),
    "macros that call themselves": ("{% macro f(n) %}{{ f(n - 1) if n else 'x' }}{% endmacro %}{{ f(N) }}", 10**6),
    "macros that call themselves twice": ("{% macro f(n) %}{{ 'x' if n < 2 else f(n - 1) ~ f(n - 2) }}{% endmacro %}{{ f(N) | length }}", 60),
    "macros that call themselves in turn": ("{% macro f(n) %}{% call g(n) %}{{ n }}{% endcall %}{% endmacro %}{% macro g(n) %}{{ f(n - 1) if n else caller() }}{% endmacro %}{{ f(N) }}", 10**6),
    "a loop that goes into itself": ("{% for x in [N] recursive %}{{ loop([x - 1]) if x else 'x' }}{% endfor %}", 10**6),
    "lists in lists": ("{% set ns = namespace(l=[]) %}{% for i in range(N) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | string | length }}", 90_000),
    "lists in lists as JSON": ("{% set ns = namespace(l=[]) %}{% for i in range(N) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson | length }}", 90_000),
    "twice by plus": (GROWING.replace("WORK", "{% set ns.t = ns.t + ns.t %}"), 60),
    "twice by tilde": (GROWING.replace("WORK", "{% set ns.t = ns.t ~ ns.t %}"), 60),
    "twice by times": (GROWING.replace("WORK", "{% set ns.t = ns.t * 2 %}"), 60),
    "twice by join": (GROWING.replace("WORK", "{% set ns.t = [ns.t, ns.t] | join %}"), 60),
    "twice by the method join": (GROWING.replace("WORK", "{% set ns.t = ns.t.join(['', '', '']) %}"), 60),
    "twice by replace": (GROWING.replace("WORK", "{% set ns.t = ns.t | replace('a', 'aa') | replace('b', 'bb') %}"), 60),
    "twice by the method replace": (GROWING.replace("WORK", "{% set ns.t = ns.t.replace('b', 'bb') %}"), 60),
    "twice between every two": (GROWING.replace("WORK", "{% set ns.t = ns.t.replace('', 'c') %}"), 60),
    "twice by a block": (GROWING.replace("WORK", "{% set ns.t %}{{ ns.t }}{{ ns.t }}{% endset %}"), 60),
    "twice by a macro": ("{% macro f(t) %}{{ t }}{{ t }}{% endmacro %}" + GROWING.replace("WORK", "{% set ns.t = f(ns.t) %}"), 60),
    "twice by a call": ("{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}" + GROWING.replace("WORK", "{% set ns.t %}{% call f() %}{{ ns.t }}{% endcall %}{% endset %}"), 60),
    "twice by indent": (GROWING.replace("WORK", "{% set ns.t = ns.t | indent(ns.t, true) %}"), 60),
    "twice by JSON": (GROWING.replace("WORK", "{% set ns.t = [ns.t, ns.t] | tojson %}"), 60),
    "twice by writing a list": (GROWING.replace("WORK", "{% set ns.t = [ns.t, ns.t] | string %}"), 60),
    "twice a list": (GROWING.replace("t='ab'", "t=[1, 2]").replace("WORK", "{% set ns.t = ns.t + ns.t %}"), 60),
    "a text of that many": ("{{ ('x' * N) | length }}", 10**10),
    "a text of that many, the other way": ("{{ (N * 'x') | length }}", 10**10),
    "a list of that many": ("{{ ([0] * N) | length }}", 10**10),
    "indented by that many": ("{{ 'a\nb' | indent(N) | length }}", 10**10),
    "JSON indented by that many": ("{{ [1] | tojson(indent=N) | length }}", 10**10),
    "long lists as JSON with an indent": ("{{ (range(N) | list) | tojson(indent=N) | length }}", 50_000),
    "long lists deep inside as JSON with an indent": (
        "{% set ns = namespace(l=range(N) | list) %}{% for i in range(N) %}{% if i < 300 %}{% set ns.l = [ns.l] %}{% endif %}{% endfor %}{{ ns.l | tojson(indent=50) | length }}", 9_000
    ),
    "a long text many times as JSON": ("{% set s = 'x' * N %}{{ ([s] * N) | tojson | length }}", 30_000),
    "a long text many times, written": ("{% set s = 'x' * N %}{{ ([s] * N) | string | length }}", 30_000),
    "a long text many times, joined": ("{% set s = 'x' * N %}{{ ([s] * N) | join | length }}", 30_000),
    "a long text many times, by tilde": ("{% set s = 'x' * N %}{{ ('' ~ [s] * N) | length }}", 30_000),
    "a text that escapes to five times as much": ("{{ ('&' * N) | e | length }}", 3_000_000),
    "a long text many times, in capitals": ("{{ (['x' * N * 100] * N) | map('upper') | list | length }}", 15_000),
    "a long text many times, cut": ("{% set t = 'x' * N * 100 %}{% set ns = namespace(l=[]) %}{% for i in range(N) %}{% set ns.l = ns.l + [t[1:]] %}{% endfor %}{{ ns.l | length }}", 15_000),
    "a long text many times, cut into parts": (
        "{% set t = 'ab' * N * 100 %}{% set ns = namespace(l=[]) %}{% for i in range(N) %}{% set ns.l = ns.l + [t.split('a')] %}{% endfor %}{{ ns.l | length }}", 10_000
    ),
    "a long text many times, turned": (
        "{% set t = 'x' * N * 100 %}{% set ns = namespace(l=[]) %}{% for i in range(N) %}{% set ns.l = ns.l + [t.upper()] %}{% endfor %}{{ ns.l | length }}", 15_000
    ),
    "a search from behind": ("{{ ('a' * (N * 2)).rfind('ab' + 'a' * N) }}", 400_000),
    "a number by another": ("{{ (('f' * (N * 2)) | int(0, 16)) // (('f' * N) | int(0, 16)) > 1 }}", 400_000),
    "output": ("{% for i in range(N) %}{{ 'x' * N }}{% endfor %}", 30_000),
    "texts that are kept": ("{% set ns = namespace(l=[]) %}{% for i in range(N) %}{% set ns.l = ns.l + ['x' * (N * 60 + i)] %}{% endfor %}{{ ns.l | length }}", 10_000),
    "a power": ("{{ 2 ** N > 1 }}", 10**10),
    "a power of powers": ("{{ ((((10 ** N) ** N) ** N) ** N) ** N > 1 }}", 60),
    "squares": ("{% set ns = namespace(x=3) %}{% for i in range(N) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x > 1 }}", 60),
    "rounded to that many places": ("{{ 1.5 | round(N, 'ceil') }}", 10**9),
    "rounded to that many places before the point": ("{{ 15 | round(-1 * N) }}", 10**9),
    **{f"{value} of lists": (LISTS + "{{ " + value + " }}", 40) for value in COMPARED},
    **{f"{value} of pairs": (PAIRS + "{{ " + value + " }}", 40) for value in COMPARED[::5] + HASHED},
    **{f"{value} of tables": (TABLES + "{{ " + value + " }}", 40) for value in ("ns.x == ns.y", "ns.x != ns.y", "ns.x in [ns.y]", "[ns.y].index(ns.x)")},
    "a long text in a list of others": ("{% set s = 'x' * N * 500 %}{% set t = 'x' * N * 500 %}{{ s in [t] * N * 2 }}", 8_000),
    "numbers of one hash": ("{{ range(0, N * 2305843009213693951, 2305843009213693951) | unique | list | length }}".replace("2305843009213693951", "(2 ** (N // 1000))"), 99_000),
    "changed lists": (LISTS + CHANGED, 40),
    "changed pairs": (PAIRS + CHANGED, 40),
    **{f"a long text many times, by {work}": (KEPT.replace("WORK", work), 15_000) for work in (
        "ns.t + 'a'", "ns.t ~ 'a'", "[ns.t, 'a'] | join", "ns.t | replace('c', 'd')", "ns.t | indent", "ns.t | e", "ns.t | tojson", "ns.t.strip('a')",
        "'%s' | format(ns.t)", "[ns.t] | string", "ns.t | list", "ns.t | reverse | list", "ns.t | unique | list", "ns.t | title", "ns.t[1:]",
    )},
    **{f"a long list many times, by {work}": (KEPT.replace("'ab' * N * 100", "[1] * N").replace("WORK", work), 15_000) for work in (
        "ns.t + [1]", "ns.t[1:]", "ns.t | list", "ns.t | sort", "ns.t | reverse | list", "ns.t | map('abs') | list", "ns.t * 2",
    )},
    "a long text sought in many": ("{% set s = 'x' * N * 200 %}{% set t = 'x' * N * 200 %}{% for i in range(N) %}" + "{{ s in [t, t, t, t] }}" * 9 + "{% endfor %}", 9_000),
    "long texts compared often": ("{% set s = 'x' * N * 300 %}{% set t = 'x' * N * 300 %}{% for i in range(N) %}" + "{{ s == t }}" * 300 + "{% endfor %}", 9_000),
    "a text sought in a long list": ("{% set l = [0] * N %}{% for i in range(N) %}" + "{{ 'x' in l }}" * 300 + "{% endfor %}", 9_000),
    "work that no loop counts": ("{% set l = range(N * 4) | list %}{% for i in range(N) %}" + "{{ l | sort | length }}" * 40 + "{% endfor %}", 240),
}  # fmt: skip

SECONDS = 5
MEMORY = 1 << 30


def in_a_child(work):
    """What `work` returns, as JSON, or how its process ended; it may take SECONDS and MEMORY more than there is now."""
    reading, writing = os.pipe()

    def limited():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even in the middle of one operation
        signal.alarm(SECONDS)
        size = int(re.search(r"VmSize:\s+(\d+)", open("/proc/self/status").read())[1]) << 10  # noqa: PTH123, SIM115
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
        try:
            answer = work()
        except BaseException as error:  # noqa: BLE001 - what came out is the answer
            answer = ["raised", type(error).__name__, str(error)[:200]]
        os.write(writing, json.dumps(answer).encode())

    child = fork(limited)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    return json.loads(answer) if answer else ["ended", os.waitstatus_to_exitcode(status)]


@pytest.fixture
def small(monkeypatch):
    """Limits that are reached sooner."""
    monkeypatch.setattr(filters, "MAX_STEPS", 20_000)
    monkeypatch.setattr(filters, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(filters, "MAX_CHARACTERS", 4_000_000)


def attempt(source):
    """What becomes of a template: text, reason and detail of a rejection, or the refusal to take it."""
    try:
        found = ChatTemplate(source, {}).render(SIMPLE.messages, [])
    except InputError as error:
        return ["refused", str(error)]
    return [found.reason, found.detail] if isinstance(found, Rejected) else ["text", found.text[:200]]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "many"), RUNAWAY.values(), ids=RUNAWAY)
def test_a_template_that_runs_away_is_stopped(small, source, many):
    few = source.replace("N", "3")
    assert attempt(few) == ["text", theirs(few, SIMPLE)[:200]], "three are no fault"
    answer = in_a_child(lambda: attempt(source.replace("N", str(many))))
    assert answer[0] in {"template_error", "refused"}, answer


LIMITS = {
    "steps": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "1,000,000 steps"),
    "characters of a text": ("{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}", "67,108,864"),
    "characters in all": ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "67,108,864"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("source", "named"), LIMITS.values(), ids=LIMITS)
def test_the_limit_is_named(source, named):
    reason, detail = in_a_child(lambda: attempt(source))
    assert reason == "template_error"
    assert named in detail


@pytest.mark.parametrize("seconds", [0.5, 60])
def test_total_memory_of_a_template_is_limited(small, monkeypatch, seconds):
    """By what it keeps, and not only because keeping takes time."""
    monkeypatch.setattr(filters, "MAX_SECONDS", seconds)
    source = "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + ['x' * (3000000 + i)] %}{% endfor %}{{ ns.l | length }}"
    assert in_a_child(lambda: attempt(source))[0] == "template_error"


def test_calls_are_steps(small, monkeypatch):
    monkeypatch.setattr(filters, "MAX_SECONDS", 60)
    source = "{% macro f(n) %}{{ n }}{% endmacro %}{% for a in range(N) %}" + "{{ f(1) }}" * 200 + "{% endfor %}"
    assert attempt(source.replace("N", "9"))[0] == "text"
    assert "20,000 steps" in attempt(source.replace("N", "150"))[1]


def test_the_clock_is_a_limit(monkeypatch):
    monkeypatch.setattr(filters, "MAX_SECONDS", 0.05)
    reason, detail = attempt("{% for a in range(999) %}{% for b in range(999) %}{{ b }}{% endfor %}{% endfor %}")
    assert reason == "template_error"
    assert "more than 0.05 seconds" in detail


def test_each_rendering_has_its_own_budget(monkeypatch):
    monkeypatch.setattr(filters, "MAX_STEPS", 100)
    chat = ChatTemplate("{% for a in range(n) %}{% endfor %}x", {})
    for number, stopped in ((90, False), (90, False), (200, True), (90, False)):
        found = chat.render(SIMPLE.messages, [], n=number)
        assert isinstance(found, Rejected) is stopped


def test_a_thousand_messages_are_not_a_runaway():
    talk = Conversation([*SIMPLE.messages] * 500, [])
    found = ChatTemplate(chat_templates.template("qwen3"), {}).render(talk.messages, [])
    assert isinstance(found, Rendering)
    assert found.text.count("<|im_end|>") == 1000


SOURCES = {
    "a bracket too few": "{{ messages[0 }}",
    "an end too few": "{% for m in messages %}",
    "a tag that is none": "{% do messages.append(1) %}",
    "a filter that is none": "{{ 'a' | frobnicate }}",
    "a filter whose result may be any size": "{{ 'a' | center(10) }}",
    "a filter of chance": "{{ [1, 2] | random }}",
    "a test that is none": "{{ 1 is frobnicated }}",
    "brackets in brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "loops in loops in loops": "{% for m in messages %}" * 30 + "x" + "{% endfor %}" * 30,
    "a generation without an end": "{% generation %}x",
    "a number of any length": "{{ " + "9" * 5000 + " }}",
    "branches without an end": "{% if 0 %}" + "{% elif 0 %}" * 3000 + "{% endif %}",
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_broken_templates_are_reported_once_and_early(source):
    with pytest.raises(InputError, match=r"chat_template(:\d+)?: [^;]{12}.*; fix the template"):
        ChatTemplate(source, {})


@pytest.mark.slow
@pytest.mark.parametrize("thread", [False, True])
def test_one_operation_without_an_end_ends_the_process(monkeypatch, tmp_path, thread):
    """Neither Python's own limits nor Ctrl-C reach it."""
    monkeypatch.setattr(chat_template, "_LIMIT", chat_template._Time(value=(0, 200_000_000)))  # noqa: SLF001 - a fifth of a second
    chat = ChatTemplate("{{ messages | length }}", {})
    chat._sandbox.filters["length"] = lambda _: sum(range(10**12))  # noqa: SLF001 - an operation that nothing bounds

    def work():
        os.dup2(os.open(tmp_path / "stderr", os.O_CREAT | os.O_WRONLY), 2)
        with ThreadPoolExecutor(1) as pool:
            (pool.submit if thread else lambda each, *given: each(*given))(chat.render, SIMPLE.messages, [])

    answer = in_a_child(work)
    assert answer == ["ended", -signal.SIGKILL]
    assert "the chat template computes for more than" in (tmp_path / "stderr").read_text()


def test_a_fault_has_its_line():
    with pytest.raises(InputError, match="chat_template:3: "):
        ChatTemplate("a\n{{ 1 }}\n{% endfor %}", {})


ESCAPES = [
    "{{ ''.__class__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ ''['__class__'] }}", "{{ messages.__class__ }}",
    "{{ messages[0].__class__ }}", "{{ (1).__class__ }}", "{{ none.__class__ }}", "{{ [].__reduce__() }}", "{{ {}.__init__ }}",
    "{{ messages[1].content.__class__ }}", "{{ messages[1].content.__str__.__func__ }}", "{{ messages[1].__slots__ }}",
    "{{ messages | map(attribute='__class__') | list | length and messages | map(attribute='__class__') | first }}",
    "{{ '' | attr('__class__') }}", "{{ ['a'] | map('attr', '__class__') | list }}", "{{ messages | selectattr('__class__') | list | length }}",
    "{{ '{0.__class__}'.format(1) }}", "{{ '{a}'.format_map({'a': 1}) }}", "{{ '%s' % 1 }}", "{{ '%1000000000d' % 1 }}",
    "{{ 'a'.zfill(1000000000) }}", "{{ 'a'.ljust(1000000000) }}", "{{ 'a'.center(1000000000) }}", "{{ 'a\t'.expandtabs(1000000000) }}",
    "{{ 'a'.encode() }}", "{{ 'a'.translate({97: 'b'}) }}", "{{ 'a'.maketrans('a', 'b') }}", "{{ 'a' | format }}",
    "{{ cycler('a') }}", "{{ cycler.__init__.__globals__ }}", "{{ lipsum() }}", "{{ lipsum.__globals__ }}", "{{ joiner(',') }}",
    "{{ raise_exception.__globals__ }}", "{{ raise_exception.__code__ }}", "{{ range.__self__ }}", "{{ dict.__base__ }}", "{{ dict.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}", "{{ namespace().__class__ }}", "{{ namespace().__dict__ }}", "{{ namespace()._Namespace__attrs }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}", "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
    "{{ namespace(**{'__class__': 1}).a }}{{ 'made' }}", "{{ namespace(_x=1).a }}{{ 'made' }}", "{{ namespace({'__init__': 1}).a }}{{ 'made' }}",
    "{{ self.__init__.__globals__ }}", "{{ self._TemplateReference__context }}", "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% for m in messages %}{{ loop._iterator }}{% endfor %}", "{% macro f() %}{% endmacro %}{{ f.__globals__ }}", "{% macro f() %}{% endmacro %}{{ f._func }}",
    "{{ (messages | map('upper')).gi_frame }}", "{{ (messages | map('upper')).gi_code }}", "{{ ''.join.__self__ }}", "{{ messages.copy.__self__ }}",
    "{{ messages.append(1) }}", "{{ messages.pop() }}", "{{ messages.clear() }}", "{{ messages.sort() }}", "{{ messages.reverse() }}",
    "{{ messages.extend([1]) }}", "{{ messages.insert(0, 1) }}", "{{ messages.remove(messages[0]) }}", "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}", "{{ messages[0].setdefault('a', 1) }}", "{{ messages[0].clear() }}", "{{ messages[0].popitem() }}",
    "{% set messages[0].role = 'x' %}", "{{ dict.fromkeys }}", "{% include '/etc/hostname' %}", "{% import '/etc/hostname' as x %}", "{% extends 'x' %}",
    "{{ open('/etc/hostname') }}", "{{ __import__('os') }}", "{{ environment.filters }}", "{{ context }}", "{{ self.environment }}",
    "{{ undefined.__class__ }}", "{{ undefined._undefined_message }}", "{{ messages[0].nothing.__class__ }}", "{{ messages[0].nothing._fail_with_undefined_error }}",
    "{{ 'a' | __opened__(1) }}", "{{ 'generated' | __marked__ }}", "{{ 1 | __ended__ }}",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_leads_out(source):
    before = [dict(message) for message in SIMPLE.messages]
    outcome = in_a_child(lambda: attempt(source))
    assert outcome in (["text", ""], ["text", "0"]) or outcome[0] in {"template_error", "refused"}
    attempt(source)
    assert SIMPLE.messages == before


@pytest.mark.parametrize(
    "source",
    ["{{ strftime_now('%Y') }}", "{{ now() }}", "{{ time }}", "{{ datetime }}", "{{ [1, 2, 3] | random }}", "{{ lipsum() }}", "{{ range(9) | shuffle }}"],
)  # fmt: skip
def test_time_and_chance_are_not_there(source):
    assert attempt(source) == ["text", ""] or attempt(source)[0] in {"template_error", "refused"}


@pytest.mark.parametrize(
    "source",
    ["{{ messages | map(attribute='role') }}", "{{ messages[0].items }}", "{{ 'a'.upper }}", "{{ raise_exception }}", "{{ dict }}", "{{ namespace }}",
     "{{ messages | select }}", "{{ [range] }}", "{{ 'a' ~ raise_exception }}", "{{ [messages[0].get] | join }}", "{{ {'a': 'b'.join} | string }}",
     "{% for m in messages %}{{ loop }}{% endfor %}", "{{ self }}", "{% macro f() %}{% endmacro %}{{ f }}{{ namespace(a=1) }}"],
)  # fmt: skip
def test_memory_addresses_are_hidden(source):
    kind, text = attempt(source)
    assert kind in {"template_error", "refused"} or "0x" not in text


def test_templates_cannot_change_later_renderings():
    chat = ChatTemplate(
        "{% set x = namespace(n=0) %}{% for m in messages %}{% set x.n = x.n + 1 %}{% endfor %}{{ x.n }}", {"k": [1]}
    )
    assert [chat.render(SIMPLE.messages, []).text for _ in range(3)] == ["2"] * 3
