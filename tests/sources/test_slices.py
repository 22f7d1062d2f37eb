"""What a slice contains: exactly the bytes of its rows, read once, and remembered only where that is safe."""

import copy
import json
import os
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.sources import slices as slices_module
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.files import SourceFile
from tokenmill.tasks.sources.opening import require_text_head
from tokenmill.tasks.sources.slices import ContentIndex, content_hash, cut

LONG_AGO = 1_000_000_000 * 10**9
"""A modification time that no clock tick can touch any more, in nanoseconds."""

ROW = st.binary(max_size=25).map(
    lambda row: row.replace(b"\n", b" ").replace(b"\0", b" ")
)  # every other zero is UTF-16
rows = st.lists(ROW, min_size=1, max_size=20)


def write(path, data, modified_ns=LONG_AGO):
    path.write_bytes(data)
    os.utime(path, ns=(modified_ns, modified_ns))
    return path


def file_of(path):
    (file,) = discover(DataSource(name="a", path=str(path)))
    return file


def write_lines(path, data):
    """Write JSON Lines; bytes that begin like a different format (gzip, a JSON array) are left out, as they are an error."""
    write(path, data)
    try:
        require_text_head(file_of(path), data)
    except InputError:
        reject()
    return path


def slices_of(path, shard_size):
    return cut(file_of(path), shard_size, ["text"])


def contents(path, shard_size, index=None, identity="content"):
    """The content of each slice that owns rows, by its start."""
    found = (index or ContentIndex()).identify(slices_of(path, shard_size), ["text"], identity)
    return {part.start: part.content for part in found}


def owned(data, shard_size):
    """The bytes of the rows that each slice owns, by its start, found by splitting the file into lines."""
    found = {}
    place = 0
    for line in data.split(b"\n"):
        row = data[place : place + len(line) + 1]
        if row:
            start = place // shard_size * shard_size
            found[start] = found.get(start, b"") + row
        place += len(line) + 1
    return found


@given(rows, st.booleans(), st.integers(1, 120))
def test_a_content_is_the_hash_of_exactly_the_rows_that_begin_in_the_slice(tmp_path_factory, rows, ends, shard_size):
    data = b"\n".join(rows) + b"\n" * ends
    assume(data)
    path = write_lines(tmp_path_factory.getbasetemp() / "exact.jsonl", data)
    expected = {
        start: f"xxh3_128:{xxhash.xxh3_128_hexdigest(row_bytes)}"
        for start, row_bytes in owned(data, shard_size).items()
    }
    assert contents(path, shard_size) == expected


@given(rows.filter(any), st.integers(1, 80), st.data())
def test_a_changed_byte_changes_only_the_slice_that_owns_its_row(tmp_path_factory, rows, shard_size, draw):
    data = b"\n".join(rows) + b"\n"
    place = draw.draw(st.sampled_from([place for place, byte in enumerate(data) if byte != ord("\n")]))
    flipped = data[place] ^ (0x40 if data[place] ^ 0x80 == ord("\n") else 0x80)  # the rows stay as many
    changed = data[:place] + bytes([flipped]) + data[place + 1 :]
    folder = tmp_path_factory.getbasetemp()
    before = contents(write_lines(folder / "before.jsonl", data), shard_size)
    after = contents(write_lines(folder / "after.jsonl", changed), shard_size)
    owner = (data.rfind(b"\n", 0, place) + 1) // shard_size * shard_size
    assert before.keys() == after.keys()
    assert [start for start in before if before[start] != after[start]] == [owner]


def test_ranges_longer_than_a_block_are_hashed_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(slices_module, "CHUNK_BYTES", 7)
    path = write(tmp_path / "a.jsonl", b"0123456789" * 10 + b"\n")
    assert contents(path, 1000) == {0: f"xxh3_128:{xxhash.xxh3_128_hexdigest(path.read_bytes())}"}


def parquet(path, texts, others):
    table = pa.table({"other": others, "text": texts})
    pq.write_table(table, path, row_group_size=2, use_dictionary=False, compression="none")
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return path


