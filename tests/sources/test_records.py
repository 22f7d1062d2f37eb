"""Whole records: every row once, whatever the file and the cut, the same from JSON and from Parquet."""

import json
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.sources import json_lines, parquet_batches
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import count_rows, read_records, read_texts
from tokenmill.tasks.sources.json_rows import pick_objects, pick_records
from tokenmill.tasks.sources.parquet import column_ranges
from tokenmill.tasks.sources.slices import content_hash, cut

from tests.examples import max_examples
from tests.sources.test_formats import KINDS, stored, stored_parquet
from tests.sources.test_formats import every_kind as every_kind_of
from tests.sources.test_parquet_rows import unchecked

LINES = [
    b'\xef\xbb\xbf{"messages": [1], "text": "a"}',
    b'{"messages": [{"role": "user", "content": null}], "id": 5}\r',
    b"",
    b"[1, 2]",
    b'"text"',
    b"null",
    b'{"text": "\xff"}',
    b'{"text": "\\ud800"}',
    b" \t",
    b"{}",
    b'{"text": "unfinished',
    '{"text": "é語😀 \\u2028 \u2028", "n": 1.5, "text": "last"}'.encode(),
    b'{"text": NaN}',
]
REASONS = "not_an_object not_an_object not_an_object invalid_utf8 lone_surrogate malformed_json malformed_json"
BAD = dict(zip((3, 4, 5, 6, 7, 10, 12), REASONS.split(), strict=True))
GOOD = {0: LINES[0].removeprefix(b"\xef\xbb\xbf"), 1: LINES[1], 9: LINES[9], 11: LINES[11]}
RECORDS = {row: json.loads(line) for row, line in GOOD.items()}
BLANK = 2

FIELDS = ["messages", "text"]

ELEMENTS = b'[{"a": {"b": "]"}}, [{}],\n {"a": null}, 7, {"a": "\xff"}, {}]'


def every_kind(folder):
    return every_kind_of(folder, LINES, ELEMENTS)


def read(part, fields=FIELDS):
    """Records and reasons by row number, and how many rows were blank."""
    records, reasons, consumed = {}, {}, 0
    for batch in read_records(part, fields):
        assert batch.rows.dtype == np.int64
        numbers = [*batch.rows.tolist(), *(bad.row for bad in batch.bad)]
        assert len(set(numbers)) == len(numbers)
        assert all(consumed <= number < consumed + batch.consumed for number in numbers)
        consumed += batch.consumed
        records |= dict(zip(batch.rows.tolist(), batch.records, strict=True))
        reasons |= {bad.row: bad.reason for bad in batch.bad}
    assert list(records) == sorted(records)
    return records, reasons, consumed - len(records) - len(reasons)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_lines_of_every_kind_are_accounted_for(tmp_path, kind):
    assert read(every_kind(tmp_path)[kind]) == (RECORDS, BAD, BLANK)


def raws(part):
    """The bytes of each record's row, by its number; every record has some, and nothing else has."""
    found = {}
    for batch in read_records(part, FIELDS):
        assert len(batch.raw) == len(batch.records)
        assert list(map(json.loads, map(without_mark, batch.raw))) == batch.records
        found |= dict(zip(batch.rows.tolist(), batch.raw, strict=True))
    return found


def without_mark(row):
    return row.removeprefix(b"\xef\xbb\xbf")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_json_records_keep_their_bytes(tmp_path, kind):
    found = {row: without_mark(raw) for row, raw in raws(every_kind(tmp_path)[kind]).items()}
    assert found == GOOD


@pytest.mark.parametrize("kind", ["json", "json.gz"])
def test_a_record_of_an_element_has_the_bytes_between_its_commas(tmp_path, kind):
    found = {row: raw.strip() for row, raw in raws(every_kind(tmp_path)[kind]).items()}
    assert found == {0: b'{"a": {"b": "]"}}', 2: b'{"a": null}', 5: b"{}"}


@pytest.mark.parametrize("spoilt", [None, 3, 777])
def test_spellings_are_kept_also_beside_a_row_that_is_bad(tmp_path, spoilt):
    """Blocks in which all is well are read another way than the others."""
    rows = [b'{ "n":%d.50, "n" : 1e%d,"t":"\\u00e9%s"}\r' % (n, n % 9, b"x" * (n * 7)) for n in range(900)]
    content = b"\n".join(b"broken" if number == spoilt else row for number, row in enumerate(rows))
    part = stored(tmp_path / "a.jsonl", content)
    assert len(list(read_records(part, FIELDS))) > 2
    assert raws(part) == {number: row for number, row in enumerate(rows) if number != spoilt}


def test_parquet_records_lack_bytes(tmp_path):
    assert all(len(batch.raw) == 0 for batch in read_records(every_kind(tmp_path)["parquet"], ["text"]))


