"""A Hugging Face hub on loopback, as far as `huggingface_hub` needs one to list and read data sets.

Every `commit` takes a folder as it is and moves `main`. It answers repository information, trees, path information,
access checks and file contents (HEAD, GET, ranges), with the error codes that the hub sends, and logs each request.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = 200
"""Files of this many bytes and more are kept in LFS, as the hub does from a few megabytes on."""

EXPIRED = "hf_expired"
"""A token that is no longer good."""


@dataclass
class Repository:
    name: str
    gated: bool = False
    members: set[str] = field(default_factory=set)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, folder: Path, branch: str = "main") -> str:
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        sha = hashlib.sha1(repr((self.name, len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None

    def information(self, sha: str) -> dict:
        files = self.commits[sha]
        _, _, after = files.get("README.md", b"").decode().partition("---\n")
        return {
            "id": self.name,
            "sha": sha,
            "private": False,
            "gated": "manual" if self.gated else False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "cardData": yaml.safe_load(after.partition("---\n")[0]) or {},
            "siblings": [_sibling(path, content) for path, content in files.items()],
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
                entries[name] = {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
            if recursive or len(parts) == 1:
                entries[path] = _entry(path, content)
        return list(entries.values())


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    failing: bool = False

    def repository(self, name: str, **options) -> Repository:
        return self.repositories.setdefault(name, Repository(name, **options))


def _lfs(content: bytes) -> dict | None:
    if len(content) < LARGE:
        return None
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _sibling(path: str, content: bytes) -> dict:
    lfs = {"lfs": _lfs(content)} if _lfs(content) else {}
    return {"rfilename": path, "size": len(content), "blobId": _blob(content), **lfs}


def _entry(path: str, content: bytes) -> dict:
    lfs = _lfs(content)
    more = {"lfs": {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 130}} if lfs else {}
    return {"type": "file", "path": path, "size": len(content), "oid": _blob(content), **more}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        form = parse_qs(self.rfile.read(length).decode())
        url = urlsplit(self.path)
        self.hub.requests.append((self.command, unquote(url.path), self.headers.get("Range")))
        if self.hub.failing:
            self.refuse(503, "ServiceUnavailable", "the hub is down")
        else:
            # Segments are unquoted one by one: the revision refs/pr/1 is one segment, refs%2Fpr%2F1.
            self.route([unquote(part) for part in url.path.strip("/").split("/")], {**parse_qs(url.query), **form})

    do_HEAD = do_GET  # noqa: N815 - http.server's names
    do_POST = do_GET  # noqa: N815

    def route(self, parts: list[str], query: dict[str, list[str]]):
        kind, organisation, name, *rest = parts[1:] if parts[0] == "api" else parts
        verb, revision, *inside = rest if len(rest) > 1 else [*(rest or ["revision"]), "main"]
        repository = self.hub.repositories.get(f"{organisation}/{name}") if kind == "datasets" else None
        sha = repository and repository.resolve(revision)
        if refusal := self.refusal(repository, sha, verb):
            self.refuse(*refusal)
        elif verb == "auth-check":
            self.send(200, b"{}")
        elif verb == "resolve":
            self.content(sha, repository.commits[sha].get("/".join(inside)))
        else:
            self.answer(self.metadata(repository, sha, verb, "/".join(inside), query))

    def refusal(self, repository: Repository | None, sha: str | None, verb: str) -> tuple[int, str | None, str] | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token == EXPIRED:
            return 401, None, "Invalid credentials in Authorization header"
        if repository is None:
            # Who has not logged in is not told whether a private repository exists.
            return (
                (404, "RepoNotFound", "Repository not found") if token else (401, None, "Invalid username or password.")
            )
        if verb in {"auth-check", "resolve"} and repository.gated and token not in repository.members:
            return 403, "GatedRepo", f"Access to dataset {repository.name} is restricted."
        return None if sha else (404, "RevisionNotFound", "Invalid rev id")

    def metadata(self, repository: Repository, sha: str, verb: str, inside: str, query: dict[str, list[str]]):
        if verb == "tree":
            return repository.tree(sha, inside, query.get("recursive") == ["true"])
        if verb == "paths-info":
            files = repository.commits[sha]
            return [_entry(path, files[path]) for path in query["paths"] if path in files]
        return repository.information(sha)

    def content(self, sha: str, content: bytes | None):
        if content is None:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_blob(content)}"', "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if not wanted:
            return self.send(200, content, headers)
        first, last = wanted.removeprefix("bytes=").split("-")
        stop = min(int(last) + 1, len(content)) if last else len(content)
        headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
        return self.send(206, content[int(first) : stop], headers)

    def answer(self, document):
        self.send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def refuse(self, status: int, code: str | None, message: str):
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.send(status, json.dumps({"error": message}).encode(), headers)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments):
        """Keeps quiet: requests are logged in the hub."""


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub without repositories, at a free port, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
