"""JSON Lines: every cut reads every row once, and every line is judged as a plain json.loads would judge it."""

import io
import json
import tracemalloc
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.sources import json_lines
from tokenmill.tasks.sources.files import Refused
from tokenmill.tasks.sources.json_lines import row_start, slice_blocks, split_lines
from tokenmill.tasks.sources.json_rows import pick_texts, text_of

from tests.examples import max_examples
from tests.peers.strict_json import judged

BLOCK_SIZES = st.sampled_from([1, 2, 3, 7, 64, 1 << 20])

line = st.one_of(
    st.sampled_from([b"", b" ", b"\r", b"\t \r", b"x", b"\xff\xfe", "\u2028é😀\x85".encode()]),
    st.text(max_size=12).map(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()),
    st.text(max_size=12).map(lambda text: json.dumps({"text": text}).encode() + b"\r"),
)
files = st.tuples(st.lists(line, max_size=12), st.booleans()).map(
    lambda parts: b"\n".join(parts[0]) + b"\n" * (parts[1] and bool(parts[0]))
)


def lines_of(data):
    lines = data.split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


def split_all(data, start, stop, block_bytes):
    with patch.object(json_lines, "BLOCK_BYTES", block_bytes), patch.object(json_lines, "PROBE_BYTES", block_bytes):
        return [row for rows in split_lines(slice_blocks(io.BytesIO(data), start, stop)) for row in rows]


@given(files, st.integers(0, 150), st.integers(0, 150), BLOCK_SIZES)
def test_a_slice_reads_the_bytes_between_the_two_row_starts(data, one, other, block_bytes):
    start, stop = sorted((one, other))
    stream = io.BytesIO(data)
    owned = data[row_start(stream, start) : row_start(stream, stop)]
    assert split_all(data, start, stop, block_bytes) == lines_of(owned)


@given(files, st.integers(0, 200))
@example(b"a\nb\n", 2)
def test_a_row_start_is_the_first_line_beginning_at_or_after_the_offset(data, offset):
    begins = [0, *(place + 1 for place, byte in enumerate(data) if byte == ord("\n"))]
    expected = min((place for place in begins if place >= offset), default=len(data))
    assert row_start(io.BytesIO(data), offset) == min(expected, len(data))


@pytest.mark.parametrize("block_bytes", [1, 8, 32])
def test_line_size_limit(block_bytes):
    data = b"a" * 40 + b"\n" + b"b" * 41 + b"\n" + b"c\n" + b"d" * 1000
    with patch.object(json_lines, "MAX_ROW_BYTES", 40):
        rows = split_all(data, 0, len(data), block_bytes)
    assert [rows[0], rows[2]] == [b"a" * 40, b"c"]
    assert [(rows[at].reason, rows[at].head) for at in (1, 3)] == [
        ("row_too_long", b"b" * 41),
        ("row_too_long", b"d" * 800),
    ]
    assert "41" in rows[1].detail
    assert "1,000" in rows[3].detail


def test_a_line_beyond_the_limit_is_passed_over_without_being_held():
    def endless():
        for number in range(64):
            yield bytes([97 + number % 26]) * (1 << 20)
        yield b"\nshort\n"

    with patch.object(json_lines, "MAX_ROW_BYTES", 4 << 20):
        tracemalloc.start()
        rows = [row for found in split_lines(endless()) for row in found]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert isinstance(rows[0], Refused)
    assert rows[1:] == [b"short"]
    assert peak < 12 << 20


# What is in a line, judged by the standard library's parser.


def picked(rows, path=("text",), first=0):
    """The same, from a batch: one judgement a row."""
    batch = pick_texts(rows, path, first)
    assert batch.consumed == len(rows)
    assert batch.rows.dtype == np.int64
    assert list(batch.rows) == sorted(set(batch.rows))
    found = {number: ("text", text) for number, text in zip(batch.rows, batch.texts.to_pylist(), strict=True)}
    found |= {bad.row: bad.reason for bad in batch.bad}
    numbers = range(first, first + len(rows))
    found |= dict.fromkeys(batch.blank.tolist(), "blank")
    return [found[number] for number in numbers]


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=[]), max_size=8)
)
keys = st.sampled_from(["text", "content", "id", ""])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
)
objects = st.dictionaries(keys, values, max_size=4)
written = st.builds(
    lambda value, ascii_only: json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass"),
    values | objects,
    st.booleans(),
)


