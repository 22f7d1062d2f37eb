"""Lineage in Weights & Biases, offline: what the run's own file says of it."""

import json
import struct
import time
from pathlib import Path

import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.weights_and_biases import artifact_name, log_if_asked, log_preparation

from tests.preparing import blend_of, prepare, write_lines

BLOCK, HEADER = 32 * 1024, 7
FULL, FIRST, LAST = 1, 2, 4


def records(file):
    """The records of a .wandb file: seven bytes of its own, then LevelDB's log format, each a protobuf message."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415 - takes a second to import

    data, at, gathered = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if at + HEADER + length > len(data):
            return  # still being written
        piece, at = data[at + HEADER : at + HEADER + length], at + HEADER + length
        gathered = piece if kind in {FULL, FIRST} else gathered + piece
        if kind in {FULL, LAST}:
            record = Record()
            record.ParseFromString(gathered)
            yield record


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A preparation of two datasets, and the records of the run that logged it."""
    folder = tmp_path_factory.mktemp("logged")
    paths = [write_lines(folder / f"{name}.jsonl", ["some text", "and more"]) for name in "ab"]
    _, manifest = prepare(blend_of(*paths), folder / "out", tokenizer={"model": "cl100k_base"})
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for name, value in {"PROJECT": "mill", "MODE": "offline", "SILENT": "true", "DIR": str(folder)}.items():
            patched.setenv(f"WANDB_{name}", value)
        log_if_asked(manifest, str(folder / "out"), pytest.fail)
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    return folder, manifest, ended(file)


def ended(file):
    """The records, once the last is there: wandb's own process writes them, and has its own pace."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = list(records(file))
        if found and found[-1].HasField("exit"):
            return found
        time.sleep(0.01)
    raise AssertionError("the run has not ended")


@pytest.mark.slow
def test_datasets_tokenizer_and_output_are_artifacts(logged):
    folder, _, written = logged
    found = {}
    for record in written:
        if record.HasField("artifact"):
            found.setdefault(record.artifact.type, []).append(record.artifact)
    counts = {kind: len(each) for kind, each in found.items() if not kind.startswith("run")}
    assert counts == {"dataset": 2, "tokenizer": 1, "pretrain": 1}
    (output,) = found["pretrain"]
    entries = {entry.path: entry for entry in output.manifest.contents}
    assert set(entries) == {"blend.json", "manifest.json", "location"}
    assert entries["location"].ref == f"file://{folder / 'out/manifest.json'}"
    references = {entry.ref for data_set in found["dataset"] for entry in data_set.manifest.contents}
    assert references == {f"file://{folder / name}.jsonl" for name in "ab"}
    assert json.loads(found["tokenizer"][0].metadata)["model"] == "cl100k_base"


@pytest.mark.slow
def test_the_summary_has_the_totals(logged):
    _, manifest, found = logged
    items = [item for record in found if record.HasField("summary") for item in record.summary.update]
    summary = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
    for name in ("rows", "documents", "tokens"):
        assert summary[name] == manifest["totals"][name]


@pytest.mark.slow
def test_tables_have_plan_and_result(logged):
    folder, manifest, _ = logged
    tables = {}
    for file in folder.glob("wandb/offline-run-*/files/media/table/pretrain/*.table.json"):
        table = json.loads(file.read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        tables[file.name.partition("_table")[0]] = rows
    planned = [(row["dataset_name"], row["path"], row["num_shards"]) for row in tables["plan"]]
    assert planned == [(name, f"{folder}/{name}.jsonl", 1) for name in "ab"]
    (stage,) = tables["stage"]
    assert (stage["stage"], stage["tasks"], stage["built"], stage["reused"]) == ("pretrain", 1, 1, 0), "equal files"
    assert stage["seconds"] == pytest.approx(manifest["volatile"]["seconds"])
    assert stage["speed"] * stage["seconds"] == pytest.approx(stage["built"])
    assert sum(row["total_tokens"] for row in tables["progress"]) == manifest["totals"]["tokens"]
    assert [row["status"] for row in tables["progress"]] == ["completed", "completed"]
    assert [row["size"] for row in tables["plan"]] == [(folder / f"{name}.jsonl").stat().st_size for name in "ab"]


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("hf://org/name@main", "org-name-main"),
        ("s3://bucket/a b/*.jsonl", "bucket-a-b-.jsonl"),
        ("/data/x.jsonl", "data-x.jsonl"),
    ],
)
def test_a_uri_becomes_a_name_that_is_allowed(uri, name):
    assert artifact_name(uri) == name
    assert len(artifact_name("x" * 500)) == 128


def test_missing_wandb_names_the_remedy(logged, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'wandb>="):
        log_preparation(logged[1], str(Path("/out")))
