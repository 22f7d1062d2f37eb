"""JSON arrays: the elements are those that json.loads finds, wherever blocks end; what is wrong is never silent."""

import json
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.sources import json_lines
from tasks.sources.json_array import split_elements
from tasks.sources.json_rows import Refused
from tasks.sources.text_field import pick_texts, text_of


def split_all(data, block_bytes):
    pieces = (data[at : at + block_bytes] for at in range(0, len(data), block_bytes))
    return [row for rows in split_elements(pieces) for row in rows]


awkward_text = st.text(st.sampled_from('[]{},:"\\ \n/ué😀\u2028a'), max_size=12)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), awkward_text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(awkward_text, inner, max_size=3),
    max_leaves=10,
)
white_space = st.text(st.sampled_from(" \t\r\n"), max_size=4)


@st.composite
def arrays(draw):
    """An array and one way to write it."""
    elements = draw(st.lists(values, max_size=6))
    written = []
    for element in elements:
        text = json.dumps(element, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])))
        written.append(draw(white_space) + text + draw(white_space))
    inside = ",".join(written) if written else draw(white_space)
    return elements, f"{draw(white_space)}[{inside}]{draw(white_space)}".encode()


@settings(max_examples=200)
@given(arrays(), st.integers(1, 12))
def test_elements_are_those_of_json_loads_at_any_block_size(array, block_bytes):
    elements, data = array
    assert json.loads(data) == elements
    assert [json.loads(row) for row in split_all(data, block_bytes)] == elements
    assert split_all(data, len(data)) == split_all(data, block_bytes)


@settings(max_examples=300)
@given(st.text(st.sampled_from('[]{},"\\ a'), max_size=40).map(lambda text: b"[" + text.encode()), st.integers(1, 9))
def test_whatever_follows_the_bracket_reads_the_same_at_any_block_size(data, block_bytes):
    rows = split_all(data, block_bytes)
    assert rows == split_all(data, len(data))
    try:
        elements = json.loads(data)
    except ValueError:
        assert any(isinstance(text_of(row, ["text"]), Refused) for row in rows)
    else:
        assert [json.loads(row) for row in rows] == elements


def outcome(data):
    batch = pick_texts(split_all(data, 5), ["text"], 0)
    return batch.texts.to_pylist(), [(bad.row, bad.reason) for bad in batch.bad]


@pytest.mark.parametrize(
    ("data", "texts", "bad"),
    [
        ('[{"text": "a"}, {"text": 1}, {"no": "x"}, {"text": null}, 7, "text", [], null, {"text": "z"}]', ["a", "z"],
         ["not_a_string", "missing_field", "null_text"] + ["not_an_object"] * 4),
        ('[{"text": "a"}, {"text": }, {"text": "z"}]', ["a", "z"], ["malformed_json"]),
        ('[{"text": "a"}, {"text": "x"]}, {"text": "z"}]', ["a", "z"], ["malformed_json"]),
        ('[{"text": "a"}}, {"text": "z"}]', ["z"], ["malformed_json"]),
        ('[{"text": "a"} {"text": "x"}, {"text": "z"}]', ["z"], ["malformed_json"]),
        ('[{"text": "a"}, , {"text": "z"}]', ["a", "z"], ["malformed_json"]),
        ('[{"text": "a"}, {"text": "z"},]', ["a", "z"], ["malformed_json"]),
        ('[{"text": "a"}, {"text": "\\ud800"}, {"text": "z"}]', ["a", "z"], ["lone_surrogate"]),
        ('[{"text": "a"}, {"text": "z"', ["a"], ["malformed_json"]),
        ('[{"text": "a"}, {"text": "z"}', ["a"], ["malformed_json"]),
        ('[{"text": "a"},', ["a"], ["malformed_json"]),
        ('[{"text": "a"}, {"text": "z}]', ["a"], ["malformed_json"]),
        ('[{"text": "a"}, {"text": "z\\', ["a"], ["malformed_json"]),
        ('[{"text": "a"}] [{"text": "z"}]', ["a"], ["malformed_json"]),
        ('[{"text": "a"}]\\', ["a"], ["malformed_json"]),
        ("[ \n ]\n", [], []),
        ("[", [], ["malformed_json"]),
    ],
)  # fmt: skip
def test_wrong_elements_are_single_bad_rows_and_the_rest_goes_on(data, texts, bad):
    found, reasons = outcome(data.encode())
    assert found == texts
    assert [reason for _, reason in reasons] == bad


def test_an_array_cut_anywhere_keeps_its_whole_elements_and_says_that_it_was_cut():
    texts = ["a", "b]", 'c"', "d\\"]
    data = json.dumps([{"text": text} for text in texts]).encode()
    for cut in range(1, len(data)):
        found, bad = outcome(data[:cut])
        assert found == texts[: len(found)]
        assert bad == [(len(found), "malformed_json")]


def test_an_element_at_the_limit_is_read_and_a_longer_one_is_refused():
    data = b'["' + b"a" * 38 + b'", "' + b"b" * 39 + b'", 3]'
    with patch.object(json_lines, "MAX_ROW_BYTES", 40):
        at_limit, longer, last = split_all(data, 8)
    assert (at_limit, last) == (b'"' + b"a" * 38 + b'"', b"3")
    assert (longer.reason, longer.head) == ("row_too_long", b'"' + b"b" * 39 + b'"')


def test_what_follows_the_array_is_measured_and_shown():
    [refused] = split_all(b'[]  {"more": 1}', 4)
    assert refused.head == b'{"more": 1}'
    assert "11 bytes" in refused.detail
