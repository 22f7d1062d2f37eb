"""One address for what runs on this machine: a page that links Prefect's UI, Dask's dashboard and the latest reports.

    python -m tokenmill.tasks.report.address PORT PREFECT_API_URL DASK_DASHBOARD_URL

`make up` starts it. It listens on loopback only, and answers only requests for a loopback name, so that a page from elsewhere
that a browser has open cannot read reports through a name that it makes point here. It scans no folder: a preparation leaves a
link to its report at the Prefect server, and a report is asked for by the id of that link or of its run. A page takes 30 ms.
"""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, unquote
from uuid import UUID

import httpx
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import join

from .figures import Link, Table, Text
from .style import document
from .summary import PAGE

LOOPBACK = "127.0.0.1"

NAMES = (LOOPBACK, "localhost")
"""The names under which the page may be asked for."""

REPORT = re.compile(r"/(reports|runs)/([0-9a-f-]{36})")
"""The path of a report, by the id of the link that a run has left, or of the run."""

LINK = re.compile(rf"(?:\[{re.escape(PAGE)}\]\(http\S+\)\n\n)?\[{re.escape(PAGE)}\]\((\S+/{re.escape(PAGE)})\)")
"""The link to a report, as Prefect stores it."""

ADDRESS = "TOKENMILL_PAGE"
"""The variable with the URL of the page of this machine, which `make up` sets."""

MOST_REPORTS = 20
ANSWER_SECONDS = 3.0
READ_SECONDS = 30.0
"""How long a browser may take to send its request."""

HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


NARROW = """
td:last-child { min-width: 0; }
@media (max-width: 40em) {
  thead { display: none; }
  tbody, tr, tbody th, td { display: block; border: 0; }
  tr { border-bottom: 1px solid var(--rule); padding: .3em 0; }
}
"""
"""On a phone, the cells of a row are below one another, so that none is out of sight."""


def report_link(output_dir: str) -> str:
    """The URI of the report in an output folder: a path or URI, with everything that Markdown could mistake quoted."""
    place = join(output_dir, PAGE)
    return quote(place if "://" in place else f"file://{place}", safe=":/")


def report_links(output_dir: str, run: str) -> str:
    """Markdown that leads to the report of a flow run: by the page of this machine, which browsers follow, and the file."""
    link = f"[{PAGE}]({report_link(output_dir)})"
    page = os.environ.get(ADDRESS)
    return f"[{PAGE}]({page}/runs/{run})\n\n{link}" if page else link


@dataclass(frozen=True)
class Services:
    """What the page shows: the URLs of Prefect's API and of the HTTP server of Dask's scheduler."""

    prefect: str
    dask: str

    @property
    def ui(self) -> str:
        """The URL of Prefect's UI."""
        return self.prefect.removesuffix("/api")

    def page(self) -> str:
        """The page."""
        title = "tokenmill on this machine"
        with _client() as client:
            parts = [self._services(client), *self._reports(client)]
        body = "".join(part.html() for part in parts)
        return document(title, f"<h1>{title}</h1>\n{body}", NARROW)

    def _services(self, client: httpx.Client) -> Table:
        workers = _asked(client, f"{self.dask}/json/counts.json")
        dask = "not live" if workers is None else f"live, workers: {workers['workers']}"
        prefect = "not live" if _asked(client, f"{self.prefect}/health") is None else "live"
        dashboard = "status" if find_spec("bokeh") else "info/main/workers.html"  # Dask draws its dashboard with Bokeh
        rows = [
            (Link("Prefect", self.ui), prefect, "flow runs, their logs, and deployments"),
            (Link("Dask", f"{self.dask}/{dashboard}"), dask, "workers, and what they are doing"),
        ]
        return Table("Services", ("service", "state", "what it shows"), rows)

    def _reports(self, client: httpx.Client) -> Iterator[Table | Text]:
        wanted = {"artifacts": {"key": {"like_": "%-report-%"}}, "sort": "UPDATED_DESC", "limit": MOST_REPORTS}
        found = _asked(client, f"{self.prefect}/artifacts/latest/filter", wanted)
        if found is None:
            yield Text("The Prefect server, which knows the latest reports, does not answer.")
            return
        rows = [self._row(each, place) for each in found if (place := _place(each))]
        if not rows:
            yield Text("No run has left a report yet.")
            return
        yield Table("Latest reports", ("output", "published (UTC)", "flow run"), rows)

    def _row(self, found: dict[str, Any], place: str) -> tuple[Link | str, ...]:
        run = found["flow_run_id"]
        shown = place.removeprefix("file://").removesuffix(f"/{PAGE}")
        when = found["updated"].replace("T", " ")[:16]
        return Link(shown, f"/reports/{found['latest_id']}"), when, Link("run", f"{self.ui}/runs/flow-run/{run}")

    def report(self, kind: str, asked: UUID) -> bytes | None:
        """The report behind a link that a run has left, or of a run; None if there is none."""
        of_run = {"artifacts": {"key": {"like_": "%-report-%"}, "flow_run_id": {"any_": [str(asked)]}}}
        with _client() as client:
            if kind == "reports":
                found = _asked(client, f"{self.prefect}/artifacts/{asked}")
            else:
                found = next(iter(_asked(client, f"{self.prefect}/artifacts/filter", of_run) or []), None)
        place = _place(found) if found else None
        return read_bytes(place) if place else None


def _client() -> httpx.Client:
    return httpx.Client(timeout=ANSWER_SECONDS, trust_env=False)  # no proxy leads to this machine


def _asked(client: httpx.Client, url: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
    """What a service answers, or None if it does not."""
    try:
        answer = client.get(url) if body is None else client.post(url, json=body)
        return answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return None


def _place(artifact: dict[str, Any]) -> str | None:
    """The URI of a report that an artifact links to; None for other artifacts."""
    found = LINK.fullmatch(str(artifact["data"]))
    return unquote(found[1]) if found else None


class Answer(BaseHTTPRequestHandler):
    """Answers one request."""

    server_version, sys_version = "tokenmill", ""
    timeout = READ_SECONDS

    def __init__(self, services: Services, *given: Any) -> None:  # noqa: ANN401 - the server's own
        self.services = services
        super().__init__(*given)

    def do_GET(self) -> None:
        """The page, or a report."""
        host, _, port = self.headers.get("Host", "").partition(":")
        if host not in NAMES or not port.isdigit():  # any port, because SSH may forward a different one
            self.send_error(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1")
            return
        asked = REPORT.fullmatch(self.path)
        found = self.services.page().encode() if self.path == "/" else self._report(*asked.groups()) if asked else None
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND, "no such page, or the report is gone")
            return
        self.send_response(HTTPStatus.OK)
        for name, value in {**HEADERS, "Content-Length": str(len(found))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(found)

    def _report(self, kind: str, name: str) -> bytes | None:
        try:
            return self.services.report(kind, UUID(name))
        except (ValueError, OSError):  # no id; a path that cannot be, or that this user may not read
            return None


def server(port: int, services: Services) -> ThreadingHTTPServer:
    """A server of the page on a port of loopback; 0 takes a free one."""
    return ThreadingHTTPServer((LOOPBACK, port), partial(Answer, services))


if __name__ == "__main__":
    server(int(sys.argv[1]), Services(*sys.argv[2:4])).serve_forever()