@max_examples(60)
@given(st.lists(st.sampled_from(range(len(LINES))), max_size=40), st.integers(1, 400), st.integers(1, 300), st.data())
def test_any_cut_reads_every_record_once(tmp_path_factory, rows, shard_size, block_bytes, draw):
    content = b"\n".join(LINES[row] for row in rows) + b"\n" * draw.draw(st.booleans())
    lines = content.split(b"\n")[: content.count(b"\n") + (not content.endswith(b"\n") and content != b"")]
    part = stored(tmp_path_factory.getbasetemp() / "cut.jsonl", content)
    records, reasons, blank, first = {}, {}, 0, 0
    with patch.object(json_lines, "BLOCK_BYTES", block_bytes), patch.object(json_lines, "PROBE_BYTES", block_bytes):
        for each in cut(part.file, shard_size, FIELDS):
            some_records, some_reasons, some_blank = read(each)
            records |= {first + row: record for row, record in some_records.items()}
            reasons |= {first + row: reason for row, reason in some_reasons.items()}
            blank += some_blank
            first += count_rows(each, 1000)
    fates = [LINES.index(line) for line in lines]
    assert records == {place: RECORDS[row] for place, row in enumerate(fates) if row in RECORDS}
    assert reasons == {place: BAD[row] for place, row in enumerate(fates) if row in BAD}
    assert blank == len(lines) - len(records) - len(reasons)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_numbers_that_they_have_as_texts(tmp_path, kind):
    part = every_kind(tmp_path)[kind]
    records, _, _ = read(part)
    batches = list(read_texts(part, "text"))
    texts = {row: text for batch in batches for row, text in zip(batch.rows, batch.texts.to_pylist(), strict=True)}
    assert {row: record["text"] for row, record in records.items() if "text" in record} == texts
    assert [batch.consumed for batch in batches] == [batch.consumed for batch in read_records(part, FIELDS)]


CALLS = pa.list_(pa.struct({"id": pa.string(), "function": pa.struct({"name": pa.string(), "n": pa.int64()})}))
CHAT = pa.schema({
    "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.large_string(), "tool_calls": CALLS})),
    "tools": pa.list_(pa.string()),
    "meta": pa.struct({"level": pa.int32(), "tags": pa.list_(pa.string()), "used": pa.bool_()}),
    "text": pa.string(),
})  # fmt: skip


def some(**fields):
    """Objects with any of these keys."""
    return st.fixed_dictionaries({}, optional=fields)


word = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
tool_call = some(id=word, function=some(name=word, n=st.integers(-9, 9)))
message = st.fixed_dictionaries(
    {"role": word}, optional={"content": word, "tool_calls": st.lists(tool_call, max_size=2)}
)
meta = some(level=st.integers(0, 9), tags=st.lists(word | st.none(), max_size=3), used=st.booleans())
messages = st.lists(message | st.none(), max_size=3)
record = some(messages=messages, tools=st.lists(word, max_size=2), meta=meta, text=word)


