"""What the README promises of a machine on a network: a password that counts, ports of this machine alone, no pickles."""

import json
import pickletools
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.flows.prefect_commands import serving
from tests.flows.preparation_runs import TOKENMILL, finish, ran, start
from tests.preparing import write_lines

pytestmark = pytest.mark.slow

PASSWORD = "mill:stone"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server with a password: its process, address and the environment of who does not know it."""
    home = tmp_path_factory.mktemp("guarded")
    with serving(home, PREFECT_SERVER_API_AUTH_STRING=PASSWORD) as server:
        yield server.process, server.url, server.environment


def answer(url):
    """The status that a request without a password gets, None when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return None


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blend")
    write_lines(folder / "a.jsonl", ["some text", "and more"])
    (folder / "blend.json").write_text(json.dumps({"datasets": [{"name": "a", "path": "a.jsonl"}]}))
    return folder / "blend.json"


def test_without_the_password_nothing_is_run(guarded, blend, tmp_path):
    _, url, environment = guarded
    assert answer(f"{url}/version") == 401
    refused = ran(TOKENMILL, "pretrain", blend, "--output-dir", tmp_path / "out", env=environment)
    assert refused.returncode == 2, refused.stderr
    assert "rejects this password" in refused.stderr
    assert not (tmp_path / "out/blend.json").exists()


def test_password_server_listens_on_loopback_without_pickles(guarded, blend, tmp_path):
    server, _, environment = guarded

    known = SimpleNamespace(environment=environment | {"PREFECT_API_AUTH_STRING": PASSWORD})
    process = start("pretrain", blend, tmp_path / "out", known)
    heard = set()
    while process.poll() is None:
        heard |= listening(process.pid)
    assert finish(process)["documents"] == 2
    assert heard, "Dask's scheduler and workers listen while they run"
    assert heard | listening(server.pid) <= {"127.0.0.1", "::1"}
    kept = [
        path for place in (Path(environment["PREFECT_HOME"]), tmp_path) for path in place.rglob("*") if path.is_file()
    ]
    assert [path for path in kept if is_pickle(path.read_bytes())] == []


def listening(pid):
    """The addresses that a process and all it has started listen on."""
    found = set()
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return found
    for process in processes:
        try:
            found |= {each.laddr.ip for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return found


def is_pickle(data):
    """Whether the bytes, or a value in them if they are JSON, are a pickle of protocol 2 or newer."""
    if data[:1] == b"\x80":
        try:
            return bool(list(pickletools.genops(data)))
        except ValueError:
            return False
    try:
        return json.loads(data).get("metadata", {}).get("serializer", {}).get("type") == "pickle"
    except (ValueError, AttributeError):
        return False
