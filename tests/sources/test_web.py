"""Sources on web servers are read as local files are, and every odd address has a sentence."""

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.sources import hub_client, opening, web
from tokenmill.tasks.sources.discovery import find
from tokenmill.tasks.sources.formats import read_texts
from tokenmill.tasks.sources.slices import ContentIndex, cut
from tokenmill.tasks.storage import filesystem

TEXTS = [f"text {number}" for number in range(2000)]
LINES = "".join(f'{{"text": "{text}"}}\n' for text in TEXTS).encode()
PARQUET = BytesIO()
pq.write_table(pa.table({"text": TEXTS}), PARQUET, row_group_size=500)
FILES = {
    "rows.jsonl": LINES,
    "rows.jsonl.gz": gzip.compress(LINES),
    "rows.parquet": PARQUET.getvalue(),
    "empty.jsonl": b"",
}


class Server(BaseHTTPRequestHandler):
    """Serves FILES; the first part of a path says how."""

    protocol_version = "HTTP/1.1"
    etag = '"one"'
    requests = 0

    def do_GET(self):
        Server.requests += 1
        how, _, name = urlsplit(self.path).path.lstrip("/").partition("/")
        content = FILES.get("rows.jsonl" if name in {"5", "page.jsonl"} else name, b"")
        if how.isdigit():
            self.send_response(int(how))
            return self.body(b"no")
        if how == "moved":
            self.send_response(302)
            self.send_header("Location", f"/ranges/{name}")
            return self.body(b"")
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        ranges = how not in {"whole", "endless"}
        self.send_response((206 if content else 416) if ranges else 200)
        if ranges:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}" if content else "bytes */0")
        if how != "unversioned":
            self.send_header("ETag", self.etag)
        if how == "proposed":
            self.send_header("Content-Disposition", 'attachment; filename="rows.jsonl"')
        if name == "page.jsonl":
            self.send_header("Content-Type", "text/html; charset=utf-8")
        if how == "endless":
            self.send_header("Connection", "close")
            self.end_headers()
            return None
        return self.body(part if ranges else content)

    def body(self, content):
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if content:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(hub_client.time, "sleep", lambda _: None)


def texts(path, shard_size=10_000):
    (file,) = find(DataSource(name="a", path=path)).files
    slices = ContentIndex().identify(cut(file, shard_size, ["text"]), ["text"], "content")
    return [text for part in slices for batch in read_texts(part, "text") for text in batch.texts.to_pylist()]