@given(st.lists(record, max_size=12), st.integers(1, 5), st.integers(1, 5))
def test_parquet_records_round_trip(tmp_path_factory, rows, group, rows_a_batch):
    """Keys that a row does not have stay away at every depth; empty lists and nulls in lists stay."""
    path = tmp_path_factory.getbasetemp() / "chat.parquet"
    part = stored_parquet(path, pa.Table.from_pylist(rows, CHAT), row_group_size=group)
    with patch.object(parquet_batches, "MAX_BATCH_ROWS", rows_a_batch):
        assert read(part, CHAT.names) == read(part, ()) == (dict(enumerate(rows)), {}, 0)
        stops = sorted({0, part.stop // 2, part.stop})
        parts = [Slice(part.file, start, stop) for start, stop in pairwise(stops)]
        assert [each for part in parts for each in read(part, CHAT.names)[0].values()] == rows
    lines = stored(path.with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert read(lines, ()) == (dict(enumerate(rows)), {}, 0)


def test_maps_are_objects(tmp_path):
    kind = pa.list_(pa.struct({"arguments": pa.map_(pa.string(), pa.int64())}))
    column = pa.array([[{"arguments": [("a", 1), ("b", 2)]}, {"arguments": []}, {}]], kind)
    part = stored_parquet(tmp_path / "a.parquet", pa.table({"calls": column}))
    assert read(part, ["calls"])[0] == {0: {"calls": [{"arguments": {"a": 1, "b": 2}}, {"arguments": {}}, {}]}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (["text"], {"text": "x"}),
        (["text", "absent", "meta.absent"], {"text": "x"}),
        (["meta.level", "text"], {"meta": {"level": 1}, "text": "x"}),
        (["meta", "meta.level"], {"meta": {"level": 1, "tags": ["a"]}}),
        (["absent", "tools"], {"tools": ["t"]}),
    ],
)
def test_of_parquet_only_the_fields_are_read(tmp_path, fields, expected):
    row = {"text": "x", "meta": {"level": 1, "tags": ["a"]}, "tools": ["t"], "messages": [{"role": "r"}]}
    part = stored_parquet(tmp_path / "a.parquet", pa.Table.from_pylist([row], CHAT))
    assert read(part, fields)[0] == {0: expected}


def test_without_fields_every_column_is_part_of_what_names_a_slice(tmp_path):
    rows = [{"text": "x", "meta": {"level": number}, "tools": ["t"]} for number in range(50)]
    table = pa.Table.from_pylist(rows, CHAT)
    before = content_hash(stored_parquet(tmp_path / "a.parquet", table), ())
    assert content_hash(stored_parquet(tmp_path / "b.parquet", table), ()) == before
    others = {
        "a value": pa.Table.from_pylist([*rows[:-1], {**rows[-1], "meta": {"level": 7}}], CHAT),
        "a column": table.append_column("n", pa.array(range(50))),
        "a name": table.rename_columns(["messages", "tools", "meta", "texts"]),
        "a type": table.set_column(3, "text", table["text"].cast(pa.binary())),
        "one less": table.drop_columns(["tools"]),
    }
    for name, other in others.items():
        assert content_hash(stored_parquet(tmp_path / f"{name}.parquet", other), ()) != before, name


@pytest.mark.parametrize("fields", [["messages"], ["tools", "meta.level"], ["messages", "meta", "absent"]])
def test_what_names_a_slice_is_all_that_its_records_are_read_from(tmp_path, fields):
    rows = [
        {"messages": [{"role": "user", "content": f"{number % 7}"}], "tools": ["t"], "meta": {"level": number}}
        for number in range(1000)
    ]
    path = tmp_path / "a.parquet"
    part = stored_parquet(path, pa.Table.from_pylist(rows, CHAT), row_group_size=300)
    expected, content, metadata = read(part, fields), path.read_bytes(), pq.read_metadata(path)
    footer = len(content) - metadata.serialized_size - 8
    kept = bytearray(footer) + content[footer:]
    for start, stop in column_ranges(metadata, range(4), fields):
        kept[start:stop] = content[start:stop]
    assert kept != content
    path.write_bytes(kept)
    assert len(expected[0]) == 1000
    assert read(part, fields) == expected


def test_only_the_rows_with_text_that_is_not_utf8_are_bad(tmp_path):
    contents = unchecked([b"a", b"ok \xff\xfe", b"b", b"c", b"\xed\xa0\x80", b"d"])
    messages = pa.ListArray.from_arrays([0, 2, 3, 3, 5, 6], pa.StructArray.from_arrays([contents], ["content"]))
    table = pa.table({"n": range(5), "messages": messages})
    part = stored_parquet(tmp_path / "a.parquet", table, write_statistics=False, row_group_size=3)
    good = {row: {"n": row, "messages": [{"content": text}]} for row, text in ((1, "b"), (4, "d"))}
    good[2] = {"n": 2, "messages": []}
    assert read(part, ["n", "messages"]) == (good, {0: "invalid_utf8", 3: "invalid_utf8"}, 0)
    [bad] = next(iter(read_records(part, ["messages"]))).bad
    assert bad.excerpt == r"ok \xff\xfe"
    assert "0xff" in bad.detail


def test_a_value_that_python_cannot_spell_makes_a_bad_row(tmp_path):
    days = pa.array([0, 2**30, None], pa.date32())
    part = stored_parquet(tmp_path / "a.parquet", pa.table({"text": ["a", "b", "c"], "day": days}))
    records, reasons, _ = read(part, ["text", "day"])
    assert [records[row]["text"] for row in (0, 2)] == ["a", "c"]
    assert reasons == {1: "unreadable_value"}


def test_batches_of_all_columns_are_bounded_as_well(tmp_path):
    wide = {f"column {name}": [f"{number} {name} " + "x" * 50_000 for number in range(100)] for name in "abcdef"}
    part = stored_parquet(tmp_path / "a.parquet", pa.table(wide), use_dictionary=False)
    batches = list(read_records(part, ()))
    sizes = [sum(map(len, record.values())) for batch in batches for record in batch.records]
    assert len(sizes) == 100
    totals = [sum(len(text) for record in batch.records for text in record.values()) for batch in batches]
    assert max(totals) < 2 * parquet_batches.BATCH_BYTES


DEEP = b"[" * 260 + b"]" * 260
BLOCK = [
    b'{"a": 1.50}', b'{"a": 1, "a": 2}', b'{"a": -0}', b'\xef\xbb\xbf{"a": 1}', b"", b"  ", b"[1]", b'"a"', b"nothing",
    b'{"a": 1e400}', b'{"a": "\xff"}', b'{"a": %s}' % DEEP, b'{"a": 1.50, "b": %s}' % DEEP, b'{"a": "%s"}' % DEEP,
    b'{"a": %s}' % (b"9" * 5000), b'{"a": [%s]}' % b",".join([b"{}"] * 300), b'{"a": NaN}',
]  # fmt: skip


@pytest.mark.parametrize("rows", [BLOCK, *([row, b'{"a": 0}'] for row in BLOCK)])
def test_rows_are_taken_as_bytes_where_records_can_be_read(rows):
    records, objects = pick_records(rows, 7), pick_objects(rows, 7)
    assert [*objects.raw] == [*records.raw]
    assert objects.rows.tolist() == records.rows.tolist()
    assert objects.blank.tolist() == records.blank.tolist()
    assert (objects.bad, objects.consumed) == (records.bad, len(rows))
