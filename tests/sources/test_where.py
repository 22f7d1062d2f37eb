"""Rows that a filter keeps: the same of JSON and of Parquet, as plain Python says; and what of a Parquet file is read for it."""

import gzip
import json
import math
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.blend.predicates import parse_predicate
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources import parquet
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import count_rows, read_objects, read_records, read_texts
from tokenmill.tasks.sources.parquet import groups_to_read
from tokenmill.tasks.sources.row_filter import filter_of, row_filter
from tokenmill.tasks.sources.slices import ContentIndex, cut

from tests.examples import max_examples
from tests.sources.test_predicates import TYPES, meaning, rows, trees, written


def slices(path, where="", text_field="text", shard_size=1 << 30, **filters):
    """The slices of a file with a filter, as a plan of pretraining makes them."""
    source = DataSource(name="a", path=str(path), where=where or None, filters=filters)
    chosen = row_filter(source)
    fields = chosen.read_with([text_field])
    needed = parquet.Needed(parquet.require_text, [text_field], chosen)
    parts = [part for file in discover(source) for part in cut(file, shard_size, fields, needed)]
    return ContentIndex().identify(map(chosen.on, parts), fields, "content")


def outcome(parts, text_field="text"):
    """The numbers and texts of the rows that are kept, the reasons of bad rows, and the number of filtered ones."""
    numbers, texts, bad, filtered, first = [], [], {}, 0, 0
    for part in parts:
        for batch in read_texts(part, text_field):
            numbers += (first + batch.rows).tolist()
            texts += batch.texts.to_pylist()
            bad |= {first + row.row: row.reason for row in batch.bad}
            filtered += batch.filtered
        first += sum(batch.consumed for batch in read_texts(part, text_field))
    assert len(numbers) + len(bad) + filtered <= first == sum(count_rows(part, 1 << 40) for part in parts)
    return numbers, texts, bad, filtered


def write_json(path, given_rows):
    content = b"".join(orjson.dumps(row) + b"\n" for row in given_rows)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path, given_rows, types, **options):
    arrays = [pa.array([row.get(name) for row in given_rows], kind) for name, kind in types.items()]
    pq.write_table(pa.table(arrays, schema=pa.schema(types)), path, **options)
    return path


with_texts = rows.map(lambda some: [{**row, "text": f"text {number}"} for number, row in enumerate(some)])


def has_nan(row):
    return any(isinstance(value, float) and math.isnan(value) for value in row.values())


@max_examples(250)
@given(trees, with_texts, st.integers(1, 4), st.booleans(), st.booleans())
def test_json_and_parquet_keep_the_same_rows(tmp_path_factory, tree, given_rows, group, statistics, dictionary):
    """Row groups are left out by their statistics only if plain Python keeps none of their rows."""
    folder, where = tmp_path_factory.mktemp("where"), written(tree)
    expected = [number for number, row in enumerate(given_rows) if meaning(tree, row) is True]
    types = {**TYPES, "text": pa.string()}
    path = write_parquet(
        folder / "a.parquet", given_rows, types,
        row_group_size=group, write_statistics=statistics, use_dictionary=dictionary,
    )  # fmt: skip
    numbers, texts, bad, filtered = outcome(slices(path, where))
    assert (numbers, bad, filtered) == (expected, {}, len(given_rows) - len(expected)), where
    assert texts == [given_rows[number]["text"] for number in expected]
    plain = [row for row in given_rows if not has_nan(row)]
    if plain:
        kept = [number for number, row in enumerate(plain) if meaning(tree, row) is True]
        found = outcome(slices(write_json(folder / "a.jsonl", plain), where))
        assert found[0::2] == (kept, {}), where