def test_parquet_slice_is_identified_by_its_text_column(tmp_path):
    path = parquet(tmp_path / "a.parquet", ["aa", "bb", "cc", "dd"], ["1", "2", "3", "4"])
    before = contents(path, 1)
    assert list(before) == [0, 1]
    parquet(path, ["aa", "bb", "cc", "dd"], ["1", "2", "3", "5"])
    assert contents(path, 1) == before
    parquet(path, ["aa", "bb", "cc", "DD"], ["1", "2", "3", "4"])
    after = contents(path, 1)
    assert after[0] == before[0]
    assert after[1] != before[1]


def column_bytes(path, *leaves):
    """The bytes of some leaf columns, row group by row group, found by the offsets that the Parquet format defines."""
    metadata, data = pq.read_metadata(path), path.read_bytes()
    found = b""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in [group.column(leaf) for leaf in range(group.num_columns)]:
            if column.path_in_schema in leaves:
                begin = min(filter(None, [column.dictionary_page_offset, column.data_page_offset]))
                found += data[begin : begin + column.total_compressed_size]
    return found


@pytest.mark.parametrize("field", ["text", "content.text"])
def test_what_names_a_column_of_text_is_the_hash_of_its_chunks_and_nothing_else(tmp_path, field):
    """Shards of earlier releases are known by these names."""
    texts = [f"text {number % 7}" for number in range(500)]
    table = {"id": range(500), "text": texts, "content": [{"text": text, "n": 1} for text in texts], "text.more": texts}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(table), path, row_group_size=100)
    (part,) = ContentIndex().identify(cut(file_of(path), 1 << 30, [field]), [field], "content")
    assert part.content == f"xxh3_128:{xxhash.xxh3_128_hexdigest(column_bytes(path, field))}"
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    (part,) = ContentIndex().identify(cut(file_of(path), 1 << 30, [field]), [field], "mtime")
    assert part.content == f"stat:{path}:{path.stat().st_size}:{LONG_AGO}:0:5:{field}"


CHAT = [
    {"messages": [{"role": "user", "content": "aa"}, {"role": "assistant", "content": "bb"}], "tools": "[]", "id": 1},
    {"messages": [{"role": "user", "content": "cc"}], "tools": "[]", "id": 2},
]


def chat_content(path, rows, fields=("messages", "tools", "absent"), kind=None):
    pq.write_table(pa.Table.from_pylist(rows, kind), path, use_dictionary=False, compression="none")
    parts = ContentIndex().identify(cut(file_of(path), 1 << 30, fields), fields, "content")
    return [part.content for part in parts]


def changed(rows, change):
    rows = copy.deepcopy(rows)
    change(rows)
    return rows


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        (lambda rows: None, False),
        (lambda rows: rows[0].update(id=7), False),
        (lambda rows: [row.update(more="x") for row in rows], False),
        (lambda rows: [row.pop("id") for row in rows], False),
        (lambda rows: rows[1]["messages"][0].update(content="CC"), True),
        (lambda rows: rows[0]["messages"][1].update(role="ASSISTANT"), True),
        (lambda rows: rows[1]["messages"].append({"role": "user", "content": ""}), True),
        (lambda rows: rows[1].update(tools="[1]"), True),
        (lambda rows: [row.pop("tools") for row in rows], True),
        (lambda rows: [row.update(absent="x") for row in rows], True),
    ],
)
def test_a_slice_of_records_is_known_by_every_leaf_of_its_fields(tmp_path, change, matters):
    path = tmp_path / "a.parquet"
    before = chat_content(path, CHAT)
    assert (chat_content(path, changed(CHAT, change)) != before) == matters


def test_the_order_of_the_fields_changes_no_content(tmp_path):
    orders = ("messages tools", "tools messages", "tools messages messages", "messages tools x")
    assert len({*(chat_content(tmp_path / "a.parquet", CHAT, order.split())[0] for order in orders)}) == 1


