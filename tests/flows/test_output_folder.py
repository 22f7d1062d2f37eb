"""What all flows that publish in a folder have in common: how they fail, and what their artifacts are called."""

import re

import pytest
from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, LogFilter, LogFilterFlowRunId
from prefect.logging.handlers import APILogWorker
from tokenmill.flows.prefect_server import RECORD, publishing
from tokenmill.flows.pretrain import pretrain_data_prep
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.shards.stage import artifact_key

SENTENCE = "weight: -1 is negative; write 0 or more"


@task(name="plan")
def plan(error):
    raise error


@flow(name="a-preparation", persist_result=False)
@publishing
def preparation(output_dir: str, error: object = None) -> dict:
    if error:
        plan(error)
    return {"path": output_dir, "artifact": create_markdown_artifact("made", artifact_key("summary"))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [InputError, RunError])
def test_an_error_that_teaches_is_the_runs_message_and_is_raised_to_the_caller(kind, tmp_path, prefect_api):
    error = kind(SENTENCE)
    with pytest.raises(kind) as raised:
        preparation(str(tmp_path), error)
    assert raised.value is error

    state = preparation(str(tmp_path), kind(SENTENCE), return_state=True)
    run = prefect_api.client().read_flow_run(state.state_details.flow_run_id)
    assert run.state.is_failed()
    assert run.state.message == SENTENCE
    assert str(state.result(raise_on_failure=False)) == SENTENCE


def test_log_has_tracebacks_of_defects_only(tmp_path, prefect_api):
    assert "Traceback" not in log_of(preparation(str(tmp_path), InputError(SENTENCE), return_state=True), prefect_api)
    log = log_of(preparation(str(tmp_path), ZeroDivisionError(), return_state=True), prefect_api)
    assert log.count("Traceback") == 2, "the task's, and the flow's"


def log_of(state, server):
    APILogWorker.drain_all()
    run = LogFilterFlowRunId(any_=[state.state_details.flow_run_id])
    messages = [log.message for log in server.client().read_logs(LogFilter(flow_run_id=run))]
    assert messages
    return "\n".join(messages)


def test_input_errors_are_the_flow_message(tmp_path, prefect_api):
    state = pretrain_data_prep(str(tmp_path / "none.json"), str(tmp_path / "out"), return_state=True)
    assert re.fullmatch(rf"{tmp_path}/none\.json: .*", state.message), state.message


def test_ended_run_keeps_its_state(tmp_path, prefect_api):
    ended = preparation(str(tmp_path), return_state=True).state_details.flow_run_id
    (tmp_path / RECORD).write_bytes(sealed({"id": str(ended), "volatile": {}}))
    preparation(str(tmp_path))
    assert prefect_api.client().read_flow_run(ended).state.name == "Completed"


def test_each_output_folder_has_its_own_artifacts(tmp_path, prefect_api, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keys = [key_of(place, prefect_api) for place in ("Out A/ü", "out-a/b", str(tmp_path / "out-a" / "b"), "s3://b/out")]
    assert all(re.fullmatch(r"a-preparation-summary-[a-z0-9-]+", key) for key in keys)
    assert len(set(keys)) == 3
    assert keys[1] == keys[2]
    assert "out-a-b" in keys[1]


def key_of(output_dir, server):
    run = preparation(output_dir, return_state=True).state_details.flow_run_id
    found = server.client().read_artifacts(
        artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    )
    return found[0].key