ROWS = [{"text": f"Document {number}", "score": number // 100, "language": ["en", "de", None][number % 3], "url": "u" * 99} for number in range(1_000)]  # fmt: skip
FLAT = {"text": pa.string(), "score": pa.int64(), "language": pa.string(), "url": pa.string()}


class Counting:
    """A file that notes the bytes that are read of it."""

    def __init__(self, stream, read):
        self.stream, self.ranges = stream, read

    def read(self, size=-1):
        place = self.stream.tell()
        found = self.stream.read(size)
        self.ranges.append((place, place + len(found)))
        return found

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stream.close()


@pytest.fixture
def bytes_read(monkeypatch):
    """The ranges of Parquet files that are read, by hashing and by decoding."""
    read = []
    for module in ("parquet", "slices"):
        name = f"tokenmill.tasks.sources.{module}.open_source"
        real = parquet.open_source
        monkeypatch.setattr(name, lambda *given, real=real, **named: Counting(real(*given, **named), read))
    return read


def chunks_touched(path, ranges):
    """The column chunks, as (row group, column), of which a byte is read."""
    metadata = pq.read_metadata(path)
    names = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    places = {
        (group, name): parquet.column_ranges(metadata, [group], [name])[0]
        for group in range(metadata.num_row_groups)
        for name in names
    }
    content = [(start, stop) for start, stop in ranges if stop < path.stat().st_size]  # without the footer
    return {chunk for chunk, (start, stop) in places.items() if any(a < stop and start < b for a, b in content)}


@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "on a store with checksums"])
def test_only_the_row_groups_and_columns_that_a_predicate_needs_are_read(tmp_path, bytes_read, hashed):
    path = write_parquet(
        tmp_path / "a.parquet", ROWS, FLAT, row_group_size=100, compression="none", use_dictionary=False
    )
    where = "score >= 7 and language in ['en', 'de']"
    (part,) = slices(path, where)
    if not hashed:
        bytes_read.clear()
        part = replace(part, content="the store's checksum")
    numbers, _, _, filtered = outcome([part])
    assert numbers == [number for number in range(700, 1_000) if number % 3 < 2]
    assert filtered == 1_000 - len(numbers)
    wanted = {(group, column) for group in (7, 8, 9) for column in ("text", "score", "language")}
    assert chunks_touched(path, bytes_read) == wanted
    assert {group for group, _ in chunks_touched(path, bytes_read)} == {7, 8, 9}


def test_the_content_of_a_slice_does_not_depend_on_row_groups_that_are_not_read(tmp_path):
    changed = [{**row, "text": "other"} if row["score"] == 2 else row for row in ROWS]
    one, other = (
        write_parquet(tmp_path / f"{name}.parquet", some, FLAT, row_group_size=100)
        for name, some in (("a", ROWS), ("b", changed))
    )
    content = {
        path: [slices(path, where)[0].content for where in ("score >= 7", "score >= 2", "")] for path in (one, other)
    }
    (same, *different), (same_too, *different_too) = content.values()
    assert same == same_too
    assert all(first != second for first, second in zip(different, different_too, strict=True))
    fewer = write_parquet(tmp_path / "c.parquet", ROWS[1:], FLAT, row_group_size=100)
    assert slices(fewer, "score >= 7")[0].content != same  # the numbers of rows differ


def test_a_slice_of_which_no_row_group_is_read_still_has_rows(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ROWS, FLAT, row_group_size=100)
    parts = slices(path, "score == 7", shard_size=1)
    assert len(parts) == 10
    assert outcome(parts)[0::3] == (list(range(700, 800)), 900)
    assert outcome(slices(path, "score > 99"))[0::3] == ([], 1_000)


