"""Parquet: every kind of text column, judged as UTF-8 and null row by row; damage is named."""

import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources import parquet, parquet_batches
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import count_rows, read_records, read_texts
from tokenmill.tasks.sources.opening import SourceCorrupt
from tokenmill.tasks.sources.parquet import column_batches, column_ranges, require_any, require_text
from tokenmill.tasks.sources.slices import cut

from tests.flows.cloning import REPOSITORY
from tests.sources.test_formats import read as read_rows
from tests.sources.test_formats import stored_parquet as stored


def read(part, text_field="text"):
    """Texts by row number, reasons by row number."""
    texts, reasons, blank = read_rows(part, text_field)
    assert len(texts) + len(reasons) + blank == count_rows(part, 1 << 40)
    return texts, reasons


def unchecked(values):
    """A string column whose bytes nobody looked at."""
    content = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(content), content.buffers())


KINDS = [
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
    pa.dictionary(pa.int32(), pa.binary()),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_all_text_types_are_read_and_nulls_are_bad_rows(tmp_path, kind):
    texts = ["a", None, "é\n", "", "a", "😀"]
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    column = pa.array([text and text.encode() for text in texts], pa.binary()).cast(plain)
    column = column.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else column
    found, bad = read(stored(tmp_path / "x.parquet", pa.table({"text": column, "id": range(6)}), row_group_size=4))
    assert found == {row: text for row, text in enumerate(texts) if text is not None}
    assert bad == {1: "null_text"}


def spelled_by(numbers, values):
    """A dictionary whose texts nobody looked at."""
    return pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2, 3], numbers), unchecked([*filter(None, values)]))


@pytest.mark.parametrize("kind", ["string", "binary", "dictionary", "dictionary of pandas"])
def test_only_the_rows_that_are_not_utf8_are_bad(tmp_path, kind):
    values = [b"ok", b"\xff\xfe", None, b"\xc3\xa9", b"\xed\xa0\x80"]
    column = {
        "string": unchecked(values),
        "binary": pa.array(values, pa.binary()),
        "dictionary": spelled_by(pa.int32(), values),
        "dictionary of pandas": spelled_by(pa.int8(), values),
    }[kind]
    part = stored(tmp_path / "x.parquet", pa.table({"text": column}), write_statistics=False)
    found, bad = read(part)
    assert found == {0: "ok", 3: "é"}
    assert bad == {1: "invalid_utf8", 2: "null_text", 4: "invalid_utf8"}
    [shown] = [row for batch in read_texts(part, "text") for row in batch.bad if row.row == 1]
    assert shown.excerpt == r"\xff\xfe"
    assert "0xff" in shown.detail


def test_a_dotted_field_leads_into_structs_and_a_null_struct_has_null_text(tmp_path):
    inner = pa.StructArray.from_arrays(
        [pa.array(["a", "hidden", None]), pa.array([1, 2, 3])], ["text", "n"], mask=pa.array([False, True, False])
    )
    table = pa.table({"content": inner, "text": ["x", "y", "z"]})
    assert read(stored(tmp_path / "x.parquet", table), "content.text") == ({0: "a"}, {1: "null_text", 2: "null_text"})
    kind = pa.struct([pa.field("text", pa.string(), nullable=False)])
    table = pa.table({"content": pa.array([{"text": "a"}, None, {"text": "c"}], kind)})
    assert read(stored(tmp_path / "x.parquet", table), "content.text") == ({0: "a", 2: "c"}, {1: "null_text"})


def spelled(values, numbers, *, spelled_in_schema=False):
    """A column of `values[number]`, which takes little more than its numbers."""
    column = pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int32()), pa.array(values))
    return column, {"compression": "zstd", "store_schema": spelled_in_schema}


def swollen(kind):
    """A table that decodes to more than a gigabyte, and how it is written."""
    value = "x" * 1_000_000
    if kind == "messages":
        content, options = spelled([value], [0] * 1_200)
        messages = pa.StructArray.from_arrays([pa.array(["user"] * 1_200), content], ["role", "content"])
        return pa.table({"text": pa.ListArray.from_arrays(pa.array(range(0, 1_201, 2), pa.int32()), messages)}), options
    numbers = [1] * 5_000 + [0] * 1_200 if kind == "short, then long" else [0] * 1_200
    column, options = spelled([value, "short"], numbers, spelled_in_schema=kind == "category")
    return pa.table({"text": column}), options


