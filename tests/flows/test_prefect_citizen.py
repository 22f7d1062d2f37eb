"""What a real Prefect server has of a preparation: its name, tags, final message, and the asset with its sources."""

import json

import pytest
from prefect.events.worker import EventsWorker
from tokenmill.flows.pretrain import pretrain_data_prep

from tests.flows.prefect_commands import wait_until
from tests.preparing import blend_of, write_lines

pytestmark = pytest.mark.slow


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
