"""JSON arrays: the elements are those that json.loads finds, wherever blocks end; what is wrong is never silent."""

import json
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.sources import json_lines
from tokenmill.tasks.sources.files import Refused
from tokenmill.tasks.sources.json_array import split_elements
from tokenmill.tasks.sources.json_rows import BrokenContentError, pick_texts, text_of

from tests.examples import max_examples


def split_all(data, block_bytes):
    pieces = (data[at : at + block_bytes] for at in range(0, len(data), block_bytes))
    return [row for rows in split_elements(pieces) for row in rows]


def split_or_broken(data, block_bytes):
    """The rows, or what is said of an array that is broken."""
    try:
        return split_all(data, block_bytes)
    except BrokenContentError as error:
        return str(error)


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


@max_examples(200)
@given(arrays(), st.integers(1, 12))
def test_elements_match_json_loads_at_any_block_size(array, block_bytes):
    elements, data = array
    assert json.loads(data) == elements
    assert [json.loads(row) for row in split_all(data, block_bytes)] == elements
    assert split_all(data, len(data)) == split_all(data, block_bytes)


@max_examples(300)
@given(st.text(st.sampled_from('[]{},"\\ a'), max_size=40).map(lambda text: b"[" + text.encode()), st.integers(1, 9))
def test_text_after_the_bracket_reads_the_same_at_any_block_size(data, block_bytes):
    rows = split_or_broken(data, block_bytes)
    assert rows == split_or_broken(data, len(data))
    try:
        elements = json.loads(data)
    except ValueError:
        assert isinstance(rows, str) or any(isinstance(text_of(row, ["text"]), Refused) for row in rows)
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
        ("[ \n ]\n", [], []),
    ],
)  # fmt: skip
def test_wrong_elements_are_single_bad_rows(data, texts, bad):
    found, reasons = outcome(data.encode())
    assert found == texts
    assert [reason for _, reason in reasons] == bad


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('[{"text": "a"}, {"text": "z"', "12 bytes are left over"),
        ('[{"text": "a"}, {"text": "z}]', "13 bytes are left over"),
        ('[{"text": "a"}, {"text": "z\\', "12 bytes are left over"),
        ('[{"text": "a", "x": [1}, {"text": "z"}]', "38 bytes are left over"),
        ('[{"text": "a"}] [{"text": "z"}]', "after the ']' of its array, for 15 bytes"),
        ('[{"text": "a"}]\\', "after the ']' of its array, for 1 bytes"),
        ("[", "0 bytes are left over"),
    ],
)
def test_an_array_of_which_rows_cannot_be_counted_is_broken(data, said):
    with pytest.raises(BrokenContentError, match=said):
        split_all(data.encode(), 5)


def test_an_array_cut_anywhere_is_broken():
    data = json.dumps([{"text": text} for text in ["a", "b]", 'c"', "d\\"]]).encode()
    for cut in range(1, len(data)):
        with pytest.raises(BrokenContentError, match="ends inside its array"):
            split_all(data[:cut], 5)


def test_element_size_limit():
    data = b'["' + b"a" * 38 + b'", "' + b"b" * 39 + b'", 3]'
    with patch.object(json_lines, "MAX_ROW_BYTES", 40):
        at_limit, longer, last = split_all(data, 8)
    assert (at_limit, last) == (b'"' + b"a" * 38 + b'"', b"3")
    assert (longer.reason, longer.head) == ("row_too_long", b'"' + b"b" * 39 + b'"')
