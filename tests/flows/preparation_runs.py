"""Commands: called in this process, or as processes of their own, as a person at a terminal would run them."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import psutil
from tokenmill.flows.cli import run

TOKENMILL = str(Path(sys.executable).parent / "tokenmill")
DEADLINE = 120


def called(*arguments, stdin=None):
    """A command in this process: what it printed, and its exit status.

    A new interpreter would cost a second more.
    """
    given = [str(argument) for argument in arguments]
    standard_input = io.TextIOWrapper(io.BytesIO((stdin or "").encode()))
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        patch("sys.stdin", standard_input),
        patch.dict(os.environ),
    ):
        status = run(given)
    return subprocess.CompletedProcess(given, status, stdout.getvalue(), stderr.getvalue())


def ran(*command, seconds=2 * DEADLINE, **options):
    """A command in a process of its own: what it printed, and its exit status."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False, **options)


def start(command, blend, out, server, *arguments):
    words = [TOKENMILL, command, str(blend), "--output-dir", str(out), *arguments]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=server.environment, start_new_session=True, **piped)


def start_small(blend, out, server, *arguments):
    """Pretraining in shards of 20 kB."""
    return start("pretrain", blend, out, server, "shard_size=20kB", *arguments)


def finish(process, seconds=DEADLINE):
    """The artifact record that the command printed, once it has ended well."""
    stdout, stderr = process.communicate(timeout=seconds)
    assert process.returncode == 0, stderr
    (record,) = json.loads(stdout).values()
    return record


def receipts(out):
    """The number of shards with a receipt, prefixes aside."""
    return sum(path.parent.parent.name != "prefix" for path in Path(out).glob("shards/*/*/receipt.json"))


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
