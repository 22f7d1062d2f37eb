import http.server
import logging
import socket
import threading

import fsspec
import pytest
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.sources import opening
from tokenmill.tasks.sources.discovery import discover, find
from tokenmill.tasks.sources.formats import read_texts
from tokenmill.tasks.sources.slices import ContentIndex, cut
from tokenmill.tasks.storage import filesystem

from tests.flaky_storage import moto_here

LINE = b'{"text": "a"}\n'
NAMES = [
    "corpus/High-Quality-Synthetic/train.jsonl",
    "corpus/High-Quality/test.jsonl.gz",
    "corpus/High-Quality/train.jsonl",
    "corpus/lines.json",
]


@pytest.fixture(scope="module")
def s3_server():
    with moto_here() as place:
        yield place


@pytest.fixture
def s3(s3_server):
    """An empty bucket called `bucket`; gives its URL."""
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    store.mkdir("bucket")
    store.clear_instance_cache()
    yield "s3://bucket"
    store.rm("bucket", recursive=True)
    store.clear_instance_cache()


@pytest.fixture(scope="module")
def gs_server():
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    yield server, f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def gs(gs_server, monkeypatch):
    """The environment of a user of an emulated Google Cloud Storage with an empty bucket; gives its URL."""
    server, endpoint = gs_server
    server.wipe(keep_buckets=True)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    monkeypatch.setattr(logging.getLogger("gcsfs"), "disabled", True)
    yield "gs://bucket"
    fsspec.get_filesystem_class("gs").clear_instance_cache()


@pytest.fixture(params=["s3", "gs"])
def bucket(request):
    url = request.getfixturevalue(request.param)
    store, _ = filesystem(url)
    store.pipe({f"{url}/{name}": LINE for name in NAMES})
    store.pipe({f"{url}/corpus/notes.md": b"x", f"{url}/corpus/.tmp/x.jsonl": LINE, f"{url}/corpus/dir.jsonl/": b""})
    return url


def found(url, **fields):
    return discover(DataSource(name="some", path=url, **fields))


def names(url, path, **fields):
    return [file.uri.removeprefix(f"{url}/") for file in found(f"{url}/{path}", **fields)]


def refusal(url, **fields):
    with pytest.raises(InputError) as refused:
        found(url, **fields)
    return str(refused.value)


def test_a_prefix_is_a_folder_a_file_or_a_glob(bucket):
    assert names(bucket, "corpus") == NAMES
    assert names(bucket, "") == NAMES
    assert find(DataSource(name="some", path=f"{bucket}/corpus")).skipped == {".md": 1, "hidden": 1}
    assert names(bucket, "corpus/High-Quality") == NAMES[1:3]
    assert names(bucket, "corpus/High-Quality/train.jsonl") == NAMES[2:3]
    assert names(bucket, "corpus/*/train.jsonl") == [NAMES[0], NAMES[2]]
    assert names(bucket, "**/*.jsonl.gz") == NAMES[1:2]
    assert names(bucket, "corpus", subset="High-Quality", split="train") == NAMES[2:3]


def test_found_objects_can_be_read_whole_and_in_part(bucket):
    files = found(f"{bucket}/corpus")
    plain = ("jsonl", None)
    assert [(file.format, file.compression) for file in files] == [plain, ("jsonl", "gzip"), plain, plain]
    for file in files:
        store, path = filesystem(file.uri)
        assert store.cat_file(path) == LINE
        assert file.size == len(LINE)
        with store.open(path, "rb") as handle:
            handle.seek(2)
            assert handle.read(4) == LINE[2:6]


def test_version_changes_with_the_content(bucket):
    url = f"{bucket}/corpus/High-Quality/train.jsonl"
    store, path = filesystem(url)
    (before,) = found(url)
    assert before == next(file for file in found(f"{bucket}/corpus") if file.uri == url)
    store.pipe(path, LINE.replace(b"a", b"b"))
    (changed,) = found(url)
    store.pipe(path, LINE)
    (restored,) = found(url)
    assert before.version
    assert changed.version != before.version
    assert restored.version == before.version


