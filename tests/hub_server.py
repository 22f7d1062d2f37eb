"""A Hugging Face hub on loopback that speaks to the real clients: huggingface_hub, transformers and datasets.

    with serve() as hub:                                  # or the fixture `hub`, in which this process is a client of it
        qwen = hub.model("Qwen/Qwen2.5-7B", {"tokenizer.json": content, "config.json": "{}"})
        rows = hub.dataset("org/rows", {"README.md": card, "data/train.jsonl": "…"})
        rows.commit({"data/train.jsonl": "…"}, "v2")      # a commit on a branch; its id
        hub.renamed["models/bert-base-uncased"] = "google-bert/bert-base-uncased"
        hub.fault("*/resolve/*/tokenizer.json", 503, times=2)
        hub.fault("*/resolve/*/tokenizer.json", lambda: qwen.commit({…}))     # what happens before it is answered
        hub.requests                                      # every request, in order

It answers information about models and datasets, trees, path information, access checks and files (HEAD, GET, ranges). A file of
LARGE bytes and more is kept in LFS: `resolve` redirects to a second host. Without a token nobody is told whether a private
repository exists (401); a gated one shows its metadata, but no file.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
import yaml
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http, close_session
from tokenmill.tasks.sources import hub_client

LARGE = 200
"""Files of this many bytes and more are kept in LFS, as the hub does from a few megabytes on."""

EXPIRED = "hf_expired"
"""A token that is no longer good."""

SECOND_HOST = "localhost"
"""The same server under a name that is a different origin to clients: they must not send tokens there."""

OWN_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE")
"""What in the environment would make a client of a different hub, cache or account."""

RATE_LIMIT = {"Retry-After": "1"}


class Request(NamedTuple):
    """A request as it came: `path` unquoted, without its query; `token` as sent, `host` without its port."""

    method: str
    path: str
    range: str | None
    token: str | None
    host: str


class Fault(NamedTuple):
    """Instead of an answer to requests whose path matches: a status, "cut" (half of a body), "login page", or a call before it."""

    path: str
    does: int | str | Callable[[], object]
    method: str
    headers: Mapping[str, str]


@dataclass
class Repository:
    """A repository; `commits` are its files by commit, oldest first, `branches` the commits of branches, tags and refs."""

    name: str
    gated: bool = False
    private: bool = False
    members: set[str] = field(default_factory=set)
    default_branch: str = "main"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Path | Mapping[str, bytes | str], branch: str | None = None) -> str:
        """Make `files`, a folder or contents by path, the next commit of a branch; its id."""
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()
            }
        kept = {path: content.encode() if isinstance(content, str) else content for path, content in files.items()}
        names = sorted((path, _sha256(content)) for path, content in kept.items())
        sha = hashlib.sha1(repr((self.name, len(self.commits), names)).encode()).hexdigest()
        self.commits[sha] = kept
        self.branches[branch or self.default_branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None

    def information(self, sha: str, sizes: bool) -> dict:
        files = self.commits[sha]
        _, _, after = files.get("README.md", b"").decode().partition("---\n")
        return {
            "id": self.name,
            "sha": sha,
            "private": self.private,
            "gated": "manual" if self.gated else False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "cardData": yaml.safe_load(after.partition("---\n")[0]) or {},
            "siblings": [_sibling(path, content) if sizes else {"rfilename": path} for path, content in files.items()],
        }

    def tree(self, sha: str, folder: str, recursive: bool) -> list[dict]:
        prefix = f"{folder}/" if folder else ""
        entries = {}
        for path, content in self.commits[sha].items():
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts)) if recursive else range(1, min(len(parts), 2)):
                name = prefix + "/".join(parts[:depth])
                entries[name] = _folder(name)
            if recursive or len(parts) == 1:
                entries[path] = _entry(path, content)
        return list(entries.values())

    def paths_info(self, sha: str, paths: list[str]) -> list[dict]:
        files = self.commits[sha]
        folders = [path for path in paths if any(name.startswith(f"{path.rstrip('/')}/") for name in files)]
        return [_entry(path, files[path]) for path in paths if path in files] + [_folder(path) for path in folders]


@dataclass
class Hub:
    """The repositories, what goes wrong, and what was asked for. `waits`: the seconds that clients wanted to wait."""

    url: str
    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def model(self, name: str, files: Path | Mapping[str, bytes | str] | None = None, **options) -> Repository:
        return self._repository(self.models, name, files, options)

    def dataset(self, name: str, files: Path | Mapping[str, bytes | str] | None = None, **options) -> Repository:
        return self._repository(self.datasets, name, files, options)

    def _repository(self, of, name, files, options):
        repository = of.setdefault(name, Repository(name, **options))
        if files is not None:
            repository.commit(files)
        return repository

    def fault(self, path: str, does, *, times: int = 1, method: str = "*", headers: Mapping[str, str] | None = None):
        """Let the next `times` requests whose path matches a pattern fail: a status, "cut", or a call before the answer."""
        self.faults += [Fault(path, does, method, headers or {})] * times

    def next_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for number, fault in enumerate(self.faults):
                if fnmatch(path, fault.path) and fnmatch(method, fault.method):
                    return self.faults.pop(number)
        return None


@cache
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache
def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _sibling(path: str, content: bytes) -> dict:
    lfs = {"sha256": _sha256(content), "size": len(content), "pointerSize": 130}
    more = {"lfs": lfs} if len(content) >= LARGE else {}
    return {"rfilename": path, "size": len(content), "blobId": _blob(content), **more}


def _entry(path: str, content: bytes) -> dict:
    lfs = {"oid": _sha256(content), "size": len(content), "pointerSize": 130}
    more = {"lfs": lfs} if len(content) >= LARGE else {}
    return {"type": "file", "path": path, "size": len(content), "oid": _blob(content), **more}


def _folder(path: str) -> dict:
    return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}


class Handler(BaseHTTPRequestHandler):
    """Answers requests with what is in `hub`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one segment for head and body
    hub: Hub
    cut = False

    @property
    def token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        path, host = unquote(url.path), self.headers.get("Host", "").partition(":")[0]
        if path == "/api/agent-harnesses":  # the client asks once per process, whatever it is used for
            return self.refuse(404, None, "not here")
        with self.hub.lock:
            self.hub.requests.append(Request(self.command, path, self.headers.get("Range"), self.token or None, host))
        fault = self.hub.next_fault(self.command, path)
        self.cut = bool(fault and fault.does == "cut")
        if fault and isinstance(fault.does, int):
            return self.refuse(fault.does, None, "the hub is down", RATE_LIMIT | {**fault.headers})
        if fault and fault.does == "login page":
            return self.send(200, b"<html>Log in</html>", {"Content-Type": "text/html"})
        if fault and callable(fault.does):
            fault.does()
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        form = json.loads(body) if is_json and body else parse_qs(body.decode(errors="replace"))
        # Segments are unquoted one by one: the revision refs/pr/1 is one segment, refs%2Fpr%2F1.
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        return self.route(parts, {**parse_qs(url.query, keep_blank_values=True), **form}, url.query)

    do_HEAD = do_GET  # noqa: N815 - http.server's names
    do_POST = do_GET  # noqa: N815

    def route(self, parts: list[str], query: dict, raw: str):
        if parts[0] == "lfs":
            return self.stored(*parts[1:5], "/".join(parts[5:]))
        is_api = parts[0] == "api"
        rest = parts[1:] if is_api else parts
        kind, rest = (rest[0], rest[1:]) if rest[0] in {"models", "datasets"} else ("models", rest)
        for length in (1, 2):
            if to := self.hub.renamed.get(f"{kind}/{'/'.join(rest[:length])}"):
                prefix = f"/api/{kind}" if is_api else "/datasets" if kind == "datasets" else ""
                tail = "".join(f"/{quote(part, safe='')}" for part in rest[length:])
                return self.send(307, b"", {"Location": f"{prefix}/{to}{tail}" + (f"?{raw}" if raw else "")})
        return self.found(kind, rest, query)

    def found(self, kind: str, rest: list[str], query: dict):
        repository = getattr(self.hub, kind).get("/".join(rest[:2]))
        verb, *inside = rest[2:] or ["revision"]
        revision = inside.pop(0) if inside else repository.default_branch if repository else "main"
        sha = repository and repository.resolve(revision)
        if refusal := self.refusal(repository, sha, verb):
            return self.refuse(*refusal)
        if verb == "auth-check":
            return self.send(200, b"{}")
        if verb == "resolve":
            return self.content(sha, repository.commits[sha].get("/".join(inside)), [kind, *rest[:2], sha, *inside])
        if verb == "tree":
            return self.answer(repository.tree(sha, "/".join(inside), query.get("recursive") in (["true"], ["True"])))
        if verb == "paths-info":
            return self.answer(repository.paths_info(sha, query["paths"]))
        return self.answer(repository.information(sha, sizes="blobs" in query))

    def refusal(self, repository: Repository | None, sha: str | None, verb: str) -> tuple[int, str | None, str] | None:
        if self.token == EXPIRED:
            return 401, None, "Invalid credentials in Authorization header"
        if repository is None or (repository.private and self.token not in repository.members):
            # Who has not logged in is not told whether a private repository exists.
            missing = (404, "RepoNotFound", "Repository not found")
            return missing if self.token else (401, "RepoNotFound", "Invalid username or password.")
        if verb in {"auth-check", "resolve"} and repository.gated and self.token not in repository.members:
            return 403 if self.token else 401, "GatedRepo", f"Access to {repository.name} is restricted."
        return None if sha else (404, "RevisionNotFound", "Invalid rev id")

    def content(self, sha: str, content: bytes | None, place: list[str]):
        """A file of a commit, or where it is stored."""
        commit = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if content is None:
            return self.refuse(404, "EntryNotFound", "Entry not found", commit)
        if len(content) < LARGE:
            return self.span(content, {**commit, "ETag": f'"{_blob(content)}"'})
        oid = _sha256(content)
        linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{oid}"'}
        host = self.hub.url.replace("127.0.0.1", SECOND_HOST)
        return self.send(302, b"", {**commit, **linked, "Location": f"{host}/lfs/{quote('/'.join(place))}"})

    def stored(self, kind: str, organization: str, name: str, sha: str, path: str):
        """A file as the second host has it."""
        content = getattr(self.hub, kind)[f"{organization}/{name}"].commits[sha][path]
        self.span(content, {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Accept-Ranges": "bytes"})

    def span(self, content: bytes, headers: dict[str, str]):
        wanted = self.headers.get("Range")
        if not wanted:
            return self.send(200, content, headers)
        first, last = wanted.removeprefix("bytes=").split("-")
        if int(first) >= len(content):
            return self.send(416, b"", {**headers, "Content-Range": f"bytes */{len(content)}"})
        stop = min(int(last) + 1, len(content)) if last else len(content)
        headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
        return self.send(206, content[int(first) : stop], headers)

    def answer(self, document, headers: Mapping[str, str] | None = None):
        self.send(200, json.dumps(document).encode(), {"Content-Type": "application/json", **(headers or {})})

    def refuse(self, status: int, code: str | None, message: str, headers: Mapping[str, str] | None = None):
        named = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.send(status, json.dumps({"error": message}).encode(), {**named, **(headers or {})})

    def send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if self.cut else body)
        self.close_connection = self.close_connection or self.cut

    def log_message(self, *arguments):
        """Keeps quiet: requests are logged in the hub."""


@contextmanager
def serve(hub_type: type[Hub] = Hub, handler: type[Handler] = Handler) -> Iterator[Hub]:
    """A hub without repositories, at a free port, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub = hub_type(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = type("BoundHandler", (handler,), {"hub": hub})
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """The environment of a child that is a client of `hub` with an empty cache below `home`."""
    kept = {name: value for name, value in os.environ.items() if name not in OWN_NAMES}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def used_here(hub: Hub, home: Path) -> Iterator[None]:
    """A context in which this process and its children are clients of `hub`, with a cache below `home`, and never wait.

    The libraries read the environment once, when they are imported, so their constants are set as well.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name in OWN_NAMES:
            patched.delenv(name, raising=False)
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}.items():
            patched.setenv(name, value)
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            patched.setattr(constants, name, value)
        for module in (_http, file_download, hub_client):
            patched.setattr(module, "time", SimpleNamespace(**vars(time) | {"sleep": hub.waits.append}))
        close_session()  # which remembers proxies
        yield
    close_session()
