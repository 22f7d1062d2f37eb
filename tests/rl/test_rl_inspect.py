"""Verification of rows: a file that holds anything but objects is told apart, and a damaged one is built again."""

import os

import orjson
import pytest
import zstandard
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.rl.shard import inspect_rl_shard
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import PartCount
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify

from tests.preparing import blend_of, tree
from tests.preparing_rl import prepare, write_rows

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
    found = inspect_rl_shard(store, receipt)
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


def corpus(folder):
    rows = [{"id": number, "text": f"text {number * 7919 % 1000}"} for number in range(90)]
    paths = [
        write_rows(folder / "a.jsonl", [*rows[:30], b"broken", *rows[30:70]]),
        write_rows(folder / "b.jsonl", [*rows[70:], b"[]"]),
    ]
    for path in paths:
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return paths


@pytest.fixture(scope="module", params=ENDINGS)
def whole(request, tmp_path_factory):
    """A preparation with three shards, two of a dataset that is split in two, and a quarantine, to be repeated at will."""
    folder = tmp_path_factory.mktemp("prepared")
    paths = corpus(folder)
    settings = {"shard_size": 2000, "holdout": {"valid": 0.25, "test": 0}, "compression": request.param}

    def again():
        return prepare(blend_of(*paths), folder / "out", **settings)[0]

    again()
    return folder / "out", again, tree(folder / "out")


def check(out):
    return verify(str(out), inspector_of(str(out)))


def test_a_file_that_is_whole_but_no_rows_costs_its_shard(whole):
    """A writer that went wrong leaves hashes that agree; only a look inside tells."""
    out, again, expected = whole
    plan = again()
    store, (shard, *_) = plan.plan.store, plan.plan.shards
    receipt = store.receipt(shard.key)
    name = next(output.path for output in receipt.outputs if output.path.startswith("train."))
    compression = receipt.identity["recipe"]["compression"]
    content = PACK[compression](orjson.dumps([1]) + b"\n" + b"{}\n" * (receipt.parts["train"].documents - 1))
    outputs = [output for output in receipt.outputs if output.path != name]
    store.issue(
        receipt.identity, outputs=[*outputs, publish_bytes(store.path(shard.key, name), content)],
        rows_in=receipt.rows_in, parts=receipt.parts, drops=receipt.drops, quarantined=receipt.quarantined,
        truncated=receipt.truncated, facts=receipt.facts,
    )  # fmt: skip
    found = check(out)
    assert f"{store.path(shard.key, name)}: line 1 is not a JSON object" in found.problems
    assert found.withdrawn == [shard.key]
    assert [shard.key for shard in again().plan.pending] == [shard.key]
    assert tree(out) == expected