PEAKS = """
import resource, sys
from pathlib import Path
import pyarrow.parquet as pq
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.sources.formats import read_records, read_texts
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
for path, reader in (each.split("=") for each in sys.argv[1:]):
    part = Slice(SourceFile(path, Path(path).stat().st_size, "parquet"), 0, pq.read_metadata(path).num_row_groups)
    batches = read_texts(part, "text") if reader == "texts" else read_records(part, ())
    print(sum(batch.consumed for batch in batches), peak() - before)
"""

SWOLLEN = [(kind, "texts") for kind in ("category", "one value", "short, then long")]
SWOLLEN += [(kind, "records") for kind in ("category", "one value", "messages")]


@pytest.mark.slow
def test_a_file_of_a_few_kilobytes_that_decodes_to_gigabytes_takes_a_few_hundred_megabytes(tmp_path):
    arguments, rows = [], []
    for kind, reader in SWOLLEN:
        path = tmp_path / f"{kind}.parquet"
        table, options = swollen(kind)
        rows.append(len(table))
        pq.write_table(table, path, **options)
        assert path.stat().st_size < 10_000
        arguments.append(f"{path}={reader}")
    command = [sys.executable, "-c", PEAKS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [count for count, _ in found] == rows
    assert {case: megabytes for case, (_, megabytes) in zip(SWOLLEN, found, strict=True) if megabytes > 600} == {}


ORDINARY = pa.table({
    "text": [None if number % 50 == 7 else f"{number} " * (number * 37 % 300) for number in range(900)],
    "view": pa.array([str(number) for number in range(900)], pa.string_view()),
    "kind": pa.array(["one", "two", None] * 300).dictionary_encode(),
    "large": pa.array([f"{number} " * 9 for number in range(900)]).dictionary_encode(),
    "messages": [[{"role": "user", "content": f"{number}"}] * (number % 4) for number in range(900)],
    "nothing": pa.nulls(900),
})  # fmt: skip


@pytest.mark.parametrize("group_rows", [900, 400, 50])
def test_batches_of_ordinary_files_are_those_that_pyarrow_makes_of_as_many_rows(tmp_path, monkeypatch, group_rows):
    """Where batches end decides about the row groups of some outputs: it must not depend on how rows are decoded."""
    monkeypatch.setattr(parquet_batches, "BATCH_BYTES", 40_000)
    part = stored(tmp_path / "x.parquet", ORDINARY, row_group_size=group_rows)
    file = pq.ParquetFile(part.file.uri)
    for fields in ([], ["text"], ["large"], ["messages", "kind"]):
        for group in range(file.num_row_groups):
            found = list(parquet_batches.group_batches(file, group, fields))
            expected = list(file.iter_batches(len(found[0]), row_groups=[group], columns=fields or None))
            assert [len(batch) for batch in found] == [len(batch) for batch in expected]
            assert all(batch.equals(other) for batch, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("rows", "most"), [(1, 1000), (3, 200), (64, 1), (64, 5000)])
def test_rows_are_the_same_with_each_decoder(tmp_path, monkeypatch, rows, most):
    monkeypatch.setattr(parquet_batches, "PIECE_ROWS", rows)
    monkeypatch.setattr(parquet_batches, "MAX_BATCH_BYTES", most)
    part = stored(tmp_path / "x.parquet", ORDINARY, row_group_size=400)
    batches = list(column_batches(part, (), require_any))
    assert pa.Table.from_batches(batches).to_pylist() == ORDINARY.to_pylist()
    assert all(len(batch) == 1 or parquet.decoded_bytes(batch) <= most for batch in batches)
    texts, bad = read(part)
    assert texts == {row: text for row, text in enumerate(ORDINARY["text"].to_pylist()) if text is not None}
    assert set(bad) == {row for row in range(900) if row % 50 == 7}


SPELLED = pa.array(["a" * 10, "b" * 1000, None] * 20).dictionary_encode()
STARTS = range(0, 61, 3)


@pytest.mark.parametrize(
    "column",
    [
        SPELLED[:20],
        pa.ListArray.from_arrays(pa.array(STARTS, pa.int32()), SPELLED),
        pa.LargeListArray.from_arrays(pa.array(STARTS, pa.int64()), SPELLED),
        pa.FixedSizeListArray.from_arrays(SPELLED, 3),
        pa.MapArray.from_arrays(pa.array(STARTS, pa.int32()), pa.array(["key"] * 60), SPELLED),
        pa.StructArray.from_arrays([SPELLED[:20], pa.array(range(20))], ["text", "n"]),
        pa.array([1, 2] * 10).dictionary_encode(),
    ],
    ids=lambda column: str(column.type).partition("<")[0],
)
def test_a_batch_with_dictionaries_is_as_large_as_it_is_without(column):
    batch = pa.record_batch({"column": column})
    for part in (batch, batch[3:9]):
        texts = sum(map(str(part.to_pylist()).count, ("aaaaaaaaaa", "bbbbbbbbbb"))) * 10
        assert texts <= parquet.decoded_bytes(part) <= texts + 40 * len(part)


@pytest.mark.parametrize("spelled_in_schema", [True, False])
def test_a_row_that_is_longer_than_a_row_of_json_may_be_is_a_bad_one(tmp_path, monkeypatch, spelled_in_schema):
    monkeypatch.setattr(parquet_batches, "MAX_BATCH_BYTES", 1_000)
    monkeypatch.setattr(parquet, "MAX_ROW_BYTES", 10_000)
    column, options = spelled(
        ["short", "x" * 9_000, "x" * 10_001], [0, 1, 2, 2, 0], spelled_in_schema=spelled_in_schema
    )
    part = stored(tmp_path / "x.parquet", pa.table({"text": column}), **options)
    texts, bad = read(part)
    assert {row: len(text) for row, text in texts.items()} == {0: 5, 1: 9_000, 4: 5}
    assert bad == {2: "row_too_long", 3: "row_too_long"}
    batches = list(read_records(part, ()))
    assert sum(batch.consumed for batch in batches) == 5
    assert [row.row for batch in batches for row in batch.bad] == [2, 3]


def test_unsupported_compression_is_not_reported_as_corruption(tmp_path, monkeypatch):
    part = stored(tmp_path / "x.parquet", pa.table({"text": ["a"]}))

    def refuse(*_):
        raise pa.ArrowNotImplementedError("Unsupported compression: LZO")

    monkeypatch.setattr(parquet, "group_batches", refuse)
    with pytest.raises(InputError, match=r"x\.parquet: row group 0, .*LZO; write the file again, with"):
        read(part)


def test_a_dictionary_of_large_texts_does_not_swell_a_batch(tmp_path):
    part = stored(tmp_path / "x.parquet", pa.table({"text": ["x" * 1000] * 100_000}))
    assert part.file.size < 50_000
    assert max(batch.texts.nbytes for batch in read_texts(part, "text")) < 16 << 20


@pytest.mark.parametrize(
    ("text_field", "words"),
    [
        ("txet", ["did you mean 'text'?", "columns: id, text, content"]),
        ("content.body", ["column 'content' has no column 'body'", "known: kind"]),
        ("text.more", ["column 'text' has no column 'more'"]),
        ("id", ["int64", "not text", "text: string"]),
        ("content", ["struct", "not text"]),
    ],
)
def test_non_text_field_is_rejected_with_the_columns(tmp_path, text_field, words):
    table = pa.table({"id": [1], "text": ["a"], "content": [{"kind": "x"}]})
    part = stored(tmp_path / "x.parquet", table)
    with pytest.raises(InputError) as error:
        list(read_texts(part, text_field))
    assert all(word in str(error.value) for word in ["x.parquet", text_field, *words])
    with pytest.raises(InputError):
        require_text(pq.read_metadata(part.file.uri), [text_field], part.file.uri)
    with pytest.raises(InputError, match=re.escape(text_field)):
        cut(part.file, 1000, [text_field], require_text)


@pytest.mark.parametrize(
    ("columns", "text_field", "dotted"),
    [({"a.b": [{"text": "x"}]}, "a.b.text", "a.b"), ({"in": [{"a.b": "x"}]}, "in.a.b", "a.b")],
)
def test_a_struct_with_a_dot_in_its_name_has_to_be_renamed(tmp_path, columns, text_field, dotted):
    part = stored(tmp_path / "x.parquet", pa.table(columns))
    with pytest.raises(InputError) as error:
        cut(part.file, 1000, [text_field], require_text)
    assert f"x.parquet: text_field {text_field!r}: " in str(error.value)
    assert f"a dot means a struct field: rename column {dotted!r}" in str(error.value)
    assert "did you mean" not in str(error.value)


def test_a_field_of_a_struct_is_read_although_a_column_has_the_same_name_with_a_dot(tmp_path):
    part = stored(tmp_path / "x.parquet", pa.table({"a.b": ["x"], "a": [{"b": "y"}]}))
    assert read(part, "a.b") == ({0: "y"}, {})


def twice(name, column, other):
    return pa.Table.from_arrays([pa.array([column]), pa.array([other]), pa.array(["z"])], [name, name, "own"])


@pytest.mark.parametrize(
    ("table", "text_field", "problem"),
    [
        (twice("text", "x", "y"), "text", "the file has 2 columns 'text'"),
        (twice("in", {"text": "x"}, {"text": "y"}), "in.text", "the file has 2 columns 'in'"),
        (
            pa.table({"in": pa.StructArray.from_arrays([pa.array(["x"]), pa.array(["y"])], ["text", "text"])}),
            "in.text",
            "column 'in' has 2 columns 'text'",
        ),
    ],
    ids=["columns", "structs", "in a struct"],
)
def test_of_two_columns_with_one_name_none_is_taken(tmp_path, table, text_field, problem):
    part = stored(tmp_path / "x.parquet", table)
    for refused in (lambda: read(part, text_field), lambda: cut(part.file, 1000, [text_field], require_text)):
        with pytest.raises(InputError) as error:
            refused()
        assert f"x.parquet: text_field {text_field!r}: {problem}; " in str(error.value)
        assert "distinct names" in str(error.value)


@pytest.mark.parametrize("fields", [(), ("text", "own")])
def test_duplicate_columns_are_not_read(tmp_path, fields):
    part = stored(tmp_path / "x.parquet", twice("text", "x", "y"))
    with pytest.raises(InputError, match=r"x\.parquet: 2 columns are called 'text'; .* distinct names"):
        list(column_batches(part, fields, require_any))


def test_duplicate_columns_are_ignored_when_unused(tmp_path):
    assert read(stored(tmp_path / "x.parquet", twice("id", 1, 2)), "own") == ({0: "z"}, {})


def test_without_fields_all_columns_are_read_in_their_order(tmp_path):
    columns = {"z": range(10), "text": [f"{number}" for number in range(10)]}
    columns["a"] = [{"deep": [number], "n": None} for number in range(10)]
    table = pa.table(columns | {"day": pa.array([0] * 10, pa.date32())})
    part = stored(tmp_path / "x.parquet", table, row_group_size=3)
    assert pa.Table.from_batches(column_batches(part, (), require_any)).to_pylist() == table.to_pylist()
    assert all(batch.schema.names == ["z", "text", "a", "day"] for batch in column_batches(part, (), require_any))
    middle = Slice(part.file, 1, 3, rows=4)
    assert pa.Table.from_batches(column_batches(middle, (), require_any)).to_pylist() == table.to_pylist()[3:7]


def test_file_without_columns_is_rejected(tmp_path):
    part = stored(tmp_path / "x.parquet", pa.table({}))
    with pytest.raises(InputError, match=r"x\.parquet: .*columns: none"):
        list(column_batches(part, (), require_any))


@pytest.mark.parametrize("keep", [0, 3, 20, 0.5, -1])
def test_a_file_cut_short_is_named_with_the_remedy(tmp_path, keep):
    path = tmp_path / "x.parquet"
    part = stored(path, pa.table({"text": ["hello"] * 100}))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(SourceCorrupt, match=r"x\.parquet: its footer .* fetch it or write it again"):
        list(read_texts(part, "text"))


@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip"])
def test_a_damaged_page_is_named_with_its_row_group(tmp_path, compression):
    path = tmp_path / "x.parquet"
    table = pa.table({"n": np.arange(5000), "text": [f"hello {number * number}" for number in range(5000)]})
    part = stored(path, table, compression=compression, row_group_size=2500, use_dictionary=False)
    [(start, stop)] = column_ranges(pq.read_metadata(path), range(1, 2), ["text"])
    content = bytearray(path.read_bytes())
    content[start : (start + stop) // 2] = b"\xff" * ((start + stop) // 2 - start)
    path.write_bytes(content)
    with pytest.raises(SourceCorrupt, match=r"x\.parquet: row group 1, column 'text'"):
        read(part)
    with pytest.raises(SourceCorrupt, match=r"x\.parquet: row group 1"):
        list(column_batches(part, (), require_any))


def test_a_flipped_bit_is_found_where_pages_carry_checksums(tmp_path):
    path = tmp_path / "x.parquet"
    part = stored(path, pa.table({"text": ["hello"] * 50}), compression="none", use_dictionary=False, write_page_checksum=True)  # fmt: skip
    content = bytearray(path.read_bytes())
    [(_, stop)] = column_ranges(pq.read_metadata(path), range(1), ["text"])
    content[stop - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SourceCorrupt, match="row group 0"):
        read(part)
