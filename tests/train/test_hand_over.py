"""Handing rows over to NeMo-RL: what is written there runs from a folder of NeMo-RL's, wherever it was asked for."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from prefect.logging import disable_run_logger
from tokenmill.flows.cli import run
from tokenmill.tasks.artifact import Artifact
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.registry import register
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.train.settings import TrainSettings
from tokenmill.tasks.train.stage import hand_over_rl


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder that is worked in, with rows in `rows`, a model in `model`, and names of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENMILL_ARTIFACTS", str(tmp_path / "names"))
    (tmp_path / "model").mkdir()
    (tmp_path / "rows").mkdir()
    splits = {"train": str(tmp_path / "rows/train.jsonl"), "val": ""}
    manifest = {"settings": {"target": "nemo_rl_sft"}, **splits, "shards": [], "volatile": {}}
    (tmp_path / "rows/manifest.json").write_bytes(sealed(manifest))
    return tmp_path


def handed_over(data="rows", start_from="model", output_dir="run"):
    """The record of the hand-over, and the settings that NeMo-RL is given."""
    with disable_run_logger():
        record = hand_over_rl.fn(data, TrainSettings(launcher="nemo-rl", start_from=start_from), output_dir)["train"]
    return record, yaml.safe_load(Path(record["path"], "nemo_rl.yaml").read_text())


def test_relative_paths_use_the_calling_folder(here):
    record, said = handed_over()
    assert record["path"] == str(here / "run")
    assert shlex.split(record["command"]) == ["bash", f"{here}/run/train.sh"]
    assert record["made_from"] == [{"type": "rl", "path": str(here / "rows")}]
    assert shlex.split((here / "run/train.sh").read_text(), comments=True)[-2] == f"{here}/run/nemo_rl.yaml"
    assert said["checkpointing"]["checkpoint_dir"] == f"{here}/run/checkpoints"
    assert said["logger"]["log_dir"] == f"{here}/run/logs"
    assert said["policy"]["model_name"] == said["policy"]["tokenizer"]["name"] == str(here / "model")


def test_rows_and_models_are_known_by_name_folder_or_repository(here):
    register("rows", Artifact(path=str(here / "rows"), type="rl"))
    assert handed_over("art://rows")[0]["made_from"] == [{"type": "rl", "path": str(here / "rows")}]
    assert handed_over(start_from="org/model")[1]["policy"]["model_name"] == "org/model"
    (here / "model/job.json").write_text("{}")
    register("begun", Artifact(path=str(here / "model"), type="model"))
    for named in ("model", "art://begun"):
        assert handed_over(start_from=named)[1]["policy"]["model_name"] == str(here / "model/model")


def test_store_folder_is_rejected_before_writing(here):
    with pytest.raises(InputError, match="output_dir=memory://run: launcher=nemo-rl"):
        handed_over(output_dir="memory://run/")


def test_dry_run_shows_the_command_and_writes_files(here, capsys):
    arguments = ["train", "rows", "--output-dir", "run", "--dry-run", "launcher=nemo-rl", "start_from=org/model"]
    assert run(arguments) == 0
    record = json.loads(capsys.readouterr().out)["train"]
    assert shlex.split(record["command"]) == ["bash", f"{here}/run/train.sh"]
    reviewed = {path.name: path.read_bytes() for path in (here / "run").iterdir()}
    assert set(reviewed) == set(record["files"])
    handed_over(start_from="org/model")
    assert {path.name: path.read_bytes() for path in (here / "run").iterdir()} == reviewed
