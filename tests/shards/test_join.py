"""Extents are joined byte for byte, on a disk and by an S3 server that counts what passes through its clients."""

import os
import random
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.s3 import LARGEST_PART, MOST_PARTS, SMALLEST_PART, Range, parts_of
from tokenmill.tasks.shards.publish import Extent, join_extents

from tests.flaky_storage import flaky_server, used_here

SIZES = st.lists(
    st.one_of(st.integers(0, 100), st.integers(0, 3 * SMALLEST_PART), st.integers(0, 3 * LARGEST_PART)), max_size=40
)


def files(folder, count=5, size=100_000):
    generator = random.Random(0)
    contents = [generator.randbytes(size + number) for number in range(count)]
    paths = [folder / f"{number}" for number in range(count)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths, contents


@pytest.mark.parametrize("refusal", [None, OSError(18, "cross-device")])
def test_extents_of_local_files_are_joined(refusal, tmp_path, monkeypatch):
    paths, contents = files(tmp_path)
    if refusal:

        def refuse(*_):
            raise refusal

        monkeypatch.setattr(os, "copy_file_range", refuse)
    chosen = [(0, 0, 100_000), (3, 17, 5), (3, 50_000, 50_003), (1, 0, 0), (0, 1, 99_999)]
    join_extents([Extent(str(paths[file]), start, size) for file, start, size in chosen], str(tmp_path / "out/joined"))
    expected = b"".join(contents[file][start : start + size] for file, start, size in chosen)
    assert (tmp_path / "out/joined").read_bytes() == expected


def test_short_extent_is_not_published_and_is_named(tmp_path):
    (path, *_), _ = files(tmp_path)
    with pytest.raises(OSError, match=f"ends 1 bytes early: '{path}'"):
        join_extents([Extent(str(path), 1, 100_000)], str(tmp_path / "joined"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "4"]


@given(SIZES)
def test_parts_are_what_s3_accepts_and_hold_every_byte_in_order(sizes):
    ranges = [Range(str(number), 7, size) for number, size in enumerate(sizes)]
    parts = list(parts_of(ranges))
    assert len(parts) <= MOST_PARTS + len(sizes)
    for part in parts[:-1]:
        assert sum(each.size for each in part) >= SMALLEST_PART
    for part in parts:
        assert all(each.size for each in part)
        assert len(part) == 1 or sum(each.size for each in part) <= max(SMALLEST_PART, sum(sizes) // MOST_PARTS + 1)
        assert sum(each.size for each in part) <= LARGEST_PART
    joined = []
    for path, start, size in (each for part in parts for each in part):
        if joined and joined[-1][0] == path:
            assert joined[-1][2] == start
            joined[-1][2] += size
        else:
            joined.append([path, start, start + size])
    assert joined == [[path, start, start + size] for path, start, size in ranges if size]


@pytest.fixture
def server():
    with ExitStack() as stack:
        found = stack.enter_context(flaky_server(kinds=()))
        stack.enter_context(used_here(found))
        yield found


MIB = 1 << 20


def stored(server, name, sizes):
    """Objects of these sizes in a bucket; their extents, and their content joined."""
    generator, bucket = random.Random(1), server.bucket(name)
    contents = [generator.randbytes(size) for size in sizes]
    with server.paused() as client:
        for number, content in enumerate(contents):
            client.put_object(Bucket=name, Key=f"{number}", Body=content)
    extents = [Extent(f"{bucket}/{number}", 0, size) for number, size in enumerate(sizes)]
    return bucket, extents, b"".join(contents)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "passing"),
    [
        ([12 * MIB, 5 * MIB, 9 * MIB + 1, 3], 0),
        ([6 * MIB, MIB, 100, 11 * MIB, 7 * MIB, 9], 5 * MIB),
        ([MIB, 10], MIB + 10),
    ],
)
def test_objects_are_joined_by_the_store(sizes, passing, server):
    bucket, extents, expected = stored(server, f"joined-{passing}", sizes)
    server.faults.clear(kinds=())
    join_extents(extents, f"{bucket}/out/joined")
    read = sum(asked.startswith("GET") for asked in server.faults.asked)
    received = server.faults.counts["bytes received"]
    with server.paused() as client:
        assert client.get_object(Bucket=bucket[5:], Key="out/joined")["Body"].read() == expected
    assert passing <= received < passing + 2_000, "the rest is the XML that completes the upload"
    assert read <= (3 if passing else 0)
    assert server.pending(bucket[5:]) == []


def test_store_outage_keeps_the_old_object(server):
    bucket, extents, _ = stored(server, "down", [6 * MIB, 6 * MIB])
    server.faults.clear(kinds=("slow",), down_from=3)
    with pytest.raises(OSError, match=r"Slow Down|SlowDown|reduce"):
        join_extents(extents, f"{bucket}/0")
    with server.paused() as client:
        assert client.head_object(Bucket="down", Key="0")["ContentLength"] == 6 * MIB
