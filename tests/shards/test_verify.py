"""Verification names every damaged file, and the next run rebuilds exactly those."""

import json
import os
from dataclasses import asdict

import fsspec
import pytest
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.identity import shard_key
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.tokenize.preparation import inspect_pretrain_shard

from tests.preparing import blend_of, prepare, tree, write_lines
from tests.shards.damage import DAMAGES, flip, proofs

TEXTS = [f"document {number} says hello to the {number * 7919 % 1000}th world" for number in range(120)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, vocabulary):
    """A preparation with three shards, held-out documents and a quarantine, to be repeated at will."""
    folder = tmp_path_factory.mktemp("prepared")
    paths = [
        write_lines(folder / "a.jsonl", [*TEXTS[:60], b"broken", *TEXTS[60:90]]),
        write_lines(folder / "b.jsonl", [*TEXTS[90:], b'{"text": null}']),
    ]
    for path in paths:
        os.utime(path, (1_000_000_000, 1_000_000_000))

    def again():
        settings = {"tokenizer": {"model": str(vocabulary)}, "shard_size": 4000, "holdout": {"valid": 0.2, "test": 0}}
        return prepare(blend_of(*paths), folder / "out", **settings)[0]

    again()
    return folder / "out", again, tree(folder / "out")


def check(out):
    return verify(str(out), inspect_pretrain_shard)


def test_a_whole_preparation_has_no_problems(prepared):
    out, again, _ = prepared
    plan = again()
    verification = check(out)
    assert verification.problems == []
    assert verification.withdrawn == []
    assert len(plan.plan.shards) == 3
    assert verification.shards == 3 + 4, "and a prefix for each data set and split"
    stored = [path for path in proofs(out) if path.is_relative_to(out / "shards")]
    assert verification.files == len(stored)
    assert verification.size == sum(path.stat().st_size for path in stored if path.name != "receipt.json")


def rewritten(path, **changed):
    path.write_bytes(sealed({**unsealed(path.read_bytes()), **changed}))


@pytest.mark.slow
def test_cooked_books_with_a_good_seal_are_refused(prepared):
    out, again, whole = prepared
    path = next(path for path in proofs(out) if path.name == "receipt.json" and b"malformed_json" in path.read_bytes())
    assert path.parent.parent.name == "pretrain"
    fields = unsealed(path.read_bytes())
    train = fields["parts"]["train"]
    fewer = {**fields["parts"], "train": {**train, "documents": train["documents"] - 1}}
    cooked = [
        {"parts": fewer, "drops": {"malformed_json": 2}},
        {"parts": fewer, "rows_in": fields["rows_in"] - 1},
        {"parts": {**fields["parts"], "train": {**train, "tokens": train["tokens"] + 1}}},
        {"parts": {"valid": fields["parts"]["valid"]}, "rows_in": fields["rows_in"] - train["documents"]},
        {"drops": {"blank_line": 1}},
        {"quarantined": 0},
        {"truncated": 3},
        {"rows_in": fields["rows_in"] + 1},
        {"outputs": [{**output, "size": 3} for output in fields["outputs"]]},
        {"outputs": [{**output, "xxh3_128": "00"} for output in fields["outputs"]]},
        {"outputs": [output for output in fields["outputs"] if not output["path"].startswith("valid")]},
        {"outputs": []},
        {"facts": {"train": {"packs": 1}}},
    ]
    for change in cooked:
        rewritten(path, **change)
        verification = check(out)
        assert any(str(path.parent) in problem for problem in verification.problems), change
        assert verification.withdrawn == [path.parent.name]
        assert [shard.key for shard in again().plan.pending] == [path.parent.name]
        assert tree(out) == whole


def test_a_manifest_that_promises_other_books_is_not_believed(prepared):
    out, again, whole = prepared
    manifest = unsealed((out / "manifest.json").read_bytes())
    promises = [{"rows": 7}, {"documents": {"train": 1}}, {"tokens": {}}, {"drops": {"x": 1}}, {"quarantined": 9}]
    for change in [*promises, {"facts": {"x": 1}}]:
        shards = [{**manifest["shards"][0], **change}, *manifest["shards"][1:]]
        rewritten(out / "manifest.json", shards=shards)
        assert any(f"{next(iter(change))} are" in problem for problem in check(out).problems)
        again()
        assert tree(out) == whole


