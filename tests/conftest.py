"""Tests keep their caches to themselves: a folder of the session stands in for the user's. And Ctrl-C works in all of them:
a shell that starts them in the background has them, and all that they start, ignore it. No example has a deadline: timings
never fail a test. Examples are random in the whole set only: a change fails by its own fault, not by an example that nobody
had drawn before. fsync does nothing: no test needs its files after a power cut.
"""

import gc
import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings


def pytest_configure(config):
    gc.disable()  # collecting makes a million objects that stay, a quarter of whose time would go into looking for garbage
    examples = {"not slow": 10, "not weekly": 25}.get(config.option.markexpr, 100)
    settings.register_profile("here", deadline=None, max_examples=examples, derandomize=examples < 100)
    settings.load_profile("here")
    os.fsync = lambda descriptor: None
    config.own_cache = tempfile.mkdtemp(prefix="tokenmill-cache-")
    os.environ.setdefault("TOKENMILL_TEST_SHARED", config.own_cache)  # of the process that starts those of pytest-xdist
    if hasattr(
        config, "workerinput"
    ):  # what libraries differ in takes seconds to find, and is found once for all processes
        found = Path(os.environ["TOKENMILL_TEST_SHARED"], "tokenmill/characters")
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(config.own_cache, "tokenmill").mkdir(mode=0o700)
        Path(config.own_cache, "tokenmill/characters").symlink_to(found)
    os.environ["XDG_CACHE_HOME"] = config.own_cache


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # after all imports: dask_jobqueue's sets another


def pytest_ignore_collect(collection_path, config):
    """Don't import a file whose tests are all left out."""
    if collection_path.suffix != ".py" or config.option.markexpr not in {"not slow", "not weekly"}:
        return None
    left_out = "slow|weekly" if config.option.markexpr == "not slow" else "weekly"
    marked = rf"^pytestmark = \[?pytest\.mark\.({left_out})\b"
    return re.search(marked, collection_path.read_text("utf-8"), re.MULTILINE) and True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What runs weekly is slow. Files with slow tests are started first, so that in the end no core waits for one of them."""
    for item in items:
        if item.get_closest_marker("weekly"):
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_unconfigure(config):
    if os.environ["TOKENMILL_TEST_SHARED"] == config.own_cache:
        server = Path(config.own_cache, "prefect/server.json")
        if server.exists():
            os.killpg(json.loads(server.read_bytes())["pid"], signal.SIGKILL)
        del os.environ["TOKENMILL_TEST_SHARED"]
    shutil.rmtree(config.own_cache, ignore_errors=True)


@pytest.fixture
def hub(tmp_path):
    """A hub on loopback of which this process is a client, with an empty cache (`tests/hub_server.py`)."""
    from tests.hub_server import serve, used_here  # noqa: PLC0415 - few tests need it

    with serve() as hub, used_here(hub, tmp_path / "hf_home"):
        yield hub


@pytest.fixture
def memory():
    """fsspec's store of objects in memory, empty before and after."""
    import fsspec  # noqa: PLC0415 - few tests need it

    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()
