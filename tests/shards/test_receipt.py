"""A receipt proves its own shard, whole and balanced, or nothing."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.shards.receipt import InvalidReceiptError, PartCount, Receipt, shard_key
from tokenmill.tasks.shards.store import Store

IDENTITY = {"kind": "pretrain", "format_version": 1, "recipe": {"bos": None}, "source": {"content": "xxh3_128:00"}}
CONTENT = b"tokens of a shard"

counts = st.integers(0, 2**40)
parts = st.dictionaries(st.sampled_from(["all", "train", "valid", "test"]), st.builds(PartCount, counts, counts))
flat = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(0, 2**53), st.text(max_size=5)))
drops = st.dictionaries(st.sampled_from(["blank_line", "malformed_json", "null_text"]), counts)


def receipt(parts=None, drops=None, **changed):
    parts = {"all": PartCount(3, 40)} if parts is None else parts
    drops = {"blank_line": 2} if drops is None else drops
    rows = sum(part.documents for part in parts.values()) + sum(drops.values())
    fields = {"outputs": [Output("all.bin", len(CONTENT), "00")], "rows_in": rows, "quarantined": 0, "truncated": 0}
    return Receipt(
        **{"key": shard_key(IDENTITY), "identity": IDENTITY, "parts": parts, "drops": drops, **fields, **changed}
    )


@pytest.fixture
def store(tmp_path):
    """A store with one proven shard."""
    store = Store(str(tmp_path), "pretrain")
    output = publish_bytes(store.path(shard_key(IDENTITY), "all.bin"), CONTENT)
    proof = receipt(outputs=[replace(output, path="all.bin")])
    publish_bytes(store.path(proof.key, "receipt.json"), proof.dump())
    return store


KEY = shard_key(IDENTITY)


@given(parts, drops, flat, st.dictionaries(st.sampled_from(["train", "oversize"]), st.one_of(counts, flat)))
def test_a_receipt_is_read_as_it_was_written(parts, drops, volatile, facts):
    volatile.pop("seal", None)
    written = receipt(parts, drops, volatile=volatile, facts=facts)
    assert Receipt.load(written.dump()) == written


@pytest.mark.parametrize("facts", [{}, {"train": {"packs": 3}, "oversize": 1}])
def test_a_receipt_is_plain_json_with_its_times_and_seal_apart(facts):
    fields = json.loads(receipt(volatile={"seconds": 1.5}, facts=facts).dump())
    volatile = fields.pop("volatile")
    assert fields == {
        name: value
        for name, value in asdict(receipt(facts=facts)).items()
        if name != "volatile" and (facts or name != "facts")
    }
    assert set(volatile) == {"seconds", "seal"}


@given(parts, drops, st.integers(-(2**40), 2**40).filter(bool))
def test_a_receipt_that_loses_or_invents_a_row_cannot_be_made(parts, drops, error):
    balanced = receipt(parts, drops)
    with pytest.raises(InvalidReceiptError, match="rows went in"):
        replace(balanced, rows_in=balanced.rows_in + error)


@pytest.mark.parametrize(
    "changed",
    [
        {"rows_in": 6},
        {"rows_in": "5"},
        {"rows_in": None},
        {"drops": {}},
        {"drops": None},
        {"drops": {"blank_line": "2"}},
        {"parts": {"all": {"documents": 4, "tokens": 40}}},
        {"parts": {"all": {"documents": 3}}},
        {"parts": {"all": 3}},
        {"parts": []},
        {"key": "0" * 32},
        {"identity": {**IDENTITY, "format_version": 2}},
        {"outputs": [{"path": "all.bin"}]},
        {"outputs": None},
        {"facts": None},
        {"facts": [3]},
        {"unknown": 1},
    ],
    ids=str,
)
def test_wrong_counts_and_foreign_keys_are_rejected_despite_a_seal(changed):
    with pytest.raises(InvalidReceiptError):
        Receipt.load(sealed({**unsealed(receipt().dump()), **changed}))


def test_flipped_bits_truncation_and_other_content_are_seen():
    data = receipt(volatile={"host": "here", "seconds": 1.0}).dump()
    others = [b"[]", b"null", b"1", b"{}", b'{"volatile": 1}', b"\xff\xfe", b"\x00" * 300]
    flipped = (
        data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]
        for place in range(len(data))
        for mask in (1, 2, 0x20, 0x80)
    )
    for damaged in [*flipped, *(data[:length] for length in range(len(data))), *others]:
        with pytest.raises(InvalidReceiptError):
            Receipt.load(damaged)


def test_a_shard_with_its_receipt_and_outputs_is_proven(store):
    assert store.receipt(KEY) is not None
    assert set(store.proven([KEY, "f" * 32, KEY])) == {KEY}


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", b"", None])
def test_shard_with_changed_output_is_not_verified(store, content):
    output = Path(store.path(KEY, "all.bin"))
    output.unlink()
    if content is not None:
        output.write_bytes(content)
    assert store.receipt(KEY) is None
    assert store.proven([KEY]) == {}


def test_an_issued_receipt_is_found_with_its_facts(store):
    output = Output(store.path(KEY, "all.bin"), len(CONTENT), "00")
    facts = {"all": {"packs": 2, "loss_tokens": 17}, "oversize": 0}
    issued = store.issue(IDENTITY, outputs=[output], rows_in=3, parts={"all": PartCount(3, 40)}, drops={}, facts=facts)
    assert issued.facts == facts
    assert store.receipt(KEY) == Receipt.load(issued.dump()) == replace(store.receipt(KEY), facts=facts)


def test_receipt_in_a_wrong_folder_is_ignored(store):
    foreign = "e" * 32
    for name in ("receipt.json", "all.bin"):
        publish_bytes(store.path(foreign, name), Path(store.path(KEY, name)).read_bytes())
    assert store.receipt(foreign) is None


def test_withdrawing_twice_is_fine(store):
    store.withdraw(KEY)
    store.withdraw(KEY)
    assert store.receipt(KEY) is None
    assert Path(store.path(KEY, "all.bin")).exists()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), PermissionError(13, "Permission denied")])
@pytest.mark.parametrize("call", ["cat_file", "info"])
def test_a_failing_disk_is_an_error_and_not_an_unproven_shard(store, monkeypatch, call, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(LocalFileSystem, call, fail)
    with pytest.raises(OSError, match=error.strerror):
        store.receipt(KEY)
    with pytest.raises(OSError, match=error.strerror):
        store.proven([KEY])
