"""The page of one address over real sockets: what it answers to whom, and what it says when nothing else runs.

(With a Prefect server and a report: tests/flows/test_prefect_citizen.py. With Dask: tests/flows/test_make_up.py.)
"""

import http.client
import re
import socket
from contextlib import contextmanager
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.report.address import LINK, NARROW, Services, report_link, report_links, server
from tokenmill.tasks.report.figures import Link, Table
from tokenmill.tasks.storage import absolute

SERVICES = Services("http://127.0.0.1:1/api", "http://127.0.0.1:1")


@contextmanager
def serving(services):
    """The port of a page in this process."""
    with server(0, services) as found:
        Thread(target=found.serve_forever, daemon=True).start()
        yield found.server_address[1]
        found.shutdown()


@pytest.fixture(scope="module")
def port():
    with serving(SERVICES) as found:
        yield found


def asked(port, path, host=None, method="GET"):
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def test_without_services_the_page_says_that_they_are_not_live(port):
    status, headers, text = asked(port, "/")
    assert status == 200
    assert text.count("not live") == 2
    assert "does not answer" in text
    assert "<script" not in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_only_loopback_names_are_answered_also_through_forwarded_ports(port):
    assert {asked(port, "/", host)[0] for host in (f"localhost:{port}", "127.0.0.1:9", "localhost:65000")} == {200}
    evil = ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "127.0.0.1:1.evil.example")
    for host in (*evil, "127.0.0.1", ":"):
        status, _, text = asked(port, "/", host)
        assert status == 403, host
        assert "not live" not in text


def test_it_listens_on_loopback_alone(port):
    with socket.create_server(("127.0.0.2", port)):
        pass  # the port is free on every other address


@pytest.mark.parametrize(
    "path",
    [
        *("/../../etc/passwd", "//etc/passwd", "/reports/../../../etc/passwd", "/reports/%2e%2e%2fetc%2fpasswd"),
        *(
            "/reports/",
            f"/reports/{'-' * 36}",
            *(f"/{kind}/00000000-0000-0000-0000-000000000000" for kind in ("reports", "runs")),
        ),
        *("/?x", "http://127.0.0.1:1/api/health"),
    ],
)
def test_nothing_but_the_page_and_reports_by_id_is_served(port, path):
    status, _, text = asked(port, path)
    assert status == 404
    assert "root:" not in text


def test_rows_fit_a_phone_and_paths_break_behind_slashes():
    page = Table("Latest reports", ("output",), [(Link("/out/nightly/2026-11-26", "/reports/1"),)]).html()
    assert ">/<wbr>out/<wbr>nightly/<wbr>2026-11-26</a>" in page
    assert re.search(r"@media \(max-width: 40em\) \{.*tbody, tr, tbody th, td \{ display: block;", NARROW, re.DOTALL)


def test_links_of_runs_lead_to_the_page_of_this_machine(monkeypatch):
    monkeypatch.delenv("TOKENMILL_PAGE", raising=False)
    assert report_links("/out", "7") == "[report.html](file:///out/report.html)"
    monkeypatch.setenv("TOKENMILL_PAGE", "http://127.0.0.1:4201")
    links = report_links("/out", "7")
    assert links.startswith("[report.html](http://127.0.0.1:4201/runs/7)\n")
    assert LINK.fullmatch(links)[1] == "file:///out/report.html"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent_to_it(port, method):
    assert asked(port, "/", method=method)[0] == 501


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(str.strip))
def test_the_link_of_any_output_folder_is_one_link_of_markdown(name):
    link = report_link(absolute(f"/out/{name}"))
    assert LINK.fullmatch(f"[report.html]({link})")
    assert not set(link) & set("()[]<> \"'`")
