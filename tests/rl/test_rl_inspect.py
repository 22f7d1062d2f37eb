"""Verification of rows: a file that holds anything but objects is named."""

import pytest
import zstandard
from tokenmill.tasks.rl.kind import RL
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import PartCount
from tokenmill.tasks.shards.store import Store

ENDINGS = {"none": "jsonl", "zstd": "jsonl.zst"}
PACK = {"none": bytes, "zstd": zstandard.ZstdCompressor(write_checksum=True).compress}


def proven(folder, content, documents, compression="none"):
    """A store, and the receipt of a shard whose one file holds `content`, whatever that is."""
    store = Store(str(folder / "store"), "rl")
    identity = {
        "kind": "rl",
        "format_version": 1,
        "recipe": {"compression": compression},
        "source": {"content": "some"},
    }
    receipt = store.issue(identity, outputs=[], rows_in=documents, parts={"all": PartCount(documents, 0)}, drops={})
    publish_bytes(store.path(receipt.key, f"all.{ENDINGS[compression]}"), content)
    return store, receipt


def problems(folder, content, documents, compression="none"):
    store, receipt = proven(folder, content, documents, compression)
    place = store.path(receipt.key, f"all.{ENDINGS[compression]}")
    found = RL.inspect(store, receipt)
    assert all(problem.startswith(f"{place}: ") for problem in found)
    return [problem.removeprefix(f"{place}: ") for problem in found]


@pytest.mark.parametrize("compression", ENDINGS)
@pytest.mark.parametrize(
    ("content", "documents"),
    [(b'{"a": 1}\n{}\n', 2), (b' {"a": "\\u2028 \xe2\x80\xa8"}\r\n', 1), (b'{"a": "' + b"x" * 3_000_000 + b'"}\n' + b"{}\n" * 9, 10)],
    ids=["two", "blanks", "a row longer than a block"],
)  # fmt: skip
def test_object_rows_lack_problems(tmp_path, compression, content, documents):
    assert problems(tmp_path, PACK[compression](content), documents, compression) == []


@pytest.mark.parametrize("compression", ENDINGS)
@pytest.mark.parametrize(
    "line", [b"[1]", b"", b" ", b"7", b'"text"', b"null", b'{"a": 1', b'{"a": "\xff"}', b"{}{}", b"{}\x00"]
)
def test_non_object_line_is_named(tmp_path, compression, line):
    content = PACK[compression](b'{"a": 1}\n' * 1200 + line + b"\n{}\n")
    assert problems(tmp_path, content, 1202, compression) == ["line 1,201 is not a JSON object"]


@pytest.mark.parametrize("compression", ENDINGS)
def test_row_count_differs_from_the_receipt(tmp_path, compression):
    content = PACK[compression](b"{}\n" * 1500)
    for documents in (1499, 1501):
        found = problems(tmp_path / f"{documents}", content, documents, compression)
        assert found == [f"holds 1,500 lines, but its receipt records {documents:,}"]


def test_a_frame_that_is_cut_short_or_garbled_or_none_at_all_is_named(tmp_path):
    whole = PACK["zstd"](b"".join(b'{"a": %d}\n' % number for number in range(2000)))
    garbled = whole[:40] + bytes([whole[40] ^ 0x55]) + whole[41:]
    for number, content in enumerate((whole[:-20], garbled, b"{}\n" * 2000, whole[:-1])):
        (found,) = problems(tmp_path / f"{number}", content, 2000, "zstd")
        assert "cannot be read" in found or "receipt says" in found or "not a JSON object" in found
