"""Where caches go: the user's folder, or the one for temporary files where that cannot be written. And names of places, and of artifacts in Prefect."""

import os
import re
import tempfile
from pathlib import Path

import pytest
from tokenmill.tasks.artifact import artifact_key
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import absolute, is_writable, temporary_folder, user_cache

NOT_WRITABLE = "/proc"
"""Not even by root."""


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_cache_that_can_be_written_is_used(monkeypatch, temporary):
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "cache"))
    assert user_cache("a", "b") == str(temporary / "cache/tokenmill/a/b")
    assert is_writable(str(temporary / "cache"))


def test_a_cache_that_cannot_be_written_is_replaced_by_a_folder_that_nobody_else_can_write(monkeypatch, temporary):
    monkeypatch.setenv("XDG_CACHE_HOME", NOT_WRITABLE)
    place = Path(user_cache("a", "b"))
    assert place.is_relative_to(temporary)
    assert place.parents[1] == Path(temporary_folder())
    assert place.parents[1].stat().st_mode & 0o077 == 0


def test_read_only_cache_is_used(monkeypatch, temporary):
    folder = temporary / "cache/tokenmill"
    folder.mkdir(parents=True)
    (folder / "known").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "cache"))
    monkeypatch.setattr("tokenmill.tasks.storage.is_writable", lambda folder: False)
    assert user_cache("known") == str(folder / "known")
    assert not Path(user_cache("unknown")).is_relative_to(folder)


@pytest.mark.parametrize("whose", ["a link", "a file", "open to others"])
def test_shared_temporary_folder_is_rejected(whose, temporary):
    folder = Path(temporary_folder())
    folder.rmdir()
    if whose == "a link":
        folder.symlink_to(temporary)
    elif whose == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(InputError, match=r"is not a private folder of this user.*set XDG_CACHE_HOME"):
        temporary_folder()


def test_unrepresentable_place_is_rejected(tmp_path, monkeypatch):
    broken = os.fsdecode(b"caf\xe9")
    for name, words in ((broken, "is not UTF-8"), ("a\0b", "a NUL character")):
        for place in (name, f"s3://bucket/{name}"):
            with pytest.raises(InputError, match=words):
                absolute(place)
    (tmp_path / broken).mkdir()
    monkeypatch.chdir(tmp_path / broken)
    with pytest.raises(InputError, match="is not UTF-8"):
        absolute("out")


@pytest.mark.parametrize("place", ["/data/Out_1.b", "s3://bucket/Ünï", "/", "/data/" + "long " * 100])
def test_a_key_is_one_that_prefect_takes(place):
    assert re.fullmatch("training[a-z0-9-]+", artifact_key("training", place))


def test_outputs_have_unique_keys(tmp_path, monkeypatch):
    places = [str(tmp_path / name) for name in ("a/model", "b/model", "b/model 2", "b/a/model")]
    assert len({artifact_key(kind, place) for kind in ("training", "results") for place in places}) == 8
    monkeypatch.chdir(tmp_path)
    assert artifact_key("training", "a/model/") == artifact_key("training", places[0])
    assert artifact_key("training", places[0]).startswith("training-a-model-")
