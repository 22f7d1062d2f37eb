# ruff: noqa: PT012 - what is raised inside a publication is the subject here
"""A folder appears whole or not at all, whatever happens while it is written."""

import errno
import os

import pytest
from tokenmill.tasks.shards.publish import publish_folder, sweep_folders

from tests.faults import injection
from tests.faults.injection import count_operations, fail_operation, killed_at

OLD = {"state.bin": b"old", "gone.bin": b"of the old alone"}
NEW = {"state.bin": b"new", "part/0.bin": b"zero", "part/deep/1.bin": b"one"}


@pytest.fixture(autouse=True)
def _renames(monkeypatch):
    monkeypatch.setattr(injection, "OPERATIONS", (*injection.OPERATIONS, "rename"))


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "checkpoints" / "step_1"
    write(folder, OLD)
    return folder


def write(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def content(folder):
    """Every file below a folder, None where there is none."""
    if not folder.exists():
        return None
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def published(target):
    with publish_folder(str(target)) as place:
        write(type(target)(place), NEW)


def others(target):
    return [path.name for path in target.parent.iterdir() if path != target]


def restore(target):
    published(target)
    for path in [*target.rglob("*")][::-1]:
        path.unlink() if path.is_file() else path.rmdir()
    write(target, OLD)


def test_a_folder_appears_or_is_replaced_when_the_block_ends(target, tmp_path):
    for folder, before in {tmp_path / "not" / "yet" / "there": None, target: OLD}.items():
        with publish_folder(str(folder)) as place:
            write(type(target)(place), NEW)
            assert content(folder) == before
            assert type(target)(place).parent == folder.parent
        assert content(folder) == NEW
        assert others(folder) == []


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), FileNotFoundError(2, "gone", "in.bin")])
def test_error_in_the_block_keeps_the_old_folder(target, error):
    with pytest.raises(type(error)) as raised, publish_folder(str(target)) as place:
        write(type(target)(place), NEW)
        raise error
    assert raised.value is error
    assert getattr(error, "filename", "in.bin") == "in.bin"
    assert content(target) == OLD
    assert others(target) == []


def test_everything_is_synced_before_it_takes_its_name_and_the_name_afterwards(tmp_path):
    target = tmp_path / "step_1"
    with count_operations() as log:
        published(target)
    names = log.names()
    files_and_folders = len(NEW) + len(["step_1", "part", "part/deep"])
    first, last = names.index("rename"), len(names) - 1 - names[::-1].index("rename")
    assert names[:first].count("fsync") == files_and_folders
    assert names[last + 1 :] == ["open", "fsync"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_any_operation_may_fail(target, code):
    with count_operations() as log:
        published(target)
    restore(target)
    total = len(log.operations)
    for number in range(1, total + 1):
        with (
            fail_operation(number, OSError(code, os.strerror(code))),
            pytest.raises(OSError, match=r"step_1'$") as raised,
        ):
            published(target)
        assert (raised.value.errno, raised.value.filename) == (code, str(target))
        renamed = number > total - 2
        assert content(target) == (NEW if renamed else OLD)  # its name was there, but perhaps not on the disk
        assert others(target) == []
        restore(target)


@pytest.mark.slow
def test_a_writer_may_be_killed_at_any_operation(target):
    seen, number = [], 1
    while killed_at(number, lambda: published(target)):
        seen.append(content(target))
        assert seen[-1] in (OLD, None, NEW)
        left = {str(target.parent / name) for name in others(target)}
        assert set(sweep_folders(str(target.parent))) == left
        assert others(target) == []
        published(target)
        assert content(target) == NEW
        restore(target)
        number += 1
    assert seen.count(None) == 1  # between the two renames
    assert OLD in seen
    assert NEW in seen


def test_only_temporary_folders_are_swept(target):
    here = target.parent
    orphan = here / ".step_2.0123456789abcdef.tmp"
    write(orphan, NEW)
    kept = [".hidden", ".step_2.tmp", "step_2.0123456789abcdef.tmp", ".step_2.0123456789ABCDEF.tmp"]
    for name in kept:
        (here / name).mkdir()
    (here / ".data.bin.0123456789abcdef.tmp").write_bytes(b"a file, which has a lock of its own")
    assert sweep_folders(str(here)) == [str(orphan)]
    assert sorted(others(target)) == sorted([*kept, ".data.bin.0123456789abcdef.tmp"])
    assert content(target) == OLD
    assert sweep_folders(str(here / "missing")) == []
