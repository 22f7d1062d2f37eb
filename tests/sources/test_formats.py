"""The front door: whatever the file, every row is a text, a bad row or a blank, in order and counted."""

import errno
import gzip
import io
import itertools
import json
import os
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources import opening
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.sources.formats import count_rows, read_texts
from tokenmill.tasks.sources.opening import SourceCorrupt

from tests.flaky_storage import moto_here

LINES = [
    b'\xef\xbb\xbf{"text": "first"}',
    b'{"text": "second"}\r',
    b"",
    b'{"text": 3}',
    b'{"text": null}',
    b'{"text": "\xff"}',
    b'{"text": "\\ud800"}',
    b" \t",
    b'["text"]',
    b'{"body": "x"}',
    b'{"text": "unfinished',
    '{"text": "é語😀 \\u2028 \u2028"}'.encode(),
    b'{"text": ""}',
]
TEXTS = {0: "first", 1: "second", 11: "é語😀 \u2028 \u2028", 12: ""}
REASONS = "not_a_string null_text invalid_utf8 lone_surrogate not_an_object missing_field malformed_json"
BAD = dict(zip((3, 4, 5, 6, 8, 9, 10), REASONS.split(), strict=True))
BLANK = 2

ELEMENTS = b'[{"text": "first"}, {"text": 3},\n {"text": null}, 7, {"text": "\xff"}, {"text": "last]"}]'


def zstd(data):
    return pa.compress(data, "zstd", asbytes=True)


def whole(path, **description):
    size = path.stat().st_size
    return Slice(SourceFile(str(path), size, **{"format": "jsonl", **description}), 0, size)


def stored(path, content, **description):
    path.write_bytes(content)
    return whole(path, **description)


def read(part, text_field="text"):
    """Texts and reasons by row number, and how many rows were blank."""
    batches = list(read_texts(part, text_field))
    texts = {}
    reasons = {}
    consumed = 0
    for batch in batches:
        assert batch.texts.type == pa.large_string()
        assert batch.rows.dtype == np.int64
        numbers = [*batch.rows.tolist(), *(bad.row for bad in batch.bad)]
        assert len(set(numbers)) == len(numbers)
        assert all(consumed <= number < consumed + batch.consumed for number in numbers)
        consumed += batch.consumed
        texts |= dict(zip(batch.rows.tolist(), batch.texts.to_pylist(), strict=True))
        reasons |= {bad.row: bad.reason for bad in batch.bad}
    assert list(texts) == sorted(texts)
    return texts, reasons, consumed - len(texts) - len(reasons)


def every_kind(folder, lines=LINES, elements=ELEMENTS):
    """One slice of each kind of file, holding rows of every fate."""
    content = b"\n".join(lines)
    table = pa.table({"text": ["a", None, "b", "", None], "n": range(5)})
    return {
        "jsonl": stored(folder / "a.jsonl", content),
        "jsonl.gz": stored(folder / "a.jsonl.gz", gzip.compress(content), compression="gzip"),
        "jsonl.zst": stored(folder / "a.jsonl.zst", zstd(content), compression="zstd"),
        "json": stored(folder / "a.json", elements, format="json"),
        "json.gz": stored(folder / "a.json.gz", gzip.compress(elements), format="json", compression="gzip"),
        "parquet": stored_parquet(folder / "p.parquet", table, row_group_size=2),
    }


def stored_parquet(path, table, **options):
    pq.write_table(table, path, **options)
    return Slice(SourceFile(str(path), path.stat().st_size, "parquet"), 0, pq.read_metadata(path).num_row_groups)


KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "parquet"]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_lines_of_every_kind_are_accounted_for(tmp_path, kind):
    assert read(every_kind(tmp_path)[kind]) == (TEXTS, BAD, BLANK)


