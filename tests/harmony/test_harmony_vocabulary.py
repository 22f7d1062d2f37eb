"""The vocabulary is found without a network, by any number of processes at once, and never a wrong one."""

import gzip
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony import vocabulary
from tokenmill.tasks.harmony.vocabulary import IDS, PLACE, RANKS, RANKS_SHA256, encoding, ensure_vocabulary

from tests.peers.harmony_tokens import SPECIAL_STRINGS
from tests.peers.vocabularies import o200k_ranks

NOWHERE = "http://127.0.0.1:9"
"""A proxy that nobody answers at."""

ENCODE = """
from tokenmill.tasks.harmony.vocabulary import encoding
print(encoding().encode("<|start|>hello<|end|>", allowed_special="all"))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and an environment that says nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(PLACE, raising=False)
    return tmp_path / "tokenmill/harmony"


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def run(source, cache_home):
    """The finished process of `source`, which reaches no network and finds no vocabulary but in `cache_home`."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith("TIKTOKEN")}
    settings |= {"XDG_CACHE_HOME": str(cache_home), "TIKTOKEN_RS_CACHE_DIR": str(cache_home / "none")}
    settings |= {"HTTPS_PROXY": NOWHERE, "HTTP_PROXY": NOWHERE, "ALL_PROXY": NOWHERE}
    command = [sys.executable, "-c", source]
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("content", [None, b"", b"YQ== 0\n"], ids=["no file", "an empty one", "another one"])
def test_the_file_is_unpacked_into_the_cache_and_the_library_pointed_there(cache, content):
    if content is not None:
        cache.mkdir(parents=True)
        (cache / RANKS).write_bytes(content)
    ensure_vocabulary()
    assert os.environ[PLACE] == str(cache)
    assert digest(cache / RANKS) == RANKS_SHA256


@pytest.mark.parametrize("right", [True, False])
def test_a_folder_that_is_named_is_used_where_it_is_right(cache, tmp_path, monkeypatch, right):
    own = tmp_path / "own"
    own.mkdir()
    packed = resources.files("bpe_openai.data").joinpath(f"{RANKS}.gz").read_bytes()
    (own / RANKS).write_bytes(gzip.decompress(packed) if right else b"YQ== 0\n")
    monkeypatch.setenv(PLACE, str(own))
    ensure_vocabulary()
    assert os.environ[PLACE] == str(own if right else cache)
    assert cache.exists() != right


def test_second_call_does_not_write(cache):
    ensure_vocabulary()
    before = (cache / RANKS).stat()
    ensure_vocabulary()
    os.environ.pop(PLACE)
    ensure_vocabulary()
    after = (cache / RANKS).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert [file.name for file in cache.iterdir()] == [RANKS]


@pytest.mark.parametrize("shipped", [None, b"YQ== 0\n"], ids=["no file", "another file"])
def test_a_package_without_the_file_is_an_error_that_names_file_and_hash(cache, tmp_path, monkeypatch, shipped):
    if shipped is not None:
        (tmp_path / f"{RANKS}.gz").write_bytes(gzip.compress(shipped))
    monkeypatch.setattr(vocabulary.resources, "files", lambda package: tmp_path)
    with pytest.raises(InputError) as caught:
        ensure_vocabulary()
    assert str(tmp_path / f"{RANKS}.gz") in str(caught.value)
    assert RANKS_SHA256 in str(caught.value)
    assert hashlib.sha256(shipped or b"").hexdigest() in str(caught.value)
    assert not cache.exists()
    assert PLACE not in os.environ


@pytest.mark.slow
def test_processes_that_unpack_it_at_once_all_get_it(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: run(ENCODE, tmp_path), range(3)))
    assert [(each.returncode, each.stderr) for each in done] == [(0, "")] * 3
    assert len({each.stdout for each in done}) == 1
    assert [file.name for file in (tmp_path / "tokenmill/harmony").iterdir()] == [RANKS]
    assert digest(tmp_path / "tokenmill/harmony" / RANKS) == RANKS_SHA256


def test_special_strings_match_the_library_and_tiktoken(tmp_path):
    theirs = o200k_ranks(tmp_path).special_tokens
    assert encoding().special_tokens_set | set(theirs) == SPECIAL_STRINGS
    assert theirs.keys() - encoding().special_tokens_set == {"<|endofprompt|>"}
    assert {name: encoding().encode(name, allowed_special="all") for name in IDS} == {
        name: [number] for name, number in IDS.items()
    }
