"""What a request to a store comes to that does not answer as it should: so many tries, then an OSError that names the object."""

import errno
import os

import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.publish import publish, publish_bytes
from tokenmill.tasks.shards.retry import is_transient
from tokenmill.tasks.shards.store import read_bytes, size_of
from tokenmill.tasks.storage import filesystem

from tests.flaky_storage import flaky_server, forget_connections, small_parts, used_here

LARGE = os.urandom(30_000)
ALWAYS = {"down_from": 0}


@pytest.fixture(scope="module")
def server():
    with flaky_server() as server, used_here(server), small_parts(8_000):
        server.bucket("requests")
        yield server
        server.faults.clear()


@pytest.fixture(autouse=True)
def _undisturbed(server):
    server.faults.clear()
    publish_bytes("s3://requests/there", LARGE)
    forget_connections()


def opened(uri):
    system, path = filesystem(uri)
    with system.open(path, "rb") as stream:
        return stream.read()


def listed(uri):
    system, path = filesystem(uri)
    return system.find(path)


REQUESTS = {
    "put": lambda: publish_bytes("s3://requests/there", b"small"),
    "upload": lambda: publish_bytes("s3://requests/there", LARGE),
    "read": lambda: read_bytes("s3://requests/there"),
    "open": lambda: opened("s3://requests/there"),
    "list": lambda: listed("s3://requests/there"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "kind", "attempts"),
    [
        *((asked, "slow", attempts) for asked in REQUESTS for attempts in (2, 5)),
        *(
            (asked, "unsaid", 10) for asked in REQUESTS
        ),  # a closed connection's request, aiohttp sends once more by itself
        *((asked, "torn", 5) for asked in ("read", "open")),
    ],
)
def test_requests_that_fail_are_sent_as_often_as_botocore_does(server, monkeypatch, asked, kind, attempts):
    if attempts == 2:  # botocore's own are 5
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    server.faults.clear(kinds=(kind,), **ALWAYS)
    with pytest.raises(OSError, match="s3://requests/there") as raised:
        REQUESTS[asked]()
    assert raised.value.errno == (errno.EBUSY if kind == "slow" else errno.EIO)
    assert is_transient(raised.value)
    sent = server.faults.counts[kind]
    assert sent <= attempts if kind == "unsaid" else sent == attempts


def test_a_store_that_is_gone_is_an_error_that_names_the_object():
    with flaky_server() as gone:
        pass
    with used_here(gone):
        for asked in REQUESTS.values():
            with pytest.raises(OSError, match="s3://requests/there") as raised:
                asked()
            assert raised.value.errno == errno.EIO
    forget_connections()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slow", "cut", "unsaid", "torn"])
def test_one_failure_in_three_is_not_noticed(server, kind):
    failed = 0
    for seed in range(5):
        server.faults.clear(rate=0.34, seed=seed, kinds=(kind,))
        for name in "abc":
            publish_bytes(f"s3://requests/{name}", LARGE[seed:])
            assert read_bytes(f"s3://requests/{name}") == LARGE[seed:]
            assert opened(f"s3://requests/{name}") == LARGE[seed:]
        assert len(listed("s3://requests")) == 4
        failed += server.faults.counts[kind]
    assert failed > 5


@pytest.mark.slow
def test_interruption_remains_one_if_the_upload_cannot_be_aborted(server):
    with pytest.raises(KeyboardInterrupt), publish("s3://requests/there") as publication:  # noqa: PT012 - the block is what is left
        publication.write(LARGE[::-1])
        server.faults.clear(kinds=("slow",), **ALWAYS)
        raise KeyboardInterrupt
    server.faults.clear()
    assert read_bytes("s3://requests/there") == LARGE


@pytest.mark.slow
def test_missing_credentials_name_the_remedy(server, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    forget_connections()
    for ask in REQUESTS.values():
        with pytest.raises(PermissionError, match="put AWS credentials into the environment") as raised:
            ask()
        assert not is_transient(raised.value)
    forget_connections()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["expired", "denied"])
def test_credentials_that_expire(server, kind):
    server.faults.clear(kinds=(kind,), **ALWAYS)
    remedy = "may have expired or be wrong: renew them, then run the same command again.*s3://requests/there"
    for ask in (*REQUESTS.values(), lambda: size_of("s3://requests/there")):
        with pytest.raises(PermissionError, match=remedy) as raised:
            ask()
        assert not is_transient(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_PROFILE", "nope"),
        ("AWS_ENDPOINT_URL", "127.0.0.1:5599"),
        ("AWS_ENDPOINT_URL", "http://"),
        ("AWS_DEFAULT_REGION", "no such region"),
    ],
)
def test_mistakes_in_the_environment(server, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    if name == "AWS_DEFAULT_REGION":
        monkeypatch.delenv("AWS_ENDPOINT_URL")
    forget_connections()
    for ask in REQUESTS.values():
        with pytest.raises(InputError, match=f"^{name}: .*; correct it in the environment"):
            ask()
    forget_connections()


@pytest.mark.slow
def test_a_bucket_that_can_be_none_is_an_error_that_names_it(server):
    with pytest.raises(OSError, match="Invalid bucket name"):
        read_bytes("s3://Not_A_Bucket!/x")
