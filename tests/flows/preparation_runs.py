"""Preparations as commands of their own, as a person at a terminal would run them, and how far they are."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

TOKENMILL = str(Path(sys.executable).parent / "tokenmill")
DEADLINE = 120


def start(command, blend, out, server, *arguments):
    return subprocess.Popen(
        [TOKENMILL, command, str(blend), "--output-dir", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=server.environment,
        start_new_session=True,
    )


def finish(process, seconds=DEADLINE):
    """The artifact record that the command printed, once it has ended well."""
    stdout, stderr = process.communicate(timeout=seconds)
    assert process.returncode == 0, stderr
    (record,) = json.loads(stdout).values()
    return record


def receipts(out):
    return len(list(Path(out).glob("shards/*/*/receipt.json")))


def wait_for_receipts(out, count, runs):
    """Until `count` shards are proven, or nothing `runs` any more, which the caller's own checks will tell."""
    deadline = time.monotonic() + DEADLINE
    while receipts(out) < count and runs():
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.005)


def workers_of(pid):
    """The worker processes of a run on a local cluster."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
