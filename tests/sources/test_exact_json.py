"""Integers are exact, floats are Python's and objects keep their keys; what is JSON is what orjson and json together say it is."""

import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.sources import exact_json
from tokenmill.tasks.sources.exact_json import NumberRangeError, RepeatedKeys, compact, loads, loads_all, repeated_key

DIGITS = st.text("0123456789", min_size=1, max_size=25)
INTEGERS = st.one_of(
    st.integers().map(str), st.sampled_from(["-0", "0", str(2**63), str(2**64), str(-(2**63) - 1), "9" * 400])
)
FLOATS = st.builds(
    "{}{}.{}{}".format, st.sampled_from(["", "-"]), st.integers(0, 10**20), DIGITS,
    st.sampled_from(["", "e5", "E+07", "e-300", "E-0"]),
) | st.sampled_from(["1e3", "1E3", "-0.0", "1.50", "1e-400", "1.7976931348623157e308", "1e-7", "1e16", "12.0"])  # fmt: skip
TEXTS = st.text(st.sampled_from(list('ab"\\é/{}[]:,-01.e ')), max_size=8).map(json.dumps)
VALUES = st.recursive(
    st.one_of(INTEGERS, FLOATS, TEXTS, st.sampled_from(["true", "null"])),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(st.sampled_from("abcdefgh"), inner), max_size=4, unique_by=lambda pair: pair[0]).map(
            lambda pairs: "{" + ",".join(f'"{key}":{each}' for key, each in pairs) + "}"
        )
    ),
    max_leaves=12,
)


@given(VALUES)
@example('{"a": "\\\\", "b": [-0, "-0", 1.50]}')
@example("[" + "9" * 400 + ",1.50]")
def test_numbers_equal_json(text):
    value = loads(text)
    assert repr(value) == repr(json.loads(text))
    assert repr(json.loads(compact(value))) == repr(value)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": 'a "quote", \\ and {[1.50'}], "score": 0.87, "id": 2**63 - 1},
        [{"key": -12.5e-30}, {"key": [0.0, 1.0, True, None]}, {f"key {number}": "" for number in range(300)}],
    ],
)
def test_ordinary_rows_are_parsed_once(row, monkeypatch):
    text = json.dumps(row)
    monkeypatch.setattr(exact_json.json, "loads", None)
    assert loads(text) == row


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 2**70, "a": ["é", 1.5]}, '{"a":["é",1.5],"b":1180591620717411303424}'),
        ({"b": 1, "a": "x"}, '{"a":"x","b":1}'),
        ([2**64, {1, 2}], '[18446744073709551616,"{1, 2}"]'),
    ],
)
def test_values_that_orjson_lacks(value, text):
    assert compact(value, str, sort_keys=True).decode() == text


@pytest.mark.parametrize("value", [[2**70, float("nan")], [2**70, "\ud800"], [2**70, {1}], ["\ud800"], [{1}]])
def test_values_that_are_not_json(value):
    with pytest.raises((TypeError, ValueError)):
        compact(value)


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
def test_a_repeated_key(text, key):
    value = loads(text)
    assert repeated_key(value) == key
    assert value == json.loads(text)
    assert isinstance(loads('{"a": 1, "a": 2}'), RepeatedKeys)


@pytest.mark.parametrize("text", ["1e400", "[-1E999]", '{"a": 1e309}', "9" * 4301, "[-" + "1" * 5000 + "]"])
def test_numbers_out_of_range(text):
    with pytest.raises(NumberRangeError, match="is valid JSON, but"):
        loads(text)


LONG = "9" * 400
NO_JSON = ("NaN", "[1.50, Infinity]", "{", "01", '"\\ud800"', f'[{LONG}, "\\ud800"]', f"[{LONG}, NaN]", f"[{LONG}", f"[{LONG}] x")  # fmt: skip


@pytest.mark.parametrize("text", NO_JSON)
def test_text_that_is_not_json(text):
    with pytest.raises(orjson.JSONDecodeError):
        loads(text)


@pytest.mark.parametrize("levels", [100, 254, 255, 300, 1000])
@pytest.mark.parametrize("number", ["1.5", "1", f"{2**70}"])
def test_number_is_exact_or_an_error_at_any_depth(number, levels):
    deep = "[" * levels + number + "]" * levels
    if levels <= 254:
        assert compact(loads(deep)).decode() == deep
    elif number == f"{2**70}":
        with pytest.raises(NumberRangeError, match="more than 254 levels"):
            loads(deep)
    else:
        with pytest.raises(TypeError, match="Recursion limit"):
            compact(loads(deep))


def typed(value):
    """The value with the type of every part, because 1 == 1.0 == True."""
    if isinstance(value, dict):
        return type(value), [(key, typed(inner)) for key, inner in value.items()]
    return (type(value), [typed(inner) for inner in value]) if isinstance(value, list) else (type(value), repr(value))


@given(st.lists(VALUES | st.text('\\"-0 ,', max_size=6).map(lambda text: json.dumps([text, {text: text}])), max_size=5))
@example(['{"a": "x, -0 ", "a": 1}', '["\\\\", "\\\\\\""]'])
def test_rows_together_are_read_as_one_by_one(texts):
    rows = [text.encode() for text in texts]
    assert [typed(value) for value in loads_all(rows)] == [typed(loads(row)) for row in rows]
