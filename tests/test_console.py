"""Processes whose standard streams are lost run on, and what they write elsewhere stays clean."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenmill.tasks.console import log_errors_as_sentences
from tokenmill.tasks.errors import InputError, RunError

PRINTING = """
import logging, sys, threading
from rich.console import Console
from tokenmill.tasks.console import never_end_by_printing

class Handler(logging.StreamHandler):  # as Prefect's
    console = Console(file=sys.stderr)
    def emit(self, record):
        try:
            self.console.print(record.getMessage())
        except Exception:
            self.handleError(record)

never_end_by_printing()
CLOSE
logging.basicConfig(handlers=[Handler()])

def say():
    for _ in range(3):
        logging.warning("hello")
    print("alive")

thread = threading.Thread(target=say)
thread.start()
thread.join()
say()
"""


def printing(stderr, close="pass"):
    program = PRINTING.replace("CLOSE", close)
    ended = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stdout


def test_a_lost_stderr_ends_no_thread():
    reading, unread = os.pipe()
    os.close(reading)
    try:
        assert printing(unread) == (0, "alive\nalive\n")
    finally:
        os.close(unread)
    with Path("/dev/full").open("wb") as full:
        assert printing(full) == (0, "alive\nalive\n")
    assert printing(subprocess.DEVNULL, close="sys.stderr.close()") == (0, "alive\nalive\n")


def test_messages_of_children_do_not_get_into_files_when_stderr_was_closed(tmp_path):
    file = tmp_path / "shard.bin"
    program = (
        "import subprocess, sys; from tokenmill.tasks.console import never_end_by_printing; never_end_by_printing();"
        f"file = open({str(file)!r}, 'wb'); subprocess.run(['sh', '-c', 'echo a message >&2; echo a message'], check=True)"
    )
    subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program], check=True, timeout=60)
    assert file.read_bytes() == b""


@pytest.mark.parametrize("logger", ["prefect.flow_runs", "prefect.task_runs", "prefect.engine"])
def test_errors_that_teach_are_logged_as_sentences_and_all_others_with_their_traceback(logger, caplog):
    log_errors_as_sentences()
    for error in (InputError("no such blend"), RunError("no worker"), ValueError("a defect")):
        try:
            raise error
        except (ValueError, RuntimeError):
            logging.getLogger(logger).exception("failed: %s", error)
    assert caplog.text.count("Traceback") == 1
    assert caplog.text.index("failed: a defect") < caplog.text.index("Traceback")
