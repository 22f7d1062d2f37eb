"""Training through Prefect: watched, killed, retried, evaluated; and the commands that are piped into each other."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from unittest.mock import patch
from uuid import UUID

import orjson
import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import StateType
from tokenmill.flows.options import config_settings
from tokenmill.flows.pipeline import pipeline
from tokenmill.flows.train import evaluate_model, train_model
from tokenmill.tasks.artifact import artifact_key
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.seal import unsealed
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.storage import filesystem
from tokenmill.tasks.strict import parse
from tokenmill.tasks.train import stage
from tokenmill.tasks.train.events import TrainStep
from tokenmill.tasks.train.history import History
from tokenmill.tasks.train.job import Job, TrainData
from tokenmill.tasks.train.pipeline_settings import CONFIGS, blend_place, load_settings
from tokenmill.tasks.train.settings import EvaluateSettings, TrainSettings
from tokenmill.tasks.train.watch import logged

from tests.flows.prefect_commands import reporting, wait_until
from tests.flows.preparation_runs import TOKENMILL, called
from tests.preparing_sft import chat_vocabulary
from tests.train import small_data

DATA = TrainData(
    path="/data", kind="pretrain", made_from="xxh3_128:00", tokenizer={"model": "o200k_harmony"}, fingerprint="sha256:00",
    vocabulary_size=1000, eos=7, sources=[],
)  # fmt: skip
MODEL = {"hidden": 32, "heads": 4, "key_value_heads": 2, "feed_forward": 64}
SETTINGS = {
    "model": MODEL, "steps": 8, "sequence_length": 64, "global_batch": 4, "micro_batch": 2,
    "optimizer": {"learning_rate": 0.01, "minimum_learning_rate": 0.001, "warmup_steps": 2},
    "max_epochs": None, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return chat_vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def texts(vocabulary, tmp_path_factory):
    return small_data.texts(tmp_path_factory.mktemp("texts"), vocabulary)[0]


def steps_in(out):
    """What metrics.jsonl says of each step."""
    lines = [orjson.loads(line) for line in Path(out, "metrics.jsonl").read_bytes().splitlines()]
    return {line["step"]: line for line in lines if line["event"] == "step"}


def losses_in(out):
    return {step: (line["loss"], line["gradient_norm"]) for step, line in steps_in(out).items()}


def settings(**chosen):
    return parse(TrainSettings, {**SETTINGS, **chosen}, "settings")


@pytest.fixture(scope="module")
def undisturbed(texts, tmp_path_factory, prefect_server):
    """A training that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed") / "model"
    with reporting(prefect_server):
        return out, command("train", texts, *words(checkpoint_every=2), "--output-dir", out)


def words(**chosen):
    """Settings as the command line takes them."""
    flat = {**SETTINGS, **chosen}
    model = {f"model.{name}": value for name, value in flat.pop("model").items()}
    optimizer = {f"optimizer.{name}": value for name, value in flat.pop("optimizer").items()}
    return [f"{name}={'null' if value is None else value}" for name, value in {**flat, **model, **optimizer}.items()]


def command(*arguments, piped=None):
    """The record that a command printed."""
    done = called(*arguments, stdin=piped)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_piped_commands_record_their_inputs(texts, undisturbed, prefect_api, tmp_path):
    out, printed = undisturbed
    (trained,) = json.loads(printed).values()
    assert trained["final_loss"] < trained["first_loss"] - 0.5
    assert trained["path"] == str(out)
    assert [source["type"] for source in trained["made_from"]] == ["pretrain"]
    assert trained["made_from"][0]["path"] == texts
    (results,) = json.loads(command("evaluate", "documents=1", piped=printed)).values()
    assert results["type"] == "results"
    assert Path(results["path"]) == out / "results/results.json"
    assert set(results["sources"]) == {"a", "b"}
    made_from = {source["type"]: source for source in results["made_from"]}
    assert made_from["model"]["path"] == trained["model"]
    assert made_from["data"]["digest"] == trained["made_from"][0]["digest"]


@pytest.mark.slow
def test_killed_training_resumes_with_the_same_losses(prefect_api, texts, undisturbed, tmp_path):
    out = tmp_path / "model"
    killer = threading.Thread(target=kill_trainer_after, args=(out, 4))
    killer.start()
    record = train_model(texts, str(out), settings(checkpoint_every=2, retries=2))
    killer.join()
    assert record["train"]["steps"] == SETTINGS["steps"]
    assert losses_in(out) == losses_in(undisturbed[0])
    tables = artifacts(prefect_api, artifact_key("training", str(out)))
    assert len(tables) == 2, "one of each start"
    last = max(tables, key=lambda table: table.created)
    assert [row["step"] for row in json.loads(last.data)][-1] == SETTINGS["steps"]
    assert last.description == "step 8 of 8"