def renamed(rows, old, new):
    return json.loads(json.dumps(rows).replace(f'"{old}":', f'"{new}":'))


@pytest.mark.parametrize(("old", "new"), [("content", "text"), ("tools", "absent"), ("messages", "absent")])
def test_records_whose_fields_have_other_names_are_other_records(tmp_path, old, new):
    """Names stand in the footer: the column chunks are the same bytes."""
    path = tmp_path / "a.parquet"
    leaves = ["messages.list.element.content", "messages.list.element.role", "tools"]
    before, data = chat_content(path, CHAT), column_bytes(path, *leaves)
    after = chat_content(path, renamed(CHAT, old, new))
    assert column_bytes(path, *(leaf.replace(old, new) for leaf in leaves)) == data
    assert after != before


def test_two_fields_that_change_their_names_with_each_other_are_other_records(tmp_path):
    path, fields = tmp_path / "a.parquet", ["prompt", "answer"]
    before = chat_content(path, [{"prompt": "a", "answer": "b"}], fields)
    assert chat_content(path, [{"answer": "a", "prompt": "b"}], fields) != before
    only = chat_content(path, [{"prompt": "a"}], fields)
    assert chat_content(path, [{"answer": "a"}], fields) != only


def test_binary_or_nullable_text_is_a_different_identity(tmp_path):
    kinds = [pa.field("m", pa.struct([pa.field("a", kind, nullable=null)])) for kind, null in
             [(pa.string(), True), (pa.binary(), True), (pa.string(), False)]]  # fmt: skip
    contents = [chat_content(tmp_path / "a.parquet", [{"m": {"a": "x"}}], ["m"], pa.schema([kind])) for kind in kinds]
    assert len({content for (content,) in contents}) == 3


def test_file_without_the_fields_lists_its_columns(tmp_path):
    path = tmp_path / "a.parquet"
    chat_content(path, CHAT)
    words = r"a\.parquet: has none of the fields 'mesages', 'tool'.*columns: messages, tools, id"
    with pytest.raises(InputError, match=words):
        cut(file_of(path), 100, ["mesages", "tool"])
    (part,) = cut(file_of(path), 1 << 30, ["messages"])
    with pytest.raises(InputError, match=words):
        content_hash(part, ["mesages", "tool"])


def test_each_choice_of_fields_is_cached_separately(tmp_path):
    path = tmp_path / "a.parquet"
    chat_content(path, CHAT)
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    index = ContentIndex()
    choices = [["messages"], ["tools"], ["messages", "tools"]]
    found = [index.identify(cut(file_of(path), 1 << 30, fields), fields, "content")[0].content for fields in choices]
    assert len(set(found)) == len(index.entries) == 3
    index.changed = False
    again = [index.identify(cut(file_of(path), 1 << 30, fields), fields, "content")[0].content for fields in choices]
    assert (again, index.changed) == (found, False)


@pytest.fixture
def no_reading(monkeypatch):
    def refuse(*_):
        raise AssertionError("the content was read")

    return lambda: monkeypatch.setattr(slices_module, "content_hash", refuse)


def remembered(path, shard_size=30, identity="content"):
    """An index that has seen the file, saved and loaded again."""
    index = ContentIndex()
    contents(path, shard_size, index, identity)
    return ContentIndex.load(index.dump())


def test_unchanged_file_is_identified_by_stat(tmp_path, no_reading):
    path = write(tmp_path / "a.jsonl", b"some row\n" * 20)
    expected = contents(path, 30)
    index = remembered(path)
    no_reading()
    assert contents(path, 30, index) == expected
    assert not index.changed


def test_a_touched_file_is_read_again_and_found_to_be_the_same(tmp_path, no_reading):
    path = write(tmp_path / "a.jsonl", b"some row\n" * 20)
    index = remembered(path)
    expected = contents(path, 30)
    os.utime(path, ns=(LONG_AGO, LONG_AGO + 1))
    assert contents(path, 30, index) == expected
    assert index.changed
    os.utime(path, ns=(LONG_AGO, LONG_AGO + 2))
    no_reading()
    with pytest.raises(AssertionError):
        contents(path, 30, index)