def test_a_shard_that_fails_loses_its_receipt_and_no_other_does(prepared):
    out, again, _ = prepared
    damaged = next((out / "shards").glob("pretrain/*/train.idx"))
    flip(damaged, 5)
    assert check(out).withdrawn == [damaged.parent.name]
    assert {path.parent.name for path in (out / "shards").glob("pretrain/*/receipt.json")} == {
        path.name for path in (out / "shards" / "pretrain").iterdir()
    } - {damaged.parent.name}
    assert any("receipt.json: missing" in problem for problem in check(out).problems)
    again()
    assert check(out).problems == []


def test_a_folder_without_a_manifest_is_a_wrong_call(tmp_path):
    with pytest.raises(InputError, match=r"no manifest\.json here"):
        check(tmp_path)
    (tmp_path / "manifest.json").write_bytes(sealed({"volatile": {}}))
    with pytest.raises(InputError, match="not the manifest of a preparation"):
        check(tmp_path)


def test_a_copy_that_says_nothing_of_its_shards_is_a_wrong_call(prepared, tmp_path):
    manifest = unsealed((prepared[0] / "manifest.json").read_bytes())
    del manifest["volatile"]["store"]
    (tmp_path / "manifest.json").write_bytes(sealed(manifest))
    with pytest.raises(InputError, match="a copy without its shards"):
        check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, -1])
def test_damage_on_an_object_store_is_named_and_mended(vocabulary, place):
    system = fsspec.filesystem("memory")
    system.store.clear()
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in [*TEXTS, 5])
    system.pipe_file("/bucket/in/a.jsonl", lines)
    blend = {"datasets": [{"name": "a", "path": "memory://bucket/in"}]}
    out = "memory://bucket/out"

    def again():
        return prepare(blend, out, tokenizer={"model": str(vocabulary)}, shard_size=2000)[0]

    assert len(again().plan.shards) > 2
    assert check(out).problems == []
    for path in system.find("/bucket/out"):
        if "manifest" in path or "/gates/" in path:
            continue
        content = bytearray(system.cat_file(path))
        concerned = concerned_by_damage(system, path, place)
        content[place] ^= 1
        system.pipe_file(path, bytes(content))
        assert any(problem.startswith(f"memory:/{path}") for problem in check(out).problems), path
        assert {shard.key for shard in again().plan.pending} == concerned
        assert check(out).problems == []
    system.store.clear()


def concerned_by_damage(system, path, place):
    """The shards to build again after damage to the first or last byte of an object; a `.idx` is computed again."""
    folder, name = path.split("/")[-3], path.split("/")[-1]
    if folder == "prefix" and not name.endswith(".idx"):
        receipt = Receipt.load(system.cat_file(f"{path.rpartition('/')[0]}/receipt.json"))
        keys = [member.partition("/")[0] for member in receipt.identity["source"]["members"]]
        return set(keys) if name == "receipt.json" else {keys[place]}
    return {path.split("/")[-2]} if folder == "pretrain" else set()


def test_a_verification_is_plain_figures(prepared):
    out, _, _ = prepared
    assert json.loads(json.dumps(asdict(check(out))))["problems"] == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_is_read_as_its_receipt_vouches_for_it_or_not_at_all(tmp_path, damage):
    store, identity = Store(str(tmp_path), "pretrain"), {"kind": "pretrain", "source": {"content": "a"}}
    path = tmp_path / "pretrain" / shard_key(identity) / "rows.txt"
    outputs = [publish_bytes(str(path.with_name(name)), b"some rows") for name in ("rows.txt", "other.txt")]
    receipt = store.issue(identity, outputs=outputs, rows_in=0, parts={}, drops={})
    assert store.read(receipt, "rows.txt") == b"some rows"
    DAMAGES[damage](path)
    assert store.read(receipt, "other.txt") == b"some rows"
    words = "missing" if damage == "deleted" else "damaged"
    with pytest.raises(
        RunError, match=f"{path}: {words} since it was built; its receipt is withdrawn, so run the same"
    ):
        store.read(receipt, "rows.txt")
    assert not path.with_name("receipt.json").exists()
    assert store.receipt(receipt.key) is None
    with pytest.raises(RunError):
        store.read(receipt, "rows.txt")