def kill_trainer_after(out, step):
    """SIGKILL the trainer as soon as a checkpoint of that step is there."""
    deadline = time.monotonic() + 100
    while not Path(out, f"checkpoints/step_{step:08d}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    trainers = [
        process
        for process in psutil.Process().children(recursive=True)
        if "tokenmill.tasks.train.trainer" in process.cmdline() and str(Path(out, "job.json")) in process.cmdline()
    ]
    os.kill(trainers[-1].pid, signal.SIGKILL)


def artifacts(server, key):
    with server.client() as client:
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))


@flow
def shows_steps(job, number):
    """Show so many steps, each twice, as if none came a moment after another."""
    history, table = History(job.output_dir), stage.StepsTable(job)
    for step in range(1, number + 1):
        counts = {"tokens": 64, "loss_tokens": 64, "padding": 0, "mfu": None, "memory": 1}
        times = {"seconds": 0.5, "waited": 0.0}
        history.add(TrainStep(step=step, loss=2.5, learning_rate=1e-3, gradient_norm=1.0, **counts, **times))
        table.show(history)
        table.show(history)


@pytest.mark.slow
def test_steps_are_shown_in_one_table_that_is_updated_when_there_is_something_new(prefect_api, tmp_path):
    job = Job(settings=settings(), data=DATA, output_dir=str(tmp_path))
    update = SyncPrefectClient.update_artifact
    with patch.object(SyncPrefectClient, "update_artifact", autospec=True, side_effect=update) as updating:
        shows_steps(job, 4)
    (table,) = artifacts(prefect_api, artifact_key("training", str(tmp_path)))
    assert [row["step"] for row in json.loads(table.data)] == [1, 2, 3, 4]
    assert table.description == "step 4 of 8"
    assert updating.call_count == 3


def test_server_gets_first_lines_and_the_log_all(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stage, "get_run_logger", lambda: logging.getLogger("of a run"))
    caplog.set_level(logging.INFO, "of a run")
    with logged(str(tmp_path / "training.log")) as log:
        lines = stage.Lines(log)
        for number in range(stage.MAX_LINES + 10):
            lines.handle(f"line {number}")
    assert len((tmp_path / "training.log").read_text().splitlines()) == stage.MAX_LINES + 10
    *_, last, more = caplog.messages
    assert len(caplog.messages) == stage.MAX_LINES + 1
    assert last == f"line {stage.MAX_LINES - 1}"
    assert more == f"further lines are in {tmp_path}/training.log only"


@pytest.mark.slow
def test_killed_command_ends_its_trainer(texts, undisturbed, prefect_server, prefect_api, tmp_path):
    out = tmp_path / "model"
    arguments = ["train", texts, *words(checkpoint_every=2), "--output-dir", str(out)]
    killed = subprocess.Popen([TOKENMILL, *arguments], env=prefect_server.environment, stderr=subprocess.DEVNULL)
    wait_until((out / "checkpoints/step_00000002").exists, 100)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    run = UUID(unsealed((out / "flow_run.json").read_bytes())["id"])
    wait_until(lambda: not trainers_of(out), 20)
    with prefect_server.client() as client:
        assert client.read_flow_run(run).state.type == StateType.RUNNING
        command(*arguments)
        assert client.read_flow_run(run).state.type == StateType.CRASHED
    assert losses_in(out) == losses_in(undisturbed[0])


def trainers_of(out):
    """The processes that train in a folder."""
    job = str(out / "job.json")
    return [process for process in psutil.process_iter(["cmdline"]) if job in (process.info["cmdline"] or [])]


@pytest.mark.slow
def test_training_that_failed_shows_the_last_lines_of_its_log_and_where_it_is(texts, prefect_api, tmp_path):
    out = tmp_path / "model"
    chosen = words(optimizer={"learning_rate": 1e30, "minimum_learning_rate": 1e30}, retries=0)
    failed = called("train", texts, *chosen, "--output-dir", out)
    assert failed.returncode == 1
    said = failed.stderr.splitlines()
    begin = next(number for number, line in enumerate(said) if re.match(r"tokenmill: step \d+: the loss is ", line))
    cause, heading, *last = said[begin:]
    assert "; lower optimizer.learning_rate" in cause
    # Before that, a reader of the pipe has seen how often each dataset is read, and that the steps advance.
    assert any("epoch" in line for line in said[:begin])
    assert any(re.match(r"tokenmill: step 1: loss [\d.]+  ", line) for line in said[:begin])
    assert heading == f"tokenmill: The last lines of its log, {out}/training.log:"
    log, _, torchruns_own = (out / "training.log").read_text().partition("\nE")
    assert "failed (exitcode" in torchruns_own
    assert [line.removeprefix("tokenmill:").strip() for line in last] == [*map(str.strip, log.splitlines()[-20:])]
    assert "\nstep 1, loss " in log


