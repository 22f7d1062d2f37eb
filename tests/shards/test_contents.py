"""Content that a blend reads more than once."""

import gzip
import io
import json
import shutil

import pytest
from rich.console import Console
from tokenmill.tasks.report.plan import plan_record, print_plan
from tokenmill.tasks.report.summary import artifact_record, print_summary, warnings
from tokenmill.tasks.shards.kinds import KINDS

from tests.building import plan_here
from tests.preparing import prepare, write_lines

ROWS = [f"document {number}" for number in range(20)]
COPIES = "the same content is read"


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "a.jsonl", ROWS)
    write_lines(tmp_path / "other.jsonl", ["another document"] * 40)
    (tmp_path / "f").mkdir()
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "f/copy.jsonl")
    shutil.copy(tmp_path / "other.jsonl", tmp_path / "f/other.jsonl")
    shutil.copytree(tmp_path / "f", tmp_path / "g/f")
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "g/third.jsonl")
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes(), mtime=0))
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "reads"),
    [
        ([{"path": "a.jsonl"}, {"path": "other.jsonl"}], []),
        ([{"path": "a.jsonl"}, {"path": "a.jsonl"}], [{0: 1, 1: 1}]),
        ([{"path": "a.jsonl"}, {"path": "f/copy.jsonl", "weight": 3.0}], [{0: 1, 1: 1}]),
        ([{"path": "a.jsonl"}, {"path": "f"}, {"path": "other.jsonl"}], [{0: 1, 1: 1}, {1: 1, 2: 1}]),
        ([{"path": "g"}], [{0: 2}]),
        ([{"path": "a.jsonl"}, {"path": "g"}], [{0: 1, 1: 2}]),
        ([{"path": "packed.jsonl.gz"}, {"path": "packed.jsonl.gz", "domain": "web"}], [{0: 1, 1: 1}]),
        ([{"path": "a.jsonl"}, {"path": "a.jsonl", "text_field": "summary"}], []),
        ([{"path": "a.jsonl"}, {"path": "a.jsonl", "where": "length(text) > 3"}], []),
        ([{"path": "a.jsonl", "where": "length(text) > 3"}, {"path": "a.jsonl", "where": "length(text) > 3"}], [{0: 1, 1: 1}]),
    ],
)  # fmt: skip
def test_content_that_is_read_more_than_once(folder, sources, reads):
    named = [{**each, "name": f"d{n}", "path": str(folder / each["path"])} for n, each in enumerate(sources)]
    plan = plan_here("filter", {"datasets": named}, folder / "out").plan
    found = [warning for warning in plan.warnings if warning.kind == "read_twice"]
    assert [warning.reads for warning in found] == [
        {f"datasets/d{n}": count for n, count in each.items()} for each in reads
    ]


def test_total_epochs_are_shown_on_every_surface(folder):
    # The 40 rows of the blend are read once: 1/4 of them from a, 3/4 from its copy, which is 20 rows long, as a is.
    out = folder / "out"
    blend = {
        "datasets": [
            {"name": "a", "path": str(folder / "a.jsonl")},
            {"name": "b", "path": str(folder / "f/copy.jsonl"), "weight": 3.0},
        ]
    }
    planned, manifest = prepare(blend, out, holdout={"valid": 0, "test": 0})
    size = (folder / "a.jsonl").stat().st_size
    stated = f"a and b: {COPIES} 2 times, 2.00 epochs in all (2 files, {size} bytes): {folder}/a.jsonl and {folder}/f/copy.jsonl"
    assert stated in warnings(manifest)
    console = Console(file=io.StringIO(), width=500)
    print_plan(planned, console)
    print_summary(manifest, str(out), console)
    assert console.file.getvalue().count(f"warning: {stated}\n") == 2
    (of_plan,), (of_run,) = (
        plan_record(planned)["plan"]["warnings"],
        artifact_record(manifest, "")["pretrain"]["warnings"],
    )
    assert of_plan == of_run == json.loads((out / "manifest.json").read_bytes())["warnings"][0]
    assert (of_run["kind"], of_run["reads"]) == ("read_twice", {"datasets/a": 1, "datasets/b": 1})


def test_epochs_of_different_splits_are_not_added_up(folder):
    blend = {
        split: [{"name": "a", "path": str(folder / name)}]
        for split, name in (("train", "a.jsonl"), ("valid", "f/copy.jsonl"))
    }
    _, manifest = prepare(blend, folder / "out")
    assert any(line.startswith(f"train/a and valid/a: {COPIES} 2 times (2 files, ") for line in warnings(manifest))


SETTINGS = {"nll": {"engine": "server", "server": "http://localhost:1", "model": "m"}, "embeddings": {"engine": "hash"}}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_warns_about_unread_files(tmp_path, kind):
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant")]
    write_lines(tmp_path / "in/a.jsonl", [json.dumps({"id": "1", "text": "x", "messages": messages}).encode()])
    (tmp_path / "in/b.avro").write_bytes(bytes(1_000))
    blend = {"datasets": [{"name": "a", "path": str(tmp_path / "in")}]}
    planned = plan_here(kind, blend, tmp_path / "out", **SETTINGS.get(kind, {}))
    (warning,) = planned.plan.warnings
    assert (warning.kind, warning.files, warning.bytes) == ("unread_files", 1, 1_000)
    console = Console(file=io.StringIO(), width=500)
    print_plan(planned, console)
    assert "warning: a: not read: 1 file (1.0 kB): .avro, such as b.avro; " in console.file.getvalue()