@st.composite
def damaged(draw):
    """A written line with a few bytes replaced: mostly malformed, sometimes still JSON."""
    row = bytearray(draw(written))
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(row)))
        row[place : place + draw(st.integers(0, 2))] = draw(
            st.sampled_from([b"", b'"', b"\\", b"}", b"\xff", b"\0", b"1e9", b","])
        )
    return bytes(row).replace(b"\n", b" ")


nasty = st.sampled_from(
    [
        *(b'{"text": "a"}', b'{"text": "a", "text": "last"}', b'{"text": "last", "text": null}'),
        *(b'{"text": "a", "score": NaN}', b'{"text": "a", "score": -Infinity}', b'{"text": "a", "score": 1e999}'),
        *(b'{"text": "a", "score": 123456789012345678901234567890}', b'{"text": "\\ud800"}'),
        *(b'{"text": "\\udc00 x"}', b'{"text": "a", "other": "\\ud83d\\ud83d"}', b'{"text": "\\ud83d\\ude00"}'),
        *(b'{"text": "\\\\ud800"}', b'{"text": "\xed\xa0\x80"}', b'{"text": "nul \\u0000"}', b'{"text": "raw \x00"}'),
        *(b'\xef\xbb\xbf{"text": "after a mark"}', b"\xef\xbb\xbf", b"\x0b\x0c", b'{"text": "a"} {"text": "b"}'),
        *(b'{"text": "a"}\r', b'{"text": "cut', b"null", b'"text"', b"[]"),
    ]
)


@max_examples(300)
@given(
    st.lists(st.one_of(written, damaged(), nasty), min_size=1, max_size=6),
    st.sampled_from([("text",), ("content", "text"), ("content", "content", "text")]),
    st.integers(0, 9),
)
def test_every_row_is_judged_as_strict_json_loads_judges_it(rows, path, first):
    for row, found in zip(rows, picked(rows, path, first), strict=True):
        expected = judged(row, path)
        if expected == "malformed_json" and found == "lone_surrogate":
            assert b"\\ud" in row.lower()  # both are wrong with this row; the parser says which it met first
        else:
            assert found == expected


@pytest.mark.parametrize(
    ("row", "reason", "words"),
    [
        (b'{"text": "a"', "malformed_json", "line 1 column"),
        (b'{"text": "\xff"}', "invalid_utf8", "0xff"),
        (b'{"text": "\\ud800"}', "lone_surrogate", "surrogate"),
        (b'{"text": "a", "n": 1e400}', "number_out_of_range", "1e400 is valid JSON, but no double holds it"),
        (b'{"text": "a", "n": %s}' % (b"9" * 5000), "number_out_of_range", "an integer of 5,000 digits"),
        (b"[1]", "not_an_object", "the row is an array"),
        (b'{"txt": "a"}', "missing_field", "did you mean 'txt'?"),
        (b'{"text": null}', "null_text", "'text' is null"),
        (b'{"text": ["a"]}', "not_a_string", "'text' is an array"),
        (b'{"text": true}', "not_a_string", "'text' is a boolean"),
    ],
)
def test_bad_row_reasons(row, reason, words):
    found = text_of(row, ["text"])
    assert found.reason == reason
    assert words in found.detail


def test_an_excerpt_is_short_and_printable():
    [bad] = pick_texts([b'{"a": "\xff\x1b[31m\t\xc3\xa9' + "語".encode() * 900], ["text"], 7).bad
    assert bad.row == 7
    assert bad.excerpt.startswith(r'{"a": "\xff\x1b[31m\té語')
    assert bad.excerpt.isprintable()
    assert 200 <= len(bad.excerpt) < 220