@pytest.mark.slow
def test_a_watcher_that_was_killed_before_it_wrote_the_last_steps_down_loses_none(
    texts, undisturbed, prefect_api, tmp_path
):
    """Both are killed behind the last checkpoint: its steps are never done again, and stand in no metrics.jsonl."""
    out = tmp_path / "model"
    shutil.copytree(undisturbed[0], out)
    arguments = ["train", texts, *words(checkpoint_every=2), "--output-dir", out]
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (out / "metrics.jsonl").write_bytes(b"".join(lines[:4]))
    (out / "training.json").unlink()
    shutil.rmtree(out / "model")
    (record,) = json.loads(command(*arguments)).values()
    assert record["steps"] == SETTINGS["steps"]
    assert losses_in(out) == losses_in(undisturbed[0])
    assert record["tokens"] == sum(line["tokens"] for line in steps_in(undisturbed[0]).values())


@pytest.mark.slow
def test_an_evaluation_needs_a_training_run_that_ended(prefect_api, texts, tmp_path):
    with pytest.raises(InputError, match="no finished training here"):
        evaluate_model(str(tmp_path), str(tmp_path / "results"), EvaluateSettings())


@pytest.mark.slow
def test_a_benchmark_is_compared_with_the_baseline_that_was_there_before(texts, prefect_api, tmp_path):
    chosen = [texts, *words(checkpoint_every=8), "--baselines", tmp_path / "baselines"]
    printed = command("benchmark", *chosen, "--output-dir", tmp_path / "first", "--record")
    baseline = Path(json.loads(printed)["benchmark"]["path"])
    faster = json.loads(baseline.read_text()) | {"tokens_per_second": 1e12}
    baseline.write_text(json.dumps(faster))
    again = called("benchmark", *chosen, "--output-dir", tmp_path / "again", "--record", "--compare")
    assert again.returncode == 1
    assert "worse than the baseline" in again.stderr
    assert "tokens_per_second" in again.stderr
    assert json.loads(baseline.read_text()) == faster, "what is worse takes no baseline's place"


@pytest.mark.slow
@pytest.mark.timeout(900)  # on busy cores
def test_the_whole_pipeline_from_blends_to_evaluated_models_offline(prefect_api, tmp_path):
    out = tmp_path / "pipeline"
    printed = command("pipeline", "--output-dir", out, "--scale", "tiny")
    (record,) = json.loads(printed).values()
    stages = [(name, stage) for each in record["stages"] for name, stage in each.items()]
    assert [name for name, _ in stages] == ["pretrain", "train", "evaluate", "sft", "train", "evaluate", "rl"]
    by_path = {stage["path"]: stage for _, stage in stages}
    for of in ("pretrain", "sft"):
        trained = by_path[str(out / of / "model")]
        assert trained["steps"] >= 20
        losses = [loss for loss, _ in losses_in(out / of / "model").values()]
        assert sum(losses[-6:]) / 6 < sum(losses[:6]) / 6 - 2, "one step is noisy"
        results = by_path[str(out / of / "results/results.json")]
        assert 1 < results["perplexity"] < 100_000
    begun = by_path[str(out / "sft/model")]["made_from"]
    assert {source["type"]: source["path"] for source in begun}["model"] == str(out / "pretrain/model")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_bundled_configurations_are_settings(path):
    """`tiny` and `pipeline-tiny` run above and in the demo; the others need a GPU."""
    if not path.stem.startswith("pipeline"):
        assert parse(TrainSettings, config_settings(path), path.stem).steps
        return
    settings = load_settings(path.stem)
    for kind in ("pretrain", "sft", "rl"):
        assert preparation(kind).read_blend(blend_place(getattr(settings, kind).blend)).training()


@pytest.mark.slow
def test_impossible_pipeline_does_not_prepare(prefect_api, tmp_path):
    with pytest.raises(InputError, match="output_dir=memory://pipeline"):
        pipeline("memory://pipeline")
    assert not filesystem("memory://pipeline")[0].exists("/pipeline")
    settings = load_settings("pipeline-tiny")
    for name in ("pretrain", "sft", "rl"):
        changed = getattr(settings, name).model_copy(update={"blend": str(tmp_path / "nowhere.json")})
        with pytest.raises(InputError, match=r"nowhere\.json: no such blend file"):
            pipeline(str(tmp_path / "out"), settings.model_copy(update={name: changed}))
    assert not (tmp_path / "out/pretrain").exists()