@pytest.mark.parametrize("how", ["ranges", "whole", "unversioned", "moved"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
@pytest.mark.parametrize("query", ["", "?download=true"])
def test_web_server_files(host, how, name, query):
    assert texts(f"{host}/{how}/{name}{query}") == TEXTS


def test_names_that_servers_propose(host):
    assert texts(f"{host}/proposed/5?id=7") == TEXTS
    assert texts(f"{host}/ranges/empty.jsonl") == []


def test_files_that_change_meanwhile(host, monkeypatch):
    (file,) = find(DataSource(name="a", path=f"{host}/ranges/rows.jsonl")).files
    monkeypatch.setattr(Server, "etag", '"two"')
    (other,) = find(DataSource(name="a", path=f"{host}/ranges/rows.jsonl")).files
    assert file.version != other.version
    with pytest.raises(RunError, match="changed while it was being prepared"):
        opening.open_source(file).read(10)


def test_the_same_etag_of_different_addresses(host):
    one, two = (find(DataSource(name="a", path=f"{host}/{how}/rows.jsonl")).files[0] for how in ("ranges", "whole"))
    assert one.version != two.version


ODD = {
    "HOST/": "is a folder or a pattern, and web servers list no files; name each file",
    "HOST": "is a folder or a pattern",
    "HOST/ranges/*.jsonl": "is a folder or a pattern",
    "HOST/ranges/{a,b}.jsonl": "is a folder or a pattern",
    "HOST/ranges/rows": "files of this type cannot be read; supported are .parquet",
    "HOST/ranges/rows.pdf": "files of this type cannot be read",
    "HOST/ranges/page.jsonl": "is a web page, not a file; name the address behind its download button",
    "HOST/404/rows.jsonl": r"file not found \(404\)",
    "HOST/410/rows.jsonl": "file not found",
    "HOST/401/rows.jsonl": "access denied",
    "HOST/403/rows.jsonl": r"access denied \(403\).*get a new one",
    "HOST/418/rows.jsonl": "the server answers 418",
    "HOST/503/rows.jsonl": "the server fails.*run the same command again",
    "HOST/endless/rows.jsonl": r"does not give its size; download it \(curl -LO\)",
    "http://name:secret@127.0.0.1/rows.jsonl": r"^http://…@127.0.0.1/rows.jsonl: holds a name or a password",
    "http://127.0.0.1:9/rows.jsonl": "cannot be reached.*check the address and the network",
    "http://127.0.0.1:99999/rows.jsonl": "cannot be reached|check the address",
    "https://no-such-host.invalid/rows.jsonl": "cannot be reached",
    "http://[::1/rows.jsonl": "Invalid IPv6 URL; correct the address",
    "http://host:port/rows.jsonl": "cannot be reached",
    "http://a host/rows.jsonl": "cannot be reached",
    "http://": "is a folder or a pattern",
    "https:///rows.jsonl": "is a folder or a pattern",
    "HTTP://127.0.0.1/rows.jsonl": r"unknown scheme 'HTTP'; did you mean http://\?",
    "http:/127.0.0.1/rows.jsonl": "write http://127.0.0.1/rows.jsonl",
    "ftp://127.0.0.1/rows.jsonl": "unknown scheme 'ftp'; use a local path, s3://",
    "sftp://host/rows.jsonl": "unknown scheme 'sftp'",
    "data://rows": "unknown scheme 'data'",
    "data:application/json,{}": "is neither a URI that can be read nor a path; use a local path",
    "zip://rows.jsonl::rows.zip": "unknown scheme 'zip'",
    "simplecache::file:///rows.jsonl": "unknown scheme 'simplecache::file'",
    "simplecache::s3://bucket/rows.jsonl": "unknown scheme 'simplecache::s3'",
    "github://org:repo@/rows.jsonl": "unknown scheme 'github'",
    "webhdfs://host/rows.jsonl": "unknown scheme",
    "git+https://host/rows.jsonl": "unknown scheme",
    "://rows.jsonl": "unknown scheme ''",
    "s3:/bucket/rows.jsonl": "write s3://bucket/rows.jsonl",
    "s3:bucket/rows.jsonl": "write s3://bucket/rows.jsonl",
    "S3://bucket/rows.jsonl": r"did you mean s3://\?",
    "s3://": "doesn't name a bucket; write s3://BUCKET/path",
    "s3:///rows.jsonl": "doesn't name a bucket",
    "gs://": "doesn't name a bucket",
    "hf:org/name": "write hf://org/name",
    "hf://": "not a dataset of the Hub",
    "file:/rows.jsonl": "write file:///rows.jsonl",
    "FILE:///rows.jsonl": r"did you mean file://\?",
    "file://host/rows.jsonl": "has the whole path; write file:///folder/file",
    "file://localhost/no-such/rows.jsonl": r"^/no-such/rows.jsonl does not exist",
    "file:///no-such/rows.jsonl": r"^/no-such/rows.jsonl does not exist",
    "//host/rows.jsonl": "does not exist",
    "art://no-such": "nothing is registered",
}


@pytest.mark.parametrize(("path", "words"), ODD.items(), ids=ODD)
def test_odd_addresses(host, tmp_path, path, words):
    path = path.replace("HOST", host)
    blend = tmp_path / "blend.json"
    blend.write_text(json.dumps({"datasets": [{"name": "a", "path": path}]}))
    with pytest.raises((InputError, RunError), match=words) as raised:
        find(load_blend(str(blend)).datasets[0])
    assert re.fullmatch(r"[^\n]{20,600}", str(raised.value))
    assert "secret" not in str(raised.value)


def test_files_without_ranges_of_any_size(host, monkeypatch):
    monkeypatch.setattr(web, "MAX_WHOLE_BYTES", 1000)
    with pytest.raises(InputError, match=r"does not give parts of its .* bytes; download it"):
        find(DataSource(name="a", path=f"{host}/whole/rows.jsonl"))


def test_web_servers_are_not_written_to(host):
    with pytest.raises(InputError, match="only source files are read from web servers"):
        filesystem(f"{host}/out")


def test_a_whole_file_is_asked_for_once(host, monkeypatch):
    (file,) = find(DataSource(name="a", path=f"{host}/whole/rows.jsonl")).files
    monkeypatch.setattr(Server, "requests", 0)
    stream = opening.open_source(file, cache="none")
    assert [stream.read(5), stream.read(5)] == [LINES[:5], LINES[5:10]]
    assert Server.requests == 1