@pytest.mark.parametrize("age", [-3600 * 10**9, 0, 10**9, 1_900_000_000])
def test_a_file_modified_just_now_is_not_remembered(tmp_path, age):
    path = write(tmp_path / "a.jsonl", b"some row\n", time.time_ns() - age)
    index = ContentIndex()
    contents(path, 30, index)
    assert index.entries == {}
    assert not index.changed


def test_file_changed_shortly_before_reading_is_not_remembered(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", b"some row\n")
    clock = [LONG_AGO + 10**9]

    def slow(part, fields):
        clock[0] += 3600 * 10**9
        return content_hash(part, fields)

    monkeypatch.setattr(slices_module, "content_hash", slow)
    monkeypatch.setattr(slices_module.time, "time_ns", lambda: clock[0])
    index = ContentIndex()
    contents(path, 30, index)
    assert index.entries == {}
    contents(path, 30, index)
    assert len(index.entries) == 1


def test_stat_identity_trusts_modification_times(tmp_path, no_reading):
    path = write(tmp_path / "a.jsonl", b"some row\n" * 20)
    no_reading()
    before = contents(path, 30, identity="mtime")
    assert len(set(before.values())) == 6
    write(path, b"SAME ROW\n" * 20)
    assert contents(path, 30, identity="mtime") == before
    os.utime(path, ns=(LONG_AGO, LONG_AGO + 1))
    assert not set(contents(path, 30, identity="mtime").values()) & set(before.values())


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b"\xff", b'{"entries": {"a": "b"}}', b"{", b'{"entries": 5}']
)
def test_an_index_that_cannot_be_believed_is_an_empty_one(data):
    assert ContentIndex.load(data).entries == {}


def test_every_damage_to_an_index_makes_it_an_empty_one(tmp_path):
    """A flipped bit in a remembered hash would give a shard a name that is not its own."""
    index = remembered(write(tmp_path / "a.jsonl", b"row\n" * 20))
    data = index.dump()
    assert ContentIndex.load(data).entries == index.entries
    for place in range(len(data)):
        assert ContentIndex.load(data[:place]).entries == {}
        assert ContentIndex.load(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]).entries == {}


def test_store_hashes_are_combined_with_the_range(no_reading):
    no_reading()
    file = SourceFile("s3://bucket/a.jsonl", 250, "jsonl", version="d41d8cd9")
    found = ContentIndex().identify(cut(file, 100, ["text"]), ["text"], "content")
    assert [part.content for part in found] == ["d41d8cd9[0:100]", "d41d8cd9[100:200]", "d41d8cd9[200:250]"]
    other = ContentIndex().identify(cut(replace(file, version="00"), 100, ["text"]), ["text"], "mtime")
    assert not {part.content for part in found} & {part.content for part in other}


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"longer than before\n"),
        lambda path: os.utime(path, ns=(LONG_AGO, LONG_AGO + 1)),
        lambda path: write(path, b"SOME ROW\n", LONG_AGO + 1),
    ],
)
def test_file_changed_while_reading_is_rejected(tmp_path, change):
    path = write(tmp_path / "a.jsonl", b"some row\n")
    (part,) = slices_of(path, 100)
    change(path)
    with pytest.raises(RunError, match=r"a\.jsonl: changed while"):
        content_hash(part, ["text"])


def test_replaced_file_with_equal_stat_has_new_content(tmp_path):
    index = ContentIndex()
    path = write(tmp_path / "a.jsonl", b"before\n")
    assert contents(path, 1000, index) == contents(path, 1000)
    write(tmp_path / "b.jsonl", b"behind\n").replace(path)
    assert file_of(path).modified_ns == LONG_AGO
    assert contents(path, 1000, index) == {0: f"xxh3_128:{xxhash.xxh3_128_hexdigest(b'behind' + bytes([10]))}"}
