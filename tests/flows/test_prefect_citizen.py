"""What a real Prefect server has of a preparation: its name, tags, final message, and the asset with its sources."""

import html
import json
import re

import httpx
import pytest
from prefect.events.worker import EventsWorker
from tokenmill.flows.pretrain import pretrain_data_prep
from tokenmill.tasks.report.address import Services

from tests.flows.prefect_commands import wait_until
from tests.preparing import blend_of, write_lines
from tests.report.test_address import asked, serving

pytestmark = pytest.mark.slow


def events(server, name):
    with server.client() as client:
        body = {"limit": 50, "filter": {"event": {"name": [name]}}}
        return client._client.post("/events/filter", json=body).json()["events"]  # noqa: SLF001 - no public reader


def test_a_preparation_is_named_tagged_and_told_and_its_output_is_an_asset_of_its_sources(tmp_path, prefect_api):
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


def test_the_page_of_this_machine_links_the_latest_reports(tmp_path, prefect_api):
    data = write_lines(tmp_path / "a.jsonl", [f"document number {number}" for number in range(50)])
    out = tmp_path / "<out> (1) & [2] \u00e9"
    state = pretrain_data_prep(blend_of(data), str(out), return_state=True)
    with serving(Services(prefect_api.url, "http://127.0.0.1:1")) as port:
        _, _, text = asked(port, "/")
        link, shown = re.search(
            r'<a href="(/reports/[^"]+)">([^<]+&lt;out&gt; [^<]+)</a>', text.replace("<wbr>", "")
        ).groups()
        assert html.unescape(shown) == str(out)
        assert f'/runs/flow-run/{state.state_details.flow_run_id}">' in text
        assert '<a href="http://127.0.0.1:' in text
        assert "live</td>" in text
        assert asked(port, link)[::2] == (200, (out / "report.html").read_text())
        (out / "report.html").unlink()
        assert asked(port, link)[0] == 404


def test_an_artifact_of_somebody_else_leads_to_no_file(tmp_path, prefect_api):
    (tmp_path / "secret.html").write_text("secret")
    links = [
        f"file://{tmp_path}/secret.html",
        f"file://{tmp_path}/secret.html)(report.html",
        "file:///nowhere/report.html",
        f"file://{tmp_path}/secret.html%00/report.html",
    ]
    with serving(Services(prefect_api.url, "http://127.0.0.1:1")) as port:
        for link in links:
            body = {"key": "of-report-somebody", "type": "markdown", "data": f"[report.html]({link})"}
            made = httpx.post(f"{prefect_api.url}/artifacts/", json=body).raise_for_status().json()["id"]
            assert asked(port, f"/reports/{made}")[0] == 404, link
        assert asked(port, "/")[0] == 200
