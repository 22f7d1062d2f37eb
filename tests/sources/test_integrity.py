"""What is read is what was planned: whatever happens to a file on the way, no receipt stands for other rows."""

import gzip
import json
import mmap
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.dedup.contamination import evaluation_records, evaluations_from, find_evaluations, load_evaluations
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import shard_identity
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources import integrity, parquet
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.formats import read_records, read_texts
from tokenmill.tasks.sources.integrity import VerifiedStream
from tokenmill.tasks.sources.slices import ContentIndex, cut
from tokenmill.tasks.tokenize.encoders import Tokens
from tokenmill.tasks.tokenize.settings import PretrainRecipe
from tokenmill.tasks.tokenize.shard import tokenize_shard
from xxhash import xxh3_128

LONG_AGO = 1_000_000_000 * 10**9
RECIPE = PretrainRecipe("text", "bytes", 256, "reference", None, None, "literal", None, None, 0, 0, None)
CHANGED = "changed while it was being prepared"
ROWS = 2500


def lines(letter):
    return b"".join(b'{"text": "%05d %s"}\n' % (number, letter * 900) for number in range(ROWS))


def padded(frame, size):
    """A zstd file of `size` bytes that holds one frame: the rest is a frame to be skipped (RFC 8878, 3.1.2)."""
    rest = size - len(frame) - 8
    return frame + b"\x50\x2a\x4d\x18" + rest.to_bytes(4, "little") + b"\0" * rest


def columns(letter):
    sink = pa.BufferOutputStream()
    texts = [f"{number:05d} {letter.decode() * 900}" for number in range(ROWS)]
    options = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    pq.write_table(pa.table({"id": range(ROWS), "text": texts}), sink, row_group_size=1000, **options)
    return sink.getvalue().to_pybytes()


KINDS = {
    "jsonl": lines,
    "json": lambda letter: b"[" + lines(letter).rstrip().replace(b"\n", b",") + b"]",
    "jsonl.gz": lambda letter: gzip.compress(lines(letter), 1, mtime=0),
    "jsonl.zst": lambda letter: padded(zstandard.compress(lines(letter)), 100_000),
    "parquet": columns,
}


@pytest.fixture(scope="module")
def contents():
    """Two files of each kind that are alike in everything but one letter, and as long as each other."""
    both = {kind: (make(b"a"), make(b"b")) for kind, make in KINDS.items()}
    assert all(len(one) == len(other) for one, other in both.values())
    return both


def times(path):
    now = path.stat()
    return now.st_size, now.st_mtime_ns


def rename_over(path, content):
    other = path.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(LONG_AGO, LONG_AGO))
    other.replace(path)


def overwrite(path, content):
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(LONG_AGO, LONG_AGO))


def write_through_a_map(path, content):
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:] = content
    os.utime(path, ns=(LONG_AGO, LONG_AGO))


SWAPS = [rename_over, overwrite, write_through_a_map]


def planned_shards(path, identity="content", shard_size=1 << 30, rows=None):
    (file,) = discover(DataSource(name="a", path=str(path)))
    parts = [replace(part, rows=rows) for part in cut(file, shard_size, ["text"])]
    parts = ContentIndex().identify(parts, ["text"], identity)
    return [PlannedShard("a", "datasets", part, shard_identity("pretrain", 1, RECIPE, part)) for part in parts]


class Bytes:
    """An encoder whose ids are the bytes of the texts, during whose calls things happen to the source."""

    def __init__(self, *events):
        self.events = list(events)

    def encode(self, texts):
        if self.events:
            self.events.pop(0)()
        documents = [text.encode() for text in texts.to_pylist()]
        offsets = np.cumsum([0, *map(len, documents)])
        return Tokens(np.frombuffer(b"".join(documents), np.uint8).astype(np.uint32), offsets)


def build(shard, folder, *events):
    return tokenize_shard(shard, RECIPE, Bytes(*events), [], Store(str(folder), "pretrain"), "fail")


def require_refused(shard, folder, *events):
    with pytest.raises(RunError, match=CHANGED):
        build(shard, folder, *events)
    assert not list(Path(folder).rglob("receipt.json"))


def source(tmp_path, kind, contents):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(contents[kind][0])
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_untouched_file_is_built_whole(tmp_path, contents, kind):
    shards = planned_shards(source(tmp_path, kind, contents), shard_size=1 << 20)
    receipts = [build(shard, tmp_path / "store") for shard in shards]
    assert sum(receipt.documents for receipt in receipts) == ROWS
    assert (len(receipts) > 1) == (kind in {"jsonl", "parquet"})


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_file_swapped_between_plan_and_build_is_rejected(tmp_path, contents, kind, swap):
    path = source(tmp_path, kind, contents)
    shards, before = planned_shards(path, shard_size=1 << 20), times(path)
    swap(path, contents[kind][1])
    assert times(path) == before
    for shard in shards:
        require_refused(shard, tmp_path / "store")


