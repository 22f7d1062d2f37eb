"""The summary that a command prints: shares and epochs by hand, and warnings about what would surprise in training."""

import io
import re
import shlex

import pytest
from rich.console import Console
from tokenmill.flows.cli import app
from tokenmill.flows.options import choices_of
from tokenmill.tasks.report.summary import dataset_rows, next_commands, print_summary, report_link, warnings
from tokenmill.tasks.score.choice import ChoiceSettings
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.train.settings import TrainSettings

from tests.preparing import prepare, write_lines


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("summary")
    datasets = [
        {"name": "rare", "path": str(write_lines(folder / "rare.jsonl", ["a"] * 10)), "weight": 9},
        {"name": "common", "path": str(write_lines(folder / "common.jsonl", ["a"] * 90 + [""])), "weight": 1},
    ]
    return prepare({"datasets": datasets}, folder / "out", holdout={"valid": 0.0001, "test": 0})[1]


def test_each_dataset_shows_its_tokens_beside_its_target(manifest):
    rare, common = dataset_rows(manifest)
    assert common == {
        "dataset": "common",
        "rows": 91,
        "kept": 90,
        "dropped": 1,
        "tokens": 180,  # a letter and EOS
        "token share": "90.0%",
        "target share": "10.0%",
        "epochs": "0.11",  # a tenth of 200 tokens, out of 180
    }
    assert (rare["token share"], rare["target share"], rare["epochs"]) == ("10.0%", "90.0%", "9.00")


@pytest.mark.parametrize(("sampling", "shown"), [("none", False), ("up", True)])
def test_targets_are_shown_where_packs_are_sampled(manifest, sampling, shown):
    packed = {**manifest, "type": "sft", "settings": {**manifest["settings"], "sampling": sampling}}
    assert [("target share" in row) for row in dataset_rows(packed)] == [shown, shown]


def test_many_epochs_and_empty_splits_are_warned_about(manifest):
    assert warnings(manifest) == [
        "rare: the weights take 90.0% of the reads from 10.0% of the tokens, so it is read 9.0 times; lower its weight, or add data",
        "valid: no documents, as holdout.valid=0.0001 of 100 documents gives none; raise or clear it",
    ]


def test_one_is_singular_and_the_tokenizer_is_named(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", ["a"])
    blend = {"datasets": [{"name": "a", "path": str(source)}]}
    manifest = prepare(blend, tmp_path / "out", holdout={"valid": 0, "test": 0})[1]
    shown = io.StringIO()
    print_summary(manifest, str(tmp_path / "out"), Console(file=shown, width=200))
    assert "train: 1 document, 2 tokens\n  tokenizer: o200k_harmony\n" in shown.getvalue()
    assert "built 1 shard, reused 0" in shown.getvalue()


@pytest.mark.parametrize(
    ("output_dir", "uri"),
    [
        ("/out", "file:///out/report.html"),
        ("/<out> (1) & [2] é", "file:///%3Cout%3E%20%281%29%20%26%20%5B2%5D%20%C3%A9/report.html"),
        ("s3://bucket/out", "s3://bucket/out/report.html"),
    ],
)
def test_links_of_reports(output_dir, uri):
    assert report_link(output_dir) == f"[{uri}]({uri})"


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_commands_are_valid(kind):
    models = {record.command: preparation(name).settings for name, record in KINDS.items()}
    models |= {"train": TrainSettings, "choose": ChoiceSettings}
    commands = next_commands({"type": kind, "settings": {"pack_size": 4096}}, "/data/an output's folder")
    for line in commands:
        assert not re.search(r"\b[A-Z]{3,}\b", line), "nobody can run a placeholder"
        tool, command, *words = shlex.split(line)
        assert tool == "tokenmill"
        app.parse_args([command, *words], exit_on_error=False, print_error=False)
        if overrides := [word for word in words if "=" in word]:
            choices_of(models[command], overrides)