@pytest.mark.parametrize("kind", ["json", "json.gz"])
def test_elements_of_every_kind_are_accounted_for(tmp_path, kind):
    reasons = {1: "not_a_string", 2: "null_text", 3: "not_an_object", 4: "invalid_utf8"}
    assert read(every_kind(tmp_path)[kind]) == ({0: "first", 5: "last]"}, reasons, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_of_rows_is_kept_exactly_and_counting_agrees_with_reading(tmp_path, kind):
    part = every_kind(tmp_path)[kind]
    texts, reasons, blank = read(part)
    total = len(texts) + len(reasons) + blank
    assert count_rows(part, 1000) == total
    for rows in range(total + 2):
        limited = Slice(part.file, part.start, part.stop, rows=rows)
        some_texts, some_reasons, some_blank = read(limited)
        assert some_texts == {row: text for row, text in texts.items() if row < rows}
        assert some_reasons == {row: reason for row, reason in reasons.items() if row < rows}
        assert len(some_texts) + len(some_reasons) + some_blank == min(rows, total)
        assert count_rows(part, rows) == count_rows(limited, 1000) == min(rows, total)


def test_many_blocks_read_as_one(tmp_path):
    lines = [{"text": f"{number} " + "é" * (number % 5000)} for number in range(3000)]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines).encode()
    assert len(content) > 8 * opening.BLOCK_BYTES
    expected = {number: row["text"] for number, row in enumerate(lines)}
    assert read(stored(tmp_path / "a.jsonl", content)) == (expected, {}, 0)
    packed = gzip.compress(content, 1)
    assert read(stored(tmp_path / "a.jsonl.gz", packed, compression="gzip")) == (expected, {}, 0)
    assert read(stored(tmp_path / "a.json", json.dumps(lines).encode(), format="json")) == (expected, {}, 0)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_rows_gives_none(tmp_path, content):
    assert read(stored(tmp_path / "a", content)) == ({}, {}, content.count(b"\n"))


@pytest.mark.parametrize("level", [0, 9])
def test_content_that_ends_with_a_block_is_whole(tmp_path, level):
    line = json.dumps({"text": "x" * (opening.BLOCK_BYTES - 13)}).encode() + b"\n"
    assert len(line) == opening.BLOCK_BYTES
    texts, reasons, blank = read(stored(tmp_path / "a", gzip.compress(line * 2, level), compression="gzip"))
    assert ([len(text) for text in texts.values()], reasons, blank) == ([opening.BLOCK_BYTES - 13] * 2, {}, 0)


def frame(content, window_log):
    """A zstd frame of one raw block, whose header asks for a window of 2**window_log bytes (RFC 8878, 3.1.1)."""
    last_raw_block = (len(content) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3]) + last_raw_block + content


@pytest.mark.parametrize("window_log", [10, 27, 28, 30, 31])
def test_zstd_is_read_up_to_the_longest_window_that_its_tools_make(tmp_path, window_log):
    content = frame(b'{"text": "a"}\n{"te', 20) + frame(b'xt": "b"}\n', window_log)
    assert read(stored(tmp_path / "a", content, compression="zstd")) == ({0: "a", 1: "b"}, {}, 0)


def test_unusual_window_is_rejected_with_its_requirements(tmp_path):
    part = stored(tmp_path / "a.jsonl.zst", frame(b"{}", 32), compression="zstd")
    with pytest.raises(InputError, match=r"a\.jsonl\.zst: has a zstd window of more than 2,147,483,648 .*--long=31"):
        read(part)


@pytest.mark.parametrize("before", [b"", frame(b'{"text": "a"}\n', 20)])
def test_a_dictionary_that_is_needed_is_named(tmp_path, before):
    samples = [json.dumps({"text": f"row {number}" * 9}).encode() for number in range(999)]
    trained = zstandard.train_dictionary(1 << 10, samples)
    packed = zstandard.ZstdCompressor(dict_data=trained).compress(b'{"text": "row 5"}\n')
    part = stored(tmp_path / "a.jsonl.zst", before + packed, compression="zstd")
    with pytest.raises(InputError, match=rf"a\.jsonl\.zst: .*dictionary \(id {trained.dict_id()}\).*zstd -d -D"):
        read(part)