@pytest.mark.parametrize(
    ("where", "groups"),
    [
        ("x == 3", [0, 1]), ("x != 3", [0, 1, 2]), ("not x >= 3", [0, 1, 2]), ("x < 1 or x is null", [2, 3]),
        ("x is null", [2, 3]), ("x is not null", [0, 1, 2]), ("not x is null and x > 100", []), ("3 < x", [0]),
        ("x between 1 and 2", [0]), ("x in [4.5, 7]", [0]), ("s >= 'm'", [1]), ("'zz' == s", []), ("b", [1]), ("not b", [0, 2]),
        ("false", []), ("true or x == 99", [0, 1, 2, 3]), ("x == y", [0, 1, 2, 3]), ("length(s) > 99", [0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_statistics_skip_only_row_groups_without_a_row_to_keep(tmp_path, where, groups):
    """Row group 1 holds NaN, which statistics do not show, 2 also nulls, and 3 nothing else."""
    nan = float("nan")
    types = {"x": pa.float64(), "y": pa.float64(), "s": pa.string(), "b": pa.bool_()}
    columns = {"x": [1, 5, 3, nan, -2, None, None, None], "s": ["a", "b", "y", "z", "a", "é"[:0], None, None], "b": [False, False, True, True, False, None, None, None]}  # fmt: skip
    given_rows = [{name: values[row] for name, values in columns.items()} | {"y": 0.5} for row in range(8)]
    path = write_parquet(tmp_path / "a.parquet", given_rows, types, row_group_size=2)
    normal = parse_predicate(where).normal
    assert groups_to_read(pq.read_metadata(path), replace(whole(path, 4), where=normal)) == groups


def whole(path, groups):
    (file,) = discover(DataSource(name="a", path=str(path)))
    return Slice(file, 0, groups)


def test_whole_numbers_that_a_double_rounds_do_not_leave_a_row_group_out(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet", [{"text": "x", "n": 2**53 + 1}], {"text": pa.string(), "n": pa.int64()}
    )
    assert outcome(slices(path, "n == 9007199254740992.0"))[0] == [0]
    assert outcome(slices(path, "n == 9007199254740992"))[0] == []


MESSY = [
    {"text": "a", "n": 3}, {"text": "b", "n": 3.0}, {"text": "c", "n": "3"}, {"text": "d", "n": True}, {"text": "e", "n": None},
    {"text": "f"}, {"text": "g", "n": [3]}, {"text": "h", "n": {"v": 3}}, {"text": "i", "n": 2**63}, {"text": "j", "n": 10**30},
    {"text": "k", "n": 2**53 + 1}, {"n": 3}, {"n": 1}, {"text": None, "n": 0}, {"text": "o", "n": -(2**63)},
]  # fmt: skip
LINES = [json.dumps(row).encode() for row in MESSY]
LINES += [b"", b"[1]", b'{"text": "p", "n": 5', b'{"text": "q", "n": 1e400}']
NOT_COMPARABLE = dict.fromkeys([2, 3, 6, 7], "not_comparable")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
@pytest.mark.parametrize("alone", [True, False], ids=["row by row", "together"])
def test_json_rows_are_judged_by_their_own_types(tmp_path, name, alone):
    """Values of other types make bad rows, not dropped ones; and no other row changes what becomes of a row."""
    lines = [line for line in LINES if line] if name == "a.json" else LINES
    lines = [line for line in lines if name != "a.json" or orjson_reads(line)]
    path = tmp_path / name
    content = b"[" + b",".join(lines) + b"]" if name == "a.json" else b"\n".join([*lines, b""])
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    texts, bad = [], []
    if alone:
        for number, line in enumerate(lines):
            one = tmp_path / f"{number}.jsonl"
            one.write_bytes(line + b"\n")
            _, found, reasons, _ = outcome(slices(one, "n >= 3"))
            texts, bad = texts + found, [*bad, *reasons.values()]
    else:
        _, texts, reasons, _ = outcome(slices(path, "n >= 3"))
        bad = [*reasons.values()]
    assert texts == ["a", "b", "i", "j", "k"]
    wanted = [*NOT_COMPARABLE.values(), "missing_field", "not_an_object"]
    assert bad[:6] == wanted
    assert bad[6:] == ([] if name == "a.json" else ["malformed_json", "number_out_of_range"])


def orjson_reads(line):
    try:
        return orjson.loads(line) is not None
    except orjson.JSONDecodeError:
        return False


def test_records_and_texts_agree_and_untouched_rows_are_not_passed_on_unseen(tmp_path):
    path = write_json(tmp_path / "a.jsonl", ROWS)
    (part,) = slices(path, "score >= 7", language=["de"])
    kept = [row for row in ROWS if row["score"] >= 7 and row["language"] == "de"]
    batches = list(read_records(part, []))
    assert [record for batch in batches for record in batch.records] == kept
    assert [orjson.loads(raw) for batch in batches for raw in batch.raw] == kept
    assert sum(batch.consumed for batch in batches) == 1_000
    assert read_objects(part) is None
    table = write_parquet(tmp_path / "a.parquet", ROWS, FLAT, row_group_size=64)
    (part,) = slices(table, "score >= 7", language=["de"])
    assert [record for batch in read_records(part, ["text", "url"]) for record in batch.records] == kept


def test_the_first_rows_of_a_slice_are_counted_before_the_filter(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ROWS, FLAT, row_group_size=100)
    (part,) = slices(path, "score >= 3")
    assert outcome([replace(part, rows=350)])[0::3] == (list(range(300, 350)), 300)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.string()), pa.binary()], ids=str)  # fmt: skip
def test_text_is_compared_in_any_parquet_type(tmp_path, kind):
    words = ["en", "it's", "日本", None, "", "en, de"]
    given_rows = [{"text": f"{number}", "s": word} for number, word in enumerate(words)]
    path = write_parquet(tmp_path / "a.parquet", given_rows, {"text": pa.string(), "s": kind}, row_group_size=2)
    assert outcome(slices(path, r"s in ['it\'s', '日本'] or length(s) == 0"))[0] == [1, 2, 4]
    assert outcome(slices(path, s=["en", "日本"]))[0] == [0, 2, 5]
    assert outcome(slices(write_json(tmp_path / "a.jsonl", given_rows), s=["en", "日本"]))[0] == [0, 2, 5]


def test_predicate_on_the_text_reads_it_once(tmp_path):
    texts = pa.array(["short", "long enough", None], pa.large_string())
    broken = pa.array([b"long \xff\xfe enough", b"x"], pa.large_binary()).view(pa.large_string())
    pq.write_table(pa.table({"text": pa.chunked_array([texts, broken])}), tmp_path / "a.parquet")
    numbers, _, bad, filtered = outcome(slices(tmp_path / "a.parquet", "length(text) > 8"))
    assert (numbers, bad, filtered) == ([1], {3: "invalid_utf8"}, 3)


REFUSED = [
    ("scor > 3", "where: character 1, before 'scor > 3': unknown field 'scor'; did you mean 'score'?"),
    ("score > '3'", "field 'score' is a number and \"3\" is text"),
    ("tags == 'a'", "field 'tags' is a list, which can only be tested with `is null`"),
    ("length(tags) > 1", "field 'tags' is a list; length() takes text"),
    ("price > 3", "field 'price' is decimal128(9, 2), which can only be tested"),
    ("at > 3", "field 'at' is timestamp[us], which can only be tested"),
    ("meta.scor > 3", "unknown field 'scor' in 'meta.scor'; did you mean 'score'?"),
    ("meta > 3", "field 'meta' is an object, which can only be tested"),
    ("text.x == 'a'", "unknown field 'x' in 'text.x'; it is string"),
]


@pytest.mark.parametrize(("where", "message"), REFUSED)
def test_misfit_predicate_fails_before_reading(tmp_path, where, message):
    row = {"text": "x", "score": 1, "tags": ["a"], "price": Decimal("1.50"), "at": None, "meta": {"score": 1}}
    types = {"text": pa.string(), "score": pa.int8(), "tags": pa.list_(pa.string()), "price": pa.decimal128(9, 2), "at": pa.timestamp("us"), "meta": pa.struct({"score": pa.int8()})}  # fmt: skip
    path = write_parquet(tmp_path / "a.parquet", [row], types)
    with pytest.raises(InputError) as error:
        slices(path, where)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert outcome(slices(path, "tags is not null and at is null and price is not null and meta is not null"))[0] == [0]


def test_unknown_filter_field_is_rejected_for_parquet(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ROWS[:1], FLAT)
    with pytest.raises(InputError, match="filters: unknown field 'langage'; did you mean 'language'"):
        slices(path, langage="en")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a>=3 AND b  in ['x',\"y\"]", "a >= 3 and b in ['x', 'y']"),
        ("not(  length (`a`.b )>1)", "not (length(a.b) > 1)"),
        ("`odd name`== 'it\\'s' OR `and` is  NOT null", "`odd name` == 'it\\'s' or `and` is not null"),
        ('s == "\\"[(" or s == "\\\\"', "s == '\"[(' or s == '\\\\'"),
    ],
)
def test_one_predicate_has_one_spelling(one, other):
    assert DataSource(name="a", path="/a", where=one).where == other == parse_predicate(other).normal


@given(trees)
def test_the_normal_spelling_means_the_same_and_is_its_own(tree):
    normal = parse_predicate(written(tree)).normal
    assert parse_predicate(normal).normal == normal
    given_rows = [{"a": 1, "s": "é", "b": True, "m": {"v": 2}}, {"x": 0.5, "odd name": "", "c": False}, {}]
    part = Slice(whole_file(), 0, 0, where=normal)
    kept, problems = filter_of(part).of_records(given_rows)
    assert not problems
    assert np.array_equal(kept, [meaning(tree, row) is True for row in given_rows])


def whole_file():
    return next(iter(discover(DataSource(name="a", path=str(Path(__file__).parents[2] / "blends/tiny/chat.jsonl")))))
