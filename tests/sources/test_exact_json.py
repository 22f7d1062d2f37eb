"""Numbers keep their spelling and objects their keys; what is JSON is what orjson and json together say it is."""

import json
from decimal import Decimal

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.sources import exact_json
from tokenmill.tasks.sources.exact_json import (
    NumberRangeError,
    RepeatedKeys,
    compact,
    loads,
    loads_all,
    repeated_key,
    with_placeholders,
)

DIGITS = st.text("0123456789", min_size=1, max_size=25)
INTEGERS = st.one_of(
    st.integers().map(str), st.sampled_from(["-0", "0", str(2**63), str(2**64), str(-(2**63) - 1), "9" * 400])
)
FLOATS = st.builds(
    "{}{}{}.{}{}".format, st.sampled_from(["", "-"]), st.just(""), st.integers(0, 10**20), DIGITS,
    st.sampled_from(["", "e5", "E+07", "e-300", "E-0"]),
) | st.sampled_from(["1e3", "1E3", "-0.0", "1.50", "0.10", "1e-400", "1.7976931348623157e308", "0.25", "12.0", "0.0001", "12345678901234.5"])  # fmt: skip
TEXTS = st.text(st.sampled_from(list('ab"\\é/{}[]:,-01.e ')), max_size=8).map(json.dumps)
SPELLINGS = st.recursive(
    st.one_of(INTEGERS, FLOATS, TEXTS, st.sampled_from(["true", "null"])),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(st.sampled_from("abcdefgh"), inner), max_size=4, unique_by=lambda pair: pair[0]).map(
            lambda pairs: "{" + ",".join(f'"{key}":{each}' for key, each in pairs) + "}"
        )
    ),
    max_leaves=12,
)


def normal(text):
    """The value with its numbers as texts, by the parser of the standard library alone."""
    return json.loads(text, parse_float=lambda spelt: ("float", spelt), parse_int=lambda spelt: ("int", spelt))


@given(SPELLINGS)
@example('{"a": "\\\\", "b": [-0, "-0", 1.50]}')
@example("[" + "9" * 400 + ",1.50]")
def test_every_number_is_written_as_it_was_read(text):
    value = loads(text)
    assert value == json.loads(text)
    assert normal(compact(value).decode()) == normal(text)
    plain, restored = with_placeholders(value)
    for style in ({}, {"indent": 2}, {"ensure_ascii": False, "sort_keys": True}, {"separators": (",", ":")}):
        assert normal(restored(json.dumps(plain, **style))) == normal(text)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": 'a "quote", \\ and {[1.50'}], "score": 0.87, "id": 2**63 - 1},
        [{"key": -12.5}, {"key": [0.0, 1.0, True, None]}, {f"key {number}": "" for number in range(300)}],
    ],
)
def test_ordinary_rows_are_parsed_once(row, monkeypatch):
    text = json.dumps(row)
    monkeypatch.setattr(exact_json.json, "loads", None)
    assert loads(text) == row


@given(SPELLINGS, st.integers(10**10, 10**10 + 3), st.integers(0, 3))
def test_a_mark_is_never_taken_for_data(text, begin, number):
    text = f'["{begin}{number:07}", {begin}{number:07}, {text}, 1.50, "\\u{str(begin)[:4]}{str(begin)[4:]}{number:07}"]'
    assert normal(compact(loads(text)).decode()) == normal(text)


def test_plain_values_are_orjsons_own():
    value = {"a": [1, "x", None, True, -5], "b": {"c": "2024-01-05"}}
    text = orjson.dumps(value)
    assert loads(text) == value
    assert with_placeholders(value)[0] is value
    assert compact(value) == text


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"a": 1, "a": 1}', "a"),
        ('[{"b": {"c": "x", "c": null}}]', "c"),
        ('{"\\u0061": 1, "a": 2}', "a"),
        ('{"x": "\\\\", "a": "\\"", "a": "\\\\\\""}', "a"),
        ('{"a":1,"a":"\\u0022\\u0022"}', "a"),
        ('{"a":"\\u0022","a\\"":"","a":"\\u0022u0022"}', "a"),
        ('{"a\\"": "\\"", "b": "\\u0022"}', None),
        ('{"a": 1, "b": "a"}', None),
        ('[{"a": 1}, {"a": 1}]', None),
    ],
)
def test_a_key_that_stands_twice_is_told(text, key):
    value = loads(text)
    assert repeated_key(value) == key
    assert value == json.loads(text)
    assert isinstance(loads('{"a": 1, "a": 2}'), RepeatedKeys)


@pytest.mark.parametrize("text", ["1e400", "[-1E999]", '{"a": 1e309}', "9" * 4301, "[-" + "1" * 5000 + "]"])
def test_a_number_that_is_json_and_cannot_be_held_is_said_to_be_so(text):
    with pytest.raises(NumberRangeError, match="is valid JSON, but"):
        loads(text)


LONG = "9" * 400


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[1.50, Infinity]",
        "{",
        "01",
        '"\\ud800"',
        f'[{LONG}, "\\ud800"]',
        f"[{LONG}, NaN]",
        f"[{LONG}",
        f"[{LONG}] x",
    ],
)
def test_what_is_no_json_is_refused_beside_odd_numbers_too(text):
    with pytest.raises(orjson.JSONDecodeError):
        loads(text)


@pytest.mark.parametrize("levels", [100, 254, 255, 300, 1000])
@pytest.mark.parametrize("number", ["1.50", "1.5", "1", f"{2**70}"])
def test_a_number_is_exact_or_refused_however_deep_it_is(number, levels):
    deep = "[" * levels + number + "]" * levels
    if levels > 254 and number != "1":
        with pytest.raises(NumberRangeError, match="more than 254 levels"):
            loads(deep)
    elif levels > 254:
        with pytest.raises(TypeError, match="Recursion limit"):
            compact(loads(deep))
    else:
        assert compact(loads(deep)).decode() == deep


def test_a_spelled_float_is_the_number_that_it_spells():
    value = loads("[1.50, 1e3, -0]")
    assert value == [1.5, 1000.0, 0]
    assert [Decimal(str(each)) for each in value] == [Decimal("1.50"), Decimal("1e3"), Decimal(0)]
    assert f"{value}" == "[1.50, 1e3, -0]"


def typed(value):
    """The value with the type of every part, because 1 == 1.0 == True."""
    if isinstance(value, dict):
        return type(value), [(key, typed(inner)) for key, inner in value.items()]
    return (type(value), [typed(inner) for inner in value]) if isinstance(value, list) else (type(value), repr(value))


@given(
    st.lists(SPELLINGS | st.text('\\"-0 ,', max_size=6).map(lambda text: json.dumps([text, {text: text}])), max_size=5)
)
@example(['{"a": "x, -0 ", "a": 1}', '["\\\\", "\\\\\\""]'])
def test_rows_together_are_read_as_one_by_one(texts):
    rows = [text.encode() for text in texts]
    assert [typed(value) for value in loads_all(rows)] == [typed(loads(row)) for row in rows]