def test_frames_to_be_skipped_and_many_short_frames_are_read_over(tmp_path):
    skipped = b"\x50\x2a\x4d\x18\x05\0\0\0notes"
    rows = [b'{"text": "%d"}\n' % number for number in range(3000)]
    content = skipped + b"".join(zstd(row) + skipped for row in rows)
    texts, reasons, blank = read(stored(tmp_path / "a", content, compression="zstd"))
    assert (list(texts.values()), reasons, blank) == ([str(number) for number in range(3000)], {}, 0)


def test_a_bomb_is_decompressed_piece_by_piece():
    """Runs of one byte: 4 bytes of zstd for every 128 KiB."""
    run = (0x1FFFF << 3 | 2).to_bytes(3, "little") + b"\n"
    content = b"\x28\xb5\x2f\xfd\x00" + bytes([(27 - 10) << 3]) + run * 40_000 + (1).to_bytes(3, "little")
    tracemalloc.start()
    try:
        found = opening.blocks(SourceFile("a", len(content), "jsonl", "zstd"), io.BytesIO(content))
        assert sum(map(len, itertools.islice(found, 100))) == 100 * opening.BLOCK_BYTES
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_gzip_content_that_fails_its_checksum_is_corrupt(tmp_path):
    content = bytearray(gzip.compress(b'{"text": "a"}\n' * 100))
    content[-6] ^= 1
    with pytest.raises(SourceCorrupt, match="data check"):
        list(read_texts(stored(tmp_path / "a", bytes(content), compression="gzip"), "text"))


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_failed_downloads_are_not_reported_as_corruption(tmp_path, compression):
    for place, error in {tmp_path / "gone": FileNotFoundError, tmp_path: IsADirectoryError}.items():
        with pytest.raises(error):
            list(read_texts(Slice(SourceFile(str(place), 10, "jsonl", compression), 0, 10), "text"))


class FailingDisk(io.BytesIO):
    """A stream that breaks off with an error of the machine, not of the content."""

    def read(self, size=-1):
        if self.tell() > 0:
            raise OSError(errno.EREMOTEIO, "remote I/O error")
        return super().read(size)


def test_a_disk_that_fails_under_a_compressed_file_is_not_called_corrupt():
    content = gzip.compress(os.urandom(1 << 20))
    file = SourceFile("a.gz", len(content), "jsonl", "gzip")
    with pytest.raises(OSError, match="remote I/O error") as error:
        list(opening.blocks(file, FailingDisk(content)))
    assert error.value.errno == errno.EREMOTEIO


@pytest.fixture(scope="module")
def bucket():
    with moto_here():
        fsspec.filesystem("s3").mkdir("test-read")
        yield "s3://test-read"


def uploaded(part, folder):
    """The same slice of a copy of its file."""
    uri = f"{folder}/{Path(part.file.uri).name}"
    with fsspec.open(uri, "wb") as remote:
        remote.write(Path(part.file.uri).read_bytes())
    return replace(part, file=replace(part.file, uri=uri))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_in_an_object_store_reads_as_the_local_one_does(tmp_path, bucket, kind):
    part = every_kind(tmp_path)[kind]
    assert read(uploaded(part, bucket)) == read(uploaded(part, "memory://test-read")) == read(part)


def test_slices_of_a_large_object_match_the_local_file(tmp_path, bucket):
    rows = [{"text": f"{number} " + "é" * (number % 5000)} for number in range(3000)]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    local = stored(tmp_path / "large.jsonl", content)
    assert local.file.size > opening.REMOTE_BLOCK_BYTES
    remote = uploaded(local, bucket)
    for start, stop in pairwise([0, 5_000_000, 5_000_001, local.file.size]):
        assert read(replace(remote, start=start, stop=stop)) == read(replace(local, start=start, stop=stop))


@pytest.mark.parametrize("format_name", ["jsonl", "parquet"])
def test_a_missing_object_is_not_called_corrupt(bucket, format_name):
    with pytest.raises(FileNotFoundError):
        list(read_texts(Slice(SourceFile(f"{bucket}/gone", 10, format_name), 0, 1), "text"))