def test_an_s3_version_is_its_etag_without_quotes(s3):
    # For an object that was put in one piece, S3 defines the etag as the MD5 of the content.
    store, _ = filesystem(s3)
    store.pipe("bucket/x.jsonl", b"hello")
    assert [file.version for file in found(s3)] == ["5d41402abc4b2a76b9719d911017c592"]


@pytest.mark.slow
def test_writes_of_other_processes_are_seen(bucket):
    before = found(f"{bucket}/corpus")
    writer = type(filesystem(bucket)[0])(skip_instance_cache=True)
    writer.pipe({f"{bucket}/corpus/later.jsonl": LINE, before[0].uri: LINE + LINE})
    (changed,) = found(before[0].uri)
    assert (changed.size, changed.version != before[0].version) == (2 * len(LINE), True)
    assert names(bucket, "corpus") == sorted([*NAMES, "corpus/later.jsonl"])


def test_missing_object_is_rejected_with_its_place(bucket):
    assert f"{bucket}/corpus/Hig" in refusal(f"{bucket}/corpus/Hig")
    missing = bucket.replace("bucket", "nowhere")
    assert f"{missing}/corpus: bucket or path not found" in refusal(f"{missing}/corpus")
    assert "notes.md" in refusal(f"{bucket}/corpus/notes.md")


def test_s3_without_credentials_names_the_remedy(s3, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert "credentials" in refusal(f"{s3}/corpus")


@pytest.fixture
def refusing():
    """A store that answers every request with the status that is set on it; gives the server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"error": {"code": %d, "message": "no"}}' % server.status
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("status", [401, 403])
def test_google_errors_become_input_errors(refusing, monkeypatch, status):
    refusing.status = status
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{refusing.server_port}")
    monkeypatch.setattr(logging.getLogger("gcsfs"), "disabled", True)
    assert "credentials" in refusal("gs://bucket/corpus")
    fsspec.get_filesystem_class("gs").clear_instance_cache()


def test_s3_errors_become_input_errors(s3, refusing, monkeypatch):
    refusing.status = 403
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{refusing.server_port}")
    assert "credentials" in refusal("s3://bucket/corpus")
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def rows(letter):
    return b'{"text": "%s"}\n' % (letter * 100) * 30_000


def reading(url):
    """The batches of an object of 3 MB, of which the first was read in a request of its own."""
    (file,) = found(url)
    (part,) = ContentIndex().identify(cut(file, 1 << 30, ["text"]), ["text"], "content")
    return read_texts(part, "text")


@pytest.fixture
def small_requests(monkeypatch):
    monkeypatch.setattr(opening, "REMOTE_BLOCK_BYTES", 1 << 18)


@pytest.mark.usefixtures("small_requests")
def test_object_replaced_before_reading_is_rejected(bucket):
    url = f"{bucket}/corpus/big.jsonl"
    store, path = filesystem(url)
    store.pipe(path, rows(b"a"))
    batches = reading(url)
    store.pipe(path, rows(b"b"))
    with pytest.raises(RunError, match=r"big\.jsonl: changed while"):
        next(batches)
    store.pipe(path, rows(b"a"))
    assert sum(batch.consumed for batch in reading(url)) == 30_000


@pytest.mark.slow
@pytest.mark.usefixtures("small_requests")
def test_object_replaced_while_reading_is_rejected(bucket):
    """Google Cloud Storage gives it a new generation; S3 refuses the request that asks for the first version."""
    url = f"{bucket}/corpus/big.jsonl"
    store, path = filesystem(url)
    for put_back in (False, True):
        store.pipe(path, rows(b"a"))
        batches = reading(url)
        next(batches)
        store.pipe(path, rows(b"b"))
        if put_back and bucket.startswith("gs://"):
            next(batches)
            store.pipe(path, rows(b"a"))
        with pytest.raises((RunError, OSError), match=r"big\.jsonl"):
            for _ in batches:
                pass
