"""Taking turns in a folder, between processes."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.store import locked, turn_in

HOLD = """
import sys
from tokenmill.tasks.shards.store import turn_in
with turn_in(sys.argv[1], print):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(place, **environment):
    """Another process that works in `place` until its stdin is closed, or it is killed."""
    command = [sys.executable, "-c", HOLD, str(place)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=environment or None, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("end", [lambda process: process.stdin.close(), lambda process: process.kill()])
def test_run_waits_for_the_holder_and_names_it(tmp_path, end):
    told = []
    with holder(tmp_path / "out") as process:

        def tell(sentence):
            told.append(sentence)
            assert process.poll() is None
            end(process)

        with turn_in(str(tmp_path / "out"), tell):
            assert len(told) == 1
    assert told[0].startswith(f"waiting for process {process.pid} ({sys.executable} -c ")
    assert told[0].endswith(f"which is using {tmp_path}/out")


def test_a_flow_run_is_called_by_its_id(tmp_path):
    told = []
    with (
        holder(tmp_path, PREFECT__FLOW_RUN_ID="5c0f") as process,
        turn_in(str(tmp_path), lambda sentence: (told.append(sentence), process.kill())),
    ):
        pass
    assert told == [f"waiting for flow run 5c0f (process {process.pid}), which is using {tmp_path}"]


def nobody(sentence):
    raise AssertionError(sentence)


def test_runs_in_other_folders_do_not_wait(tmp_path):
    with holder(tmp_path / "a"), turn_in(str(tmp_path / "b"), nobody):
        pass


def test_a_run_does_not_wait_for_itself(tmp_path):
    with turn_in(str(tmp_path), nobody):
        with locked(str(tmp_path), nobody), locked(str(tmp_path), nobody):
            pass
        with locked(str(tmp_path), nobody):
            pass


def test_runs_in_a_folder_of_an_object_store_wait_too(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = []
    with holder("s3://bucket/out/", XDG_CACHE_HOME=str(tmp_path)) as process:
        with turn_in("s3://bucket/other", nobody):
            pass
        with turn_in("s3://bucket/out", lambda sentence: (told.append(sentence), process.kill())):
            pass
    assert told[0].endswith("which is using s3://bucket/out")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    complaint = r"file/out: cannot be used as a folder \(Not a directory\); choose a different one"
    with pytest.raises(InputError, match=complaint), turn_in(str(tmp_path / "file" / "out"), nobody):
        pass
