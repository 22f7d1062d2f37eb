"""A real S3-speaking server on loopback that fails as stores do: it refuses, breaks off, and forgets to answer.

Between moto and its clients stands a layer that, for some requests, does one of these instead:

    slow     answers 503 SlowDown, and does nothing
    cut      takes half of an upload, then closes the connection, and does nothing
    unsaid   does what was asked, and closes the connection without an answer
    torn     sends half of what was asked for, then closes the connection
    expired  answers 400 ExpiredToken, and does nothing      } only if asked for
    denied   answers 403 InvalidAccessKeyId, and does nothing }

Whether a request fails depends on the seed, on what is asked for, and on how often that was asked before, and not on the order
in which workers ask. None fails more than `IN_A_ROW` times in a row, so a client that tries often enough comes through.

    with flaky_server() as server, used_here(server):
        server.faults.clear(rate=0.2, seed=1)
        ...
        server.faults.counts["slow"]

The buckets that `server.bucket()` makes keep every version of every object: what any reader could ever have seen.
"""

import io
import socket
import threading
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

import boto3
import botocore.retryhandler
import fsspec
import moto.s3.models
import pytest
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from s3fs.core import S3File
from tokenmill.tasks.shards import publish as publish_module
from werkzeug.serving import make_server
from xxhash import xxh3_64_intdigest

KINDS = ("slow", "cut", "unsaid", "torn")
IN_A_ROW = 3
ONE = 1 << 64
ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
OTHERWISE = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE")
"""What would make another user of the same environment."""


@dataclass
class Faults:
    """Which requests fail, at what rate, and what was done so far: how many of each kind, and each with its request.

    From request number `down_from` on, all fail for which there is a kind.
    """

    rate: float = 0.0
    seed: int = 0
    kinds: tuple[str, ...] = KINDS
    down_from: int | None = None
    counts: Counter = field(default_factory=Counter)
    log: list = field(default_factory=list)
    asked: Counter = field(default_factory=Counter)
    _failed: Counter = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, environ):
        """What is to go wrong with a request, or None."""
        asked = request_of(environ)
        possible = [kind for kind in self.kinds if kind in kinds_for(environ)]
        with self._lock:
            self.counts["requests"] += 1
            self.counts["bytes received"] += int(environ.get("CONTENT_LENGTH") or 0)
            self.asked[asked] += 1
            kind = self._chosen(asked, possible) if possible else None
            self._failed[asked] = self._failed[asked] + 1 if kind else 0
            if kind:
                self.counts[kind] += 1
                self.log.append((kind, asked))
        return kind

    def _chosen(self, asked, possible):
        drawn = xxh3_64_intdigest(f"{self.seed} {self.asked[asked]} {asked}".encode())
        unlucky = drawn < self.rate * ONE and self._failed[asked] < IN_A_ROW
        down = self.down_from is not None and self.counts["requests"] >= self.down_from
        return possible[drawn % len(possible)] if unlucky or down else None

    def clear(self, **chosen):
        """Forget what was done, and go on with what is `chosen` now."""
        fresh = Faults(**chosen)
        for name in ("rate", "seed", "kinds", "down_from", "counts", "log", "asked", "_failed"):
            setattr(self, name, getattr(fresh, name))


def request_of(environ):
    """What is asked for, the same in every run: the ids of uploads are drawn at random."""
    query = [(name, value) for name, value in parse_qsl(environ["QUERY_STRING"], keep_blank_values=True)]
    named = sorted(f"{name}={value}" for name, value in query if name != "uploadId")
    return " ".join([environ["REQUEST_METHOD"], environ["PATH_INFO"], *named, environ.get("HTTP_RANGE", "")])


def kinds_for(environ):
    """What can go wrong with a request: only uploads can be cut, only downloads torn."""
    answers = {"slow", "unsaid", "expired", "denied"}
    if environ["REQUEST_METHOD"] == "GET":
        return answers | {"torn"}
    return answers | {"cut"} if int(environ.get("CONTENT_LENGTH") or 0) > 1 else answers