@pytest.mark.parametrize("swap", [overwrite, write_through_a_map])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_file_swapped_while_read_is_rejected_even_if_swapped_back(tmp_path, contents, kind, swap, monkeypatch):
    monkeypatch.setattr(parquet, "BUFFER_BYTES", 1 << 12)  # so that not all is in memory before the swap
    path = source(tmp_path, kind, contents)
    (shard,) = planned_shards(path)
    there, back = (lambda content=content: swap(path, content) for content in contents[kind][::-1])
    require_refused(shard, tmp_path / "store", there)
    back()
    require_refused(shard, tmp_path / "store", there, back)
    back()
    assert build(shard, tmp_path / "store").documents == ROWS


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_own_end(tmp_path, contents):
    path = source(tmp_path, "jsonl", contents)
    (shard,) = planned_shards(path)
    receipt = build(shard, tmp_path / "store", lambda: rename_over(path, contents["jsonl"][1]))
    stored = (tmp_path / "store/pretrain" / shard.key / "all.bin").read_bytes()
    assert (receipt.documents, stored.count(b"a"), stored.count(b"b")) == (ROWS, ROWS * 900, 0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_map_that_writes_without_a_trace_in_the_times_is_noticed(tmp_path, contents, kind):
    """The kernel notes a change when a page first becomes dirty, and nothing for what is written to it later."""
    path = source(tmp_path, kind, contents)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:] = contents[kind][0]
        (shard,) = planned_shards(path)
        memory[:] = contents[kind][1]
        with pytest.raises(RunError, match=CHANGED):
            build(shard, tmp_path / "store")


def test_new_link_or_mode_does_not_change_rows(tmp_path, contents):
    path = source(tmp_path, "jsonl", contents)
    (shard,) = planned_shards(path)
    path.chmod(0o600)
    assert build(shard, tmp_path / "store", lambda: (tmp_path / "link").hardlink_to(path)).documents == ROWS


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("choice", [{"identity": "mtime"}, {"rows": ROWS - 1}])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_unhashed_content_is_checked_by_change_time(tmp_path, contents, kind, choice, swap):
    path = source(tmp_path, kind, contents)
    (shard,) = planned_shards(path, **choice)
    swap(path, contents[kind][1])
    require_refused(shard, tmp_path / "store")
    overwrite(path, contents[kind][0])
    (shard,) = planned_shards(path, **choice)
    require_refused(shard, tmp_path / "store", lambda: overwrite(path, contents[kind][1]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_checks(tmp_path, contents, kind):
    path = source(tmp_path, kind, contents)
    (shard,) = planned_shards(path)
    for read in (read_texts(shard.part, "text"), read_records(shard.part, ()), read_records(shard.part, ["text"])):
        overwrite(path, contents[kind][1])
        with pytest.raises(RunError, match=CHANGED):
            list(read)
        overwrite(path, contents[kind][0])


def test_compared_bytes_match_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(integrity, "BLOCK_BYTES", 7)
    rng, path = random.Random(1), tmp_path / "a"
    content = rng.randbytes(500)
    path.write_bytes(content)
    ranges = [(300, 377), (10, 50), (50, 51), (120, 120), (400, 500)]
    hasher = xxh3_128()
    with path.open("rb", buffering=0) as file:
        compared = VerifiedStream(file, ranges, hasher, "a")
        for _ in range(2000):
            start, size = rng.randrange(520), rng.randrange(60)
            compared.seek(start)
            assert compared.read(size) == content[start : start + size]
            assert compared.tell() == max(start, min(start + size, 500)) or start > 500
        compared.seek(290)
        assert compared.read() == content[290:]
    assert hasher.digest() == xxh3_128(b"".join(content[start:stop] for start, stop in ranges)).digest()


def test_changed_byte_is_rejected_by_every_read(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(1000))
    with path.open("r+b", buffering=0) as file:
        compared = VerifiedStream(file, [(100, 300), (600, 700)], xxh3_128(), "a")
        for place in (0, 99, 300, 599, 700):
            file.seek(place)
            file.write(b"x")
        compared.seek(0)
        assert compared.read(1000).count(b"x") == 5
        for place in (100, 299, 600, 699):
            file.seek(place)
            file.write(b"x")
            compared.seek(place)
            with pytest.raises(RunError, match=f"a: {CHANGED}"):
                compared.read(1)
            file.seek(place)
            file.write(b"\0")


def test_swapped_evaluations_are_rejected(tmp_path, contents):
    """What they share with documents would be recorded under the fingerprint of others."""
    path = source(tmp_path, "jsonl", contents)
    files = find_evaluations(Blend(datasets=[DataSource(name="a", path=str(path))]))
    overwrite(path, contents["jsonl"][1])
    with pytest.raises(RunError, match=CHANGED):
        load_evaluations(evaluations_from(json.loads(json.dumps(evaluation_records(files)))))
