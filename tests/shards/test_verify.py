"""Verification names every damaged file, and the next run rebuilds exactly those."""

import json
import os
import signal

import pytest
from dask import config as dask_config
from distributed import LocalCluster
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.report.verification import verified
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards import verify as verification_of_shards
from tokenmill.tasks.shards import workers
from tokenmill.tasks.shards.executor import run_here
from tokenmill.tasks.shards.manifest import stored_entries
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import shard_key
from tokenmill.tasks.shards.settings import ClusterSettings
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.shards.workers import calls_on_workers
from tokenmill.tasks.tokenize.kind import PRETRAIN

from tests.preparing import blend_of, prepare, tree, write_lines
from tests.shards.damage import DAMAGES, flip, proofs, replaced, truncate

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
    return verify(str(out), PRETRAIN.inspect)


def test_intact_preparation_lacks_problems(prepared):
    out, again, _ = prepared
    plan = again()
    verification = check(out)
    assert verification.problems == []
    assert verification.withdrawn == []
    assert len(plan.plan.shards) == 3
    assert verification.shards == 3 + 4, "and a prefix for each dataset and split"
    stored = [path for path in proofs(out) if path.is_relative_to(out / "shards")]
    assert verification.files == len(stored)
    assert verification.size == sum(path.stat().st_size for path in stored if path.name != "receipt.json")


@pytest.mark.parametrize(
    ("own", "kind", "folder"),
    [("harmony", "harmony-selection", "harmony"), ("pretrain", "prefix", "prefix"), ("my-rows", "my-rows", "my-rows")],
)
def test_shards_are_in_the_folder_of_their_stage(own, kind, folder):
    manifest = {"type": own, "volatile": {"store": "/s"}, "recipes": [{"kind": kind}], "shards": [{"recipe": 0}]}
    ((store, _),) = stored_entries(manifest)
    assert store.kind == folder


def test_problems_that_a_kind_finds_are_listed(prepared):
    out, again, whole = prepared
    keys = again().plan.keys
    found = verify(str(out), lambda _, receipt: [f"{receipt.key} is odd"])
    assert {*found.problems} >= {f"{key} is odd" for key in keys}
    assert not any((out / f"shards/pretrain/{key}/receipt.json").exists() for key in keys), (
        "so that they are built again"
    )
    again()
    assert tree(out).keys() == whole.keys()


def rewritten(path, **changed):
    path.write_bytes(sealed({**unsealed(path.read_bytes()), **changed}))


@pytest.mark.slow
def test_wrong_counts_with_a_seal_are_rejected(prepared):
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


@pytest.fixture
def damaged(prepared, tmp_path, monkeypatch):
    """The preparation, its damaged files, and a function that undoes what a verification removes."""
    out, again, whole = prepared
    monkeypatch.setattr(verification_of_shards, "BATCH_BYTES", 1)
    shard, other, *_ = sorted((out / "shards/pretrain").iterdir())
    flipped = [next((out / "shards/prefix").glob(f"*/{name}")) for name in ("train.bin", "valid.idx")]
    truncated, missing, copy = shard / "receipt.json", other / "receipt.json", next((out / "train").glob("*.idx"))
    for path in flipped:
        flip(path, 40)
    truncate(truncated, 50)
    missing.unlink()
    replaced(copy, copy.read_bytes()[:-1] + b"\xfe")
    kept = {tmp_path / str(number): path for number, path in enumerate(proofs(out))}
    for link, path in kept.items():
        link.hardlink_to(path)

    def damage_again():
        for link, path in kept.items():
            if not path.exists():
                path.hardlink_to(link)

    yield out, [*flipped, truncated, missing, copy], damage_again
    check(out)
    again()
    assert tree(out) == whole


def local(**options):
    return LocalCluster(**options, threads_per_worker=1, dashboard_address=None, host="127.0.0.1")


