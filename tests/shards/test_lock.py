"""Taking turns at a folder, also with those that are killed."""

import os
import signal
import subprocess
import sys

from tasks.shards.lock import locked, locked_if_free

HOLDER = "import sys, signal; from tasks.shards.lock import locked\nwith locked(sys.argv[1]): print('held', flush=True); signal.pause()"


def is_free(folder):
    with locked_if_free(str(folder)) as free:
        return free


def test_a_folder_is_free_when_nobody_works_in_it(tmp_path):
    folder = tmp_path / "new/folder"
    assert is_free(folder)
    with locked(str(folder)):
        assert not is_free(folder)
    with locked_if_free(str(folder)) as free:
        assert free
        assert not is_free(folder)
    assert is_free(folder)


def test_who_is_killed_holds_nothing_any_more(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert not is_free(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert is_free(tmp_path)
