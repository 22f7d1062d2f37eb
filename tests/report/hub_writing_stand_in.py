"""The write side of the hub on loopback: repositories are made, asked for, uploaded to and committed to.

Who writes must be known (WRITER), who reads a private repository too. Large files are taken only in the way of Git LFS
(https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md), and only if their SHA-256 is what was announced; a
commit is NDJSON, must name its parent if it names any, and can only refer to content that is there. `failures` are
answers to give instead, by the kind of request, one for each time, None for the usual one.
"""

import base64
import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatch
from urllib.parse import unquote, urlsplit

from tests.hub_server import EXPIRED, LARGE, Handler, Hub, Repository, _blob, serve

WRITER, READER = "hf_writer", "hf_reader"
"""Tokens: of who may write to `org`, and of who may only read there."""


@dataclass
class WritableRepository(Repository):
    objects: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        return self.branches["main"]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.head]

    def commit_files(self, files: dict[str, bytes], message: str = "") -> str:
        self.messages.append(message)
        return self.commit(files)


@dataclass
class WritableHub(Hub):
    failures: dict[str, list[int | None]] = field(default_factory=lambda: defaultdict(list))
    writes: Counter = field(default_factory=Counter)
    received: int = 0
    visible_when_created: str | None = None

    def create(self, name: str, *, private: bool = True, files: dict[str, bytes] | None = None) -> WritableRepository:
        repository = WritableRepository(name, private=private, members={WRITER, READER})
        repository.commit_files({".gitattributes": b"*.parquet filter=lfs\n", **(files or {})})
        self.datasets[name] = repository
        return repository


class _WritingHandler(Handler):
    hub: WritableHub

    def refusal(self, repository, sha, verb):
        if self.token not in {WRITER, READER, EXPIRED, ""}:
            return 401, "RepoNotFound", "Invalid username or password."
        return super().refusal(repository, sha, verb)

    def do_POST(self):  # noqa: N802 - http.server's names
        path = unquote(urlsplit(self.path).path).strip("/")
        kind = next((name for name in _POSTS if fnmatch(path, _POSTS[name])), None)
        if kind is None:
            return super().do_GET()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if kind == "validate":
            return self.answer({"errors": [], "warnings": []})
        if not self.allowed(kind):
            return None
        return getattr(self, kind)(path.split("/"), body)

    def do_PUT(self):  # noqa: N802
        content = self.rfile.read(int(self.headers["Content-Length"]))
        _, organisation, name, oid = unquote(self.path).strip("/").split("/")
        if not self.allowed("put"):
            return
        if hashlib.sha256(content).hexdigest() != oid:
            self.refuse(400, None, "the content has another SHA-256")
            return
        self.hub.received += len(content)
        self.hub.datasets[f"{organisation}/{name}"].objects[oid] = content
        self.send(200, b"")

    def allowed(self, kind):
        if failures := self.hub.failures[kind]:
            status = failures.pop(0)
            if status is not None:
                self.refuse(status, None, f"injected into {kind}")
                return False
        if kind != "put" and self.token != WRITER:
            self.refuse(403, None, "this token has no write access")
            return False
        self.hub.writes[kind] += 1
        return True

    def create(self, parts, body):
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if asked["type"] != "dataset" or name in self.hub.datasets:
            return self.refuse(409, None, "You already created this dataset repo")
        visibility = self.hub.visible_when_created or asked.get("visibility", "public")
        self.hub.create(name, private=visibility == "private")
        return self.answer({"url": f"{self.hub.url}/datasets/{name}"})

    def repository(self, parts):
        return self.hub.datasets["/".join(parts[-4:-2])]

    def preupload(self, parts, body):
        repository = self.repository(parts)
        return self.answer({"files": [self.mode(repository, file) for file in json.loads(body)["files"]]})

    def mode(self, repository, file):
        there = repository.files.get(file["path"])
        mode = "lfs" if file["size"] >= LARGE else "regular"
        oid = there and (hashlib.sha256(there).hexdigest() if len(there) >= LARGE else _blob(there))
        ignored = any(fnmatch(file["path"], pattern) for pattern in repository.ignored)
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": ignored, "oid": oid}

    def batch(self, parts, body):
        name = "/".join(parts[1:3]).removesuffix(".git")
        held = self.hub.datasets[name].objects
        objects = []
        for each in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{name}/{each['oid']}"}}
            objects.append(each if each["oid"] in held else {**each, "actions": upload})
        return self.answer({"transfer": "basic", "objects": objects})

    def commit(self, parts, body):
        repository = self.repository(parts)
        lines = [json.loads(line) for line in body.splitlines()]
        header, files = lines[0]["value"], dict(repository.files)
        if header.get("parentCommit", repository.head) != repository.head:
            return self.refuse(412, None, "A commit has happened since. Please refresh and try again.")
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "file":
                content = base64.b64decode(value["content"])
                assert len(content) < LARGE
                files[value["path"]] = content
                self.hub.received += len(content)
            else:
                assert line["key"] == "lfsFile"
                files[value["path"]] = repository.objects[value["oid"]]
        sha = repository.commit_files(files, header["summary"])
        return self.answer(
            {"commitUrl": f"{self.hub.url}/datasets/{repository.name}/commit/{sha}", "commitOid": sha, "success": True}
        )


_POSTS = {
    "create": "api/repos/create",
    "validate": "api/validate-yaml",
    "preupload": "api/datasets/*/preupload/main",
    "batch": "datasets/*/info/lfs/objects/batch",
    "commit": "api/datasets/*/commit/main",
}


def serve_writable():
    """A hub that can be written to, without repositories, at a free port, until the block ends."""
    return serve(WritableHub, _WritingHandler)