@pytest.mark.slow
def test_workers_find_the_same_problems_in_the_same_order(damaged, tmp_path):
    out, paths, damage_again = damaged
    (tmp_path / "profile.yaml").write_text(
        "cluster_class: distributed.LocalCluster\ncluster_kwargs: {n_workers: 1, dashboard_address: ':0'}\n"
    )
    expected = check(out)
    assert [path for path in paths if not any(str(path) in problem for problem in expected.problems)] == []
    removed = set(proofs(out))
    with local(n_workers=2, processes=False, protocol="tcp") as standing:
        for settings in (
            {"workers": 1}, {"workers": 2}, {"cluster": standing.scheduler_address}, {"cluster": str(tmp_path / "profile.yaml")},
        ):  # fmt: skip
            damage_again()
            assert verified(str(out), ClusterSettings(**settings)) == expected, settings
            assert set(proofs(out)) == removed


def test_nothing_is_withdrawn_before_all_have_answered(damaged):
    out, *_ = damaged
    before = proofs(out)

    def run_all(name, function, calls):
        if name == "verify-copies":
            raise RunError("lost")
        return run_here(name, function, calls)

    with pytest.raises(RunError, match="lost"):
        verify(str(out), PRETRAIN.inspect, lambda _: run_all)
    assert proofs(out) == before


def end_the_worker(_store, _receipt):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_lost_workers_and_workers_of_other_code_withdraw_nothing(damaged, monkeypatch):
    out, *_ = damaged
    before = proofs(out)
    monkeypatch.setattr(verification_of_shards, "BATCH_BYTES", 1 << 30)
    with dask_config.set({"distributed.scheduler.allowed-failures": 0}), local(n_workers=1) as standing:
        settings = ClusterSettings(cluster=standing.scheduler_address)
        with monkeypatch.context() as patch:
            patch.setattr(workers, "built_with", lambda *_: {"tokenmill": "0.0.1+1234abcd"})
            with pytest.raises(InputError, match=r"1 of 1 workers, on \S+, would build other data: tokenmill"):
                verified(str(out), settings)
        with (
            calls_on_workers(settings, __name__) as run_all,
            pytest.raises(RunError, match=r"tasks failed: verify-shards .*: KilledWorker: 1 workers in a row ended"),
        ):
            verify(str(out), end_the_worker, lambda _: run_all)
    assert proofs(out) == before


def test_late_worker_with_other_code_does_not_check():
    with pytest.raises(RunError, match=r"this worker would build other data: tokenmill \S+ \(in the run 0\.0\.1\)"):
        workers._call(__name__, {"tokenmill": "0.0.1"}, print, {})  # noqa: SLF001 - what a worker is sent


def test_a_folder_without_manifest_or_shards_is_a_wrong_call(prepared, tmp_path):
    with pytest.raises(InputError, match=r"no manifest\.json here"):
        check(tmp_path)
    copied = unsealed((prepared[0] / "manifest.json").read_bytes())
    del copied["volatile"]["store"]
    for manifest, words in (({"volatile": {}}, "not the manifest of a prep"), (copied, "a copy without its shards")):
        (tmp_path / "manifest.json").write_bytes(sealed(manifest))
        with pytest.raises(InputError, match=words):
            check(tmp_path)


@pytest.mark.slow
def test_damage_on_an_object_store_is_named_and_repaired(vocabulary, memory):
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in [*TEXTS, 5])
    memory.pipe_file("/bucket/in/a.jsonl", lines)
    blend = {"datasets": [{"name": "a", "path": "memory://bucket/in"}]}
    out = "memory://bucket/out"

    def again():
        return prepare(blend, out, tokenizer={"model": str(vocabulary)}, shard_size=2000)[0].plan

    assert len(again().shards) > 2
    assert check(out).problems == []
    for path in [path for path in memory.find("/bucket/out") if "manifest" not in path and "/gates/" not in path]:
        content = bytearray(memory.cat_file(path))
        content[0] ^= 1
        memory.pipe_file(path, bytes(content))
        assert any(problem.startswith(f"memory:/{path}") for problem in check(out).problems), path
        folder, key, _ = path.split("/")[-3:]
        assert {shard.key for shard in again().pending} == {key} or folder != "pretrain"
        assert check(out).problems == []


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