class FlakyApplication:
    """moto, seen through `faults`."""

    def __init__(self, faults):
        self.faults = faults
        self.application = DomainDispatcherApplication(create_backend_app)
        self.turns = threading.Lock()

    def __call__(self, environ, start_response):
        kind = self.faults.of(environ)
        if kind is None:
            return self.moto(environ, start_response)
        return getattr(self, kind)(environ, start_response)

    def moto(self, environ, start_response):
        """What moto does, one request at a time: `If-None-Match` is no promise where two may ask at once."""
        environ["wsgi.input"] = io.BytesIO(body_of(environ))
        with self.turns:
            return self.application(environ, start_response)

    def slow(self, environ, start_response):
        return self.answer(environ, start_response, "503 Slow Down", "SlowDown", "Please reduce your request rate.")

    def expired(self, environ, start_response):
        return self.answer(environ, start_response, "400 Bad Request", "ExpiredToken", "The token has expired.")

    def denied(self, environ, start_response):
        return self.answer(environ, start_response, "403 Forbidden", "InvalidAccessKeyId", "There is no such key.")

    @staticmethod
    def answer(environ, start_response, status, code, message):
        body_of(environ)
        content = ERROR.format(code, message).encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))])
        return [content] if environ["REQUEST_METHOD"] != "HEAD" else []

    def cut(self, environ, start_response):
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]) // 2)
        hang_up(environ)

    def unsaid(self, environ, start_response):
        close(self.moto(environ, lambda *_: None))
        hang_up(environ)

    def torn(self, environ, start_response):
        sent = self.moto(environ, start_response)
        content = b"".join(sent)
        close(sent)
        yield content[: len(content) // 2]
        hang_up(environ)


def body_of(environ):
    """What was sent, whose length is told unless it comes in chunks."""
    stream = environ["wsgi.input"]
    return (
        stream.read() if environ.get("wsgi.input_terminated") else stream.read(int(environ.get("CONTENT_LENGTH") or 0))
    )


def close(sent):
    for _ in sent:
        pass
    if hasattr(sent, "close"):
        sent.close()


def hang_up(environ):
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


class Handler(MotoRequestHandler):
    def run_wsgi(self):
        super().run_wsgi()
        self.close_connection = True

    def log(self, *arguments):
        pass


@dataclass(frozen=True)
class FlakyServer:
    """Where the server is, and what goes wrong with it."""

    url: str
    faults: Faults

    @contextmanager
    def paused(self):
        """A client, in a context in which nothing fails."""
        kinds, self.faults.kinds = self.faults.kinds, ()
        try:
            yield boto3.client("s3", endpoint_url=self.url)
        finally:
            self.faults.kinds = kinds

    def bucket(self, name):
        """A new bucket that keeps every version of every object; its URL. All servers of a process share their buckets."""
        with self.paused() as client:
            client.create_bucket(Bucket=name)
            client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        return f"s3://{name}"

    def upload(self, folder, place):
        """Put the files of a local folder, and of those in it, below `place`."""
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        with self.paused() as client:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    client.put_object(Bucket=bucket, Key=f"{prefix}/{path.relative_to(folder)}", Body=path.read_bytes())

    def versions(self, bucket):
        """Every content that any object of a bucket ever had, by its key, the latest first."""
        found = defaultdict(list)
        with self.paused() as client:
            for page in client.get_paginator("list_object_versions").paginate(Bucket=bucket):
                for each in page.get("Versions", []):
                    asked = {"Bucket": bucket, "Key": each["Key"], "VersionId": each["VersionId"]}
                    found[each["Key"]].append(client.get_object(**asked)["Body"].read())
        return found

    def keys(self, bucket):
        """The keys of the objects that are in a bucket now."""
        with self.paused() as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
            return {each["Key"] for page in pages for each in page.get("Contents", [])}

    def pending(self, bucket):
        """The uploads that were begun and neither completed nor given up."""
        with self.paused() as client:
            return client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])


@contextmanager
def flaky_server(**faults):
    """A server of its own on a free port; `faults` as in `Faults`."""
    application = FlakyApplication(Faults(**faults))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield FlakyServer(f"http://127.0.0.1:{server.server_port}", application.faults)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def used_here(server):
    """A context in which this process and its children are users of `server`, and do not wait before they try again."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": server.url}.items():
            patched.setenv(name, value)
        for name in OTHERWISE:
            patched.delenv(name, raising=False)
        patched.setattr(botocore.retryhandler, "delay_exponential", lambda **_: 0.0)
        forget_connections()
        yield
        forget_connections()


@contextmanager
def moto_here():
    """The end point of a server that never fails, and is what every `s3://` address of this process means."""
    with flaky_server(kinds=()) as server, used_here(server):
        yield server.url


def forget_connections():
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@contextmanager
def small_parts(size):
    """A context in which this process, and `server`, upload in parts of `size` bytes what is longer, instead of 50 MiB."""
    initialize = S3File.__init__

    def with_small_parts(self, *arguments, **keywords):
        initialize(self, *arguments, **keywords)
        if self.writable():
            self.blocksize = size

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(S3File, "__init__", with_small_parts)
        patched.setattr(publish_module, "PART", size // 2)
        patched.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)
        yield
