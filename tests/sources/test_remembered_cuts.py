"""Where Parquet files are cut is asked of their footers once, and again as soon as anything could have changed it."""

import os

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources import parquet
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.parquet import require_any, require_text
from tokenmill.tasks.sources.slices import ContentIndex, cut

from tests.flaky_storage import flaky_server, used_here

LONG_AGO = 1_000_000_000 * 10**9
"""A modification time that no clock tick can touch any more, in nanoseconds."""
TEXT = ["text"]


def write(path, groups, modified_ns=LONG_AGO):
    """A file of so many row groups, of one row each."""
    table = pa.table({"text": [f"{path.name} row {number}" for number in range(groups)], "id": range(groups)})
    pq.write_table(table, path, row_group_size=1)
    os.utime(path, ns=(modified_ns, modified_ns))
    return path


def files_in(place):
    return discover(DataSource(name="a", path=str(place)))


def saved(index):
    """The index as the next process reads it."""
    return ContentIndex.load(index.dump())


@pytest.fixture
def opened(monkeypatch):
    """The names of the files that are opened to be cut, in order."""
    names, open_source = [], parquet.open_source

    def noting(file):
        names.append(file.uri.rpartition("/")[2])
        return open_source(file)

    monkeypatch.setattr(parquet, "open_source", noting)
    return names


def test_files_are_cut_in_order_and_remembered(tmp_path, opened):
    for number in range(40):
        write(tmp_path / f"{number:02d}.parquet", 1 + number % 3)
    (tmp_path / "20.jsonl").write_text('{"text": "lines between them"}\n' * 5)
    files, index = files_in(tmp_path), ContentIndex()
    one_by_one = [part for file in files for part in cut(file, 40, TEXT)]
    assert len(one_by_one) > 80
    assert index.slices(files, 40, TEXT) == one_by_one
    opened.clear()
    again = saved(index)
    assert again.slices(files_in(tmp_path), 40, TEXT) == one_by_one
    assert (opened, again.changed) == ([], False)


def test_a_file_that_changed_is_asked_again_and_no_other(tmp_path, opened):
    paths = [write(tmp_path / f"{name}.parquet", 2) for name in "abc"]
    index = ContentIndex()
    before = index.slices(files_in(tmp_path), 1, TEXT)
    opened.clear()
    write(paths[1], 3, LONG_AGO + 1)
    after = saved(index).slices(files_in(tmp_path), 1, TEXT)
    assert opened == ["b.parquet"]
    assert (len(before), len(after)) == (6, 7)
    assert [(part.start, part.stop) for part in after if part.file.uri == str(paths[1])] == [(0, 1), (1, 2), (2, 3)]


def test_cuts_depend_on_shard_size_and_fields(tmp_path, opened):
    path = write(tmp_path / "a.parquet", 3)
    (file,), index = files_in(path), ContentIndex()
    for shard_size, fields in ((1, TEXT), (1 << 30, TEXT), (1, ["id"])):
        assert index.slices([file], shard_size, fields) == cut(file, shard_size, fields)
    assert [len(index.slices([file], shard_size, TEXT)) for shard_size in (1, 1 << 30)] == [3, 1]


def test_footer_answers_are_per_question(tmp_path):
    path = write(tmp_path / "a.parquet", 2)
    files, index = files_in(path), ContentIndex()
    index.slices(files, 1, ["id"], require_any)
    with pytest.raises(InputError, match="id"):  # a number, where text is wanted
        saved(index).slices(files, 1, ["id"], require_text)


def test_rejections_are_not_cached(tmp_path):
    files, index = files_in(write(tmp_path / "a.parquet", 2)), ContentIndex()
    for _ in range(2):
        with pytest.raises(InputError, match=r"a\.parquet"):
            index.slices(files, 1, ["nothing"])
    assert not index.changed


def test_objects_without_content_hash_are_not_cached(tmp_path):
    fsspec.filesystem("memory").pipe("/uncertain/a.parquet", write(tmp_path / "a.parquet", 2).read_bytes())
    (file,), index = files_in("memory://uncertain/a.parquet"), ContentIndex()
    assert file.version is None
    assert len(index.slices([file], 1, TEXT)) == 2
    assert not index.changed


def test_an_unchanged_bucket_costs_its_listing(tmp_path):
    for number in range(12):
        write(tmp_path / f"{number:02d}.parquet", 2)
    with flaky_server() as server, used_here(server):
        place = server.bucket("unchanged")
        server.upload(tmp_path, f"{place}/in")
        index = ContentIndex()
        before = index.identify(index.slices(files_in(f"{place}/in"), 1, TEXT), TEXT, "content")
        server.faults.clear()
        again = saved(index)
        after = again.identify(again.slices(files_in(f"{place}/in"), 1, TEXT), TEXT, "content")
        listing = server.faults.counts["requests"]
        server.faults.clear()
        files_in(f"{place}/in")
    assert (len(after), after) == (24, before)
    assert listing == server.faults.counts["requests"]


def test_replaced_file_with_equal_stat_is_cut_again(tmp_path, opened):
    index, path = ContentIndex(), write(tmp_path / "a.parquet", 2)
    for _ in range(2):
        index.slices(files_in(path), 1, TEXT, require_text)
    assert opened == ["a.parquet"]
    (before,) = files_in(path)
    write(tmp_path / "b.parquet", 2).replace(path)
    (after,) = files_in(path)
    assert (after.size, after.modified_ns) == (before.size, before.modified_ns)
    index.slices([after], 1, TEXT, require_text)
    assert opened == ["a.parquet"] * 2
