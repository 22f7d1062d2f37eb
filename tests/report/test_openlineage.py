"""Events for OpenLineage, as its own client reads, writes and sends them."""

import json
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from uuid import UUID

import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.openlineage import named, tell, tell_if_asked

from tests.preparing import blend_of, prepare, write_lines


@pytest.fixture
def prepared(tmp_path):
    sources = [
        write_lines(tmp_path / f"{name}.jsonl", [f"{name} {row}" for row in range(30)]) for name in ("one", "two")
    ]
    out = tmp_path / "out"
    return prepare(blend_of(*sources), out)[1], str(out), [str(source) for source in sources]


def test_two_events_have_inputs_and_outputs(prepared, tmp_path, monkeypatch):
    manifest, out, sources = prepared
    place, settings = tmp_path / "events.jsonl", {"TYPE": "file", "APPEND": "true"}
    for name, value in {**settings, "LOG_FILE_PATH": str(place)}.items():
        monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{name}", value)
    tell_if_asked(manifest, out, pytest.fail)
    start, complete = map(json.loads, place.read_text().splitlines())
    assert [event["eventType"] for event in (start, complete)] == ["START", "COMPLETE"]
    times = [datetime.fromisoformat(event["eventTime"]) for event in (start, complete)]
    assert (times[1] - times[0]).total_seconds() == pytest.approx(manifest["volatile"]["seconds"], abs=1e-3)
    assert start["run"]["runId"] == complete["run"]["runId"]
    assert UUID(start["run"]["runId"])
    assert start["job"] == complete["job"] == {"namespace": "tokenmill", "name": f"pretrain {out}", "facets": {}}
    read = {(each["namespace"], each["name"]): each["inputFacets"]["inputStatistics"] for each in complete["inputs"]}
    assert {place: facet["rowCount"] for place, facet in read.items()} == {("file", source): 30 for source in sources}
    (made,) = complete["outputs"]
    assert (made["namespace"], made["name"]) == ("file", out)
    assert made["outputFacets"]["outputStatistics"]["rowCount"] == 60
    assert complete["producer"].endswith("tokenmill")


def test_events_reach_a_collector(prepared, monkeypatch):
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))["eventType"]))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{server.server_port}")
        tell_if_asked(*prepared[:2], pytest.fail)
        server.shutdown()
    assert received == [("/api/v1/lineage", "START"), ("/api/v1/lineage", "COMPLETE")]


def test_a_file_that_cannot_be_written_is_a_warning(prepared, tmp_path, monkeypatch):
    warned = []
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", str(tmp_path / "none" / "events.jsonl"))
    tell_if_asked(*prepared[:2], warned.append)
    assert len(warned) == 1
    assert warned[0].startswith("could not send the OpenLineage event: ")


def test_missing_openlineage_client_names_the_remedy(prepared, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openlineage.client", None)
    with pytest.raises(InputError, match=r"pip install 'openlineage-python>="):
        tell(*prepared[:2])


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/data/web", ("file", "/data/web")),
        ("s3://bucket/a/b.jsonl", ("s3://bucket", "a/b.jsonl")),
        ("hf://org/name", ("hf://org", "name")),
    ],
)
def test_names_follow_openlineages_naming(place, name):
    assert named(place) == name
