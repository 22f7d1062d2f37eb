"""Cuts: every row in one slice, fixed places that growth does not move, and samples of exactly the leading part."""

import math
from itertools import accumulate
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.files import SourceFile
from tokenmill.tasks.sources.formats import count_rows, first_row, read_texts
from tokenmill.tasks.sources.slices import cut, leading_rows, leading_share

from tests.preparing import write_texts

ROWS = [f"row {number} " + "x" * (number * 37 % 90) for number in range(60)]


def slices_of(folder, shard_size=300):
    files = discover(DataSource(name="a", path=str(folder)))
    return [part for file in files for part in cut(file, shard_size, ["text"])]


def texts_of(slices):
    return [text for part in slices for batch in read_texts(part, "text") for text in batch.texts.to_pylist()]


@pytest.fixture(params=["jsonl", "jsonl.gz", "jsonl.zst", "json", "parquet"])
def folder(request, tmp_path):
    """The rows in two files, in one of the kinds that can be read."""
    write_texts(tmp_path / f"a.{request.param}", ROWS[:25], 7)
    write_texts(tmp_path / f"b.{request.param}", ROWS[25:], 7)
    return tmp_path


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_jsonl_is_cut_at_multiples_of_the_shard_size(size, shard_size):
    shard_size = max(shard_size, size // 200)
    file = SourceFile("/a.jsonl", size, "jsonl")
    slices = cut(file, shard_size, ["text"])
    assert [part.start for part in slices] == list(range(0, size, shard_size))
    assert [part.stop for part in slices] == [*range(shard_size, size, shard_size), size]
    assert sum(part.size for part in slices) == size


def test_parquet_is_cut_between_row_groups_of_about_the_shard_size(tmp_path):
    write_texts(tmp_path / "a.parquet", ROWS, 7)
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    sizes = [metadata.row_group(number).column(0).total_compressed_size for number in range(metadata.num_row_groups)]
    slices = slices_of(tmp_path, shard_size=400)
    bounds = [(part.start, part.stop) for part in slices]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == len(sizes)
    assert len(slices) > 2
    for part in slices:
        assert part.size == sum(sizes[part.start : part.stop])
        assert part.size - sizes[part.stop - 1] < 400 <= part.size or part is slices[-1]


def test_all_slices_hold_all_rows_once_in_order(folder):
    assert texts_of(slices_of(folder)) == ROWS


def test_empty_file_has_zero_slices():
    assert cut(SourceFile("/a.jsonl", 0, "jsonl"), 100, ["text"]) == []


@pytest.mark.parametrize("rows", [1, 2, 7, 24, 25, 26, 59, 60])
def test_a_sample_is_exactly_the_leading_rows(folder, rows):
    sampled = leading_rows(slices_of(folder), rows)
    assert texts_of(sampled) == ROWS[:rows]
    assert sum(count_rows(part, 10**9) for part in sampled) == rows


def test_only_the_slice_that_the_sample_ends_in_is_limited(folder):
    """A slice of which every row is taken is the same slice that is taken without a sample."""
    slices = slices_of(folder)
    counts = [count_rows(part, 10**9) for part in slices]
    for number in range(1, len(slices) + 1):
        limits = [part.rows for part in leading_rows(slices, sum(counts[:number]))]
        assert limits == [None] * number or not counts[number - 1]
        if counts[number - 1] > 1:
            sampled = leading_rows(slices, sum(counts[:number]) - 1)
            assert [part.rows for part in sampled] == [None] * (number - 1) + [counts[number - 1] - 1]


def test_blank_and_bad_rows_count_as_rows_of_a_sample(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "a"}\nbroken\n\n{"text": "b"}\n{"text": "c"}\n')
    sampled = leading_rows(slices_of(tmp_path, shard_size=9), 5)
    assert texts_of(sampled) == ["a", "b"]
    assert sum(batch.consumed for part in sampled for batch in read_texts(part, "text")) == 5


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(1, 200), st.floats(0.001, 0.999))
def test_a_share_of_jsonl_is_the_rows_that_begin_in_the_leading_share_of_the_bytes(
    tmp_path_factory, lengths, shard_size, share
):
    rows = [f"{number}" + "x" * length for number, length in enumerate(lengths)]
    folder = tmp_path_factory.mktemp("share")
    lines = write_texts(folder / "a.jsonl", rows).read_bytes().splitlines(keepends=True)
    size, begins = sum(map(len, lines)), list(accumulate(map(len, lines[:-1]), initial=0))
    expected = [row for row, begin in zip(rows, begins, strict=True) if begin < math.ceil(size * share)]
    assert texts_of(leading_share(slices_of(folder, shard_size), share)) == expected


@pytest.mark.parametrize("share", [0.01, 0.3, 0.999])
def test_share_of_unsplittable_files_is_whole_slices(folder, share):
    slices = slices_of(folder, shard_size=200)
    if slices[0].file.format == "jsonl" and slices[0].file.compression is None:
        return
    kept = leading_share(slices, share)
    total = sum(part.size for part in slices)
    assert kept == slices[: len(kept)]
    assert sum(part.size for part in kept[:-1]) < total * share <= sum(part.size for part in kept)


@given(st.lists(st.sampled_from([b"", b'{"text": "a"}', b"broken", b"x" * 50]), max_size=20), st.integers(1, 60))
def test_the_first_row_of_a_slice_is_counted_from_the_start_of_the_file(tmp_path_factory, lines, shard_size):
    folder = tmp_path_factory.mktemp("locate")
    (folder / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    before = 0
    for part in slices_of(folder, shard_size):
        rows = count_rows(part, 10**9)
        if rows:
            assert first_row(part) == before
        before += rows


def test_the_first_row_of_a_parquet_slice_is_counted_from_the_footer(tmp_path):
    write_texts(tmp_path / "a.parquet", ROWS, 7)
    slices = slices_of(tmp_path, shard_size=400)
    starts = [first_row(part) for part in slices]
    assert starts == [ROWS.index(texts_of([part])[0]) for part in slices]
    assert Path(slices[0].file.uri).name == "a.parquet"
