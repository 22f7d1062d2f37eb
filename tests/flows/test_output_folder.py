"""What all flows that publish in a folder have in common: how they fail and end, and what a Prefect server has of them."""

import json

import pytest
from prefect import flow, task
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, LogFilter, LogFilterFlowRunId
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from tokenmill.flows.prefect_server import RECORD, publishing
from tokenmill.flows.pretrain import pretrain_data_prep
from tokenmill.tasks.artifact import artifact_key
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.seal import sealed

from tests.flows.prefect_commands import wait_until
from tests.preparing import blend_of, write_lines

pytestmark = pytest.mark.slow

SENTENCE = "weight: -1 is negative; write 0 or more"


@task(name="plan")
def plan(error):
    raise error


@flow(name="a-preparation", persist_result=False)
@publishing
def preparation(output_dir: str, error: object = None) -> dict:
    if error:
        plan(error)
    return {"path": output_dir}


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


def test_ended_run_keeps_its_state(tmp_path, prefect_api):
    ended = preparation(str(tmp_path), return_state=True).state_details.flow_run_id
    (tmp_path / RECORD).write_bytes(sealed({"id": str(ended), "volatile": {}}))
    preparation(str(tmp_path))
    assert prefect_api.client().read_flow_run(ended).state.name == "Completed"


def events(server, name):
    with server.client() as client:
        body = {"limit": 50, "filter": {"event": {"name": [name]}}}
        return client._client.post("/events/filter", json=body).json()["events"]  # noqa: SLF001 - no public reader


def test_preparation_is_named_tagged_and_an_asset(tmp_path, prefect_api):
    data = write_lines(tmp_path / "some data [1]" / "a.jsonl", [f"document number {number}" for number in range(50)])
    blend = tmp_path / "news.json"
    blend.write_text(json.dumps(blend_of(data)))
    out = tmp_path / "2026-11-23"
    state = pretrain_data_prep(str(blend), str(out), return_state=True)
    (record,) = state.result().values()
    run = prefect_api.client().read_flow_run(state.state_details.flow_run_id)
    assert run.name == "news-2026-11-23"
    assert {"tokenmill", "pretrain-data-prep"} <= set(run.tags)
    assert run.state.message == f"{record['tokens']:,} tokens in 1 shard → {out}/blend.json"
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
    keys = {each.key for each in prefect_api.client().read_artifacts(artifact_filter=of_run)}
    assert artifact_key("pretrain-data-prep-summary", str(out)) in keys, "each folder has a history of its own"
    EventsWorker.drain_all()

    def materialised():
        found = events(prefect_api, "prefect.asset.materialization.succeeded")
        return next((each for each in found if each["resource"]["prefect.resource.id"] == f"file://{out}"), None)

    event = wait_until(materialised, 30)
    roles = {}
    for related in event["related"]:
        roles.setdefault(related["prefect.resource.role"], []).append(related["prefect.resource.id"])
    assert roles["asset"] == [f"file://{tmp_path}/some_data__1_/a.jsonl"]
    assert roles["asset-materialized-by"] == ["tokenmill"]
    assert roles["flow-run"] == [f"prefect.flow-run.{run.id}"]
