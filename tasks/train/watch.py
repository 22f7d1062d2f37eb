"""Run a launch and watch it: pass on its events and log lines, report the cause of a failure, and end all its processes.

One thread reads, waits and can be interrupted within PATIENCE. Then the command's process group gets SIGTERM and has GRACE
to stop its own children (torchrun its trainers, srun its job). All remaining ones are killed: trainers have their own
sessions, so they are found by a mark in their environment. If this process itself is killed, `orphans` ends the others.

    OUT/training.log    the lines of all starts of a training run

The error of a failed run ends with the last lines of the log, without torchrun's own report.
"""

import os
import re
import selectors
import signal
import subprocess
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from typing import BinaryIO, cast

import psutil
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.publish import open_log

from .events import Event, Failed, event_in
from .launchers.launch import Launch
from .orphans import with_parent

PATIENCE = 0.2
GRACE = 15.0  # seconds. Prefect kills a flow 30 s after asking it to end.

MARK = "TOKENMILL_LAUNCH"
MAX_LINE_BYTES = 64 * 1024  # maximum bytes of a line; a progress bar in a file can be one line of many MB

PIECE = 64 * 1024
EVENT = '{"event":'

LOG = "training.log"
LAST = 20  # log lines in an error. A trainer's traceback takes about fifteen.

# The last line of a traceback, which torch may begin with the number of the process.
EXCEPTION = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?)")

# Errors of torchrun and of other processes after one has failed.
CONSEQUENCE = re.compile(r"\.ChildFailedError|DistBackendError|DistNetworkError|Connection (?:closed|reset) by peer")

# torchrun's line about a process that a signal ended.
WORKER_KILLED = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID")

# The first line of torchrun's report on a failure.
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed \(exitcode")


class Log:
    """An open log file. `last` are its last lines before torchrun's report."""

    def __init__(self, path: str, file: FileIO) -> None:
        self.path, self._file = path, file
        self.last: deque[str] = deque(maxlen=LAST)
        self._reported = False

    def write(self, line: str) -> None:
        """Append a line. Raises OSError."""
        self._file.write(f"{line}\n".encode())
        self._reported |= TORCHRUN_REPORT.search(line) is not None
        if not self._reported:
            self.last.append(line)

    def ending(self) -> str:
        if not self.last:
            return f"It wrote nothing to its log, {self.path}"
        return "\n".join([f"The last lines of its log, {self.path}:", *(f"  {line}" for line in self.last)])


@contextmanager
def logged(path: str) -> Generator[Log]:
    """Open the log at `path`, and add its last lines to a RunError raised within."""
    with open_log(path) as file:
        log = Log(path, file)
        try:
            yield log
        except RunError as error:
            raise RunError(f"{error}\n{log.ending()}") from error


def run(launch: Launch, on_event: Callable[[Event], None], on_line: Callable[[str], None]) -> None:
    """Run the command of `launch` to its end, passing on every event and every other line.

    Raises InputError when the trainer rejects its job, and RunError when training fails. If anything raises, a callback
    included, all processes of the launch are ended (one kept alive by a hanging driver is reported in a line).
    """
    mark = uuid.uuid4().hex
    output = _Output()
    process = subprocess.Popen(  # noqa: S603 - the launcher's command, without a shell
        with_parent(launch.command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        bufsize=0, env={**os.environ, **launch.environment, MARK: mark}, start_new_session=True,
    )  # fmt: skip
    try:
        for line in _lines(process):
            event = output.take(line, on_line)
            if event is not None:
                on_event(event)
    except BaseException:
        _signal_group(process, signal.SIGTERM)
        for _ in _lines(process, time.monotonic() + GRACE):
            pass  # further output is dropped
        raise
    finally:
        _kill_rest(process, mark, on_line)
    output.raise_for(process.returncode)


@dataclass(slots=True)
class _LineSplitter:
    """Splits a stream of bytes into lines of at most MAX_LINE_BYTES bytes."""

    rest: bytes = b""
    cut: bool = False

    def take(self, piece: bytes) -> Iterator[str]:
        """Yield the lines that end in `piece`."""
        first, *others = piece.split(b"\n")
        self._keep(first)
        for beginning in others:
            yield self.last()
            self._keep(beginning)

    def last(self) -> str:
        """Return the line so far, as text; only the visible part of an overwritten progress bar."""
        text = self.rest.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        text += " … (cut)" * self.cut
        self.rest, self.cut = b"", False
        return text

    def _keep(self, piece: bytes) -> None:
        free = MAX_LINE_BYTES - len(self.rest)
        self.rest += piece[:free]
        self.cut |= len(piece) > free


def _lines(process: subprocess.Popen[bytes], until: float = float("inf")) -> Iterator[str]:
    """The lines of a process until it ends, or until a time of the monotonic clock.

    Its children may keep the pipe open, so the end of the pipe is not awaited.
    """
    splitter, pipe = _LineSplitter(), cast("BinaryIO", process.stdout)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while time.monotonic() < until:
            ended = process.poll() is not None  # asked before reading, so that its last lines aren't missed
            if not selector.select(0 if ended else PATIENCE):
                if ended:
                    break
                continue
            piece = pipe.read(PIECE)
            if not piece:
                break
            yield from splitter.take(piece)
    # A process may close its output long before it ends.
    while process.poll() is None and time.monotonic() < until:
        time.sleep(PATIENCE / 10)
    if splitter.rest:
        yield splitter.last()


@dataclass(slots=True)
class _Output:
    """The cause of a launch's end, according to its output."""

    failed: Failed | None = None
    exceptions: list[str] = field(default_factory=list[str])
    killed: str | None = None

    def take(self, line: str, on_line: Callable[[str], None]) -> Event | None:
        """Return the event in a line; the rest of the line is passed to `on_line`.

        An event may follow an unfinished line from a different process, such as a progress bar.
        """
        log, begins, rest = line.partition(EVENT)
        event = event_in(begins + rest)
        log = line if event is None else log
        if log or event is None:
            if found := EXCEPTION.fullmatch(log):
                self.exceptions.append(found[1])
            if found := WORKER_KILLED.search(log):
                self.killed = found[1]
            on_line(log)
        if isinstance(event, Failed):
            self.failed = event
        return event

    def raise_for(self, code: int) -> None:
        """Raise the error of a failed launch; `code` is its exit code."""
        if self.failed is not None:
            raise (InputError if self.failed.wrong_call else RunError)(self.failed.reason)
        if not code:
            return
        causes = [line for line in self.exceptions if not CONSEQUENCE.search(line)]
        killed = signal.Signals(-code).name if code < 0 else self.killed
        if killed is not None and (code < 0 or not causes):
            who = "it was" if code < 0 else "one of its processes was"
            memory = ", perhaps because memory ran out" if killed == signal.SIGKILL.name else ""
            raise RunError(f"training failed: {who} ended by {killed}{memory}")
        # Tracebacks end with the error that counts; consequences follow it, so the first of those is the nearest.
        reason = causes[-1] if causes else next(iter(self.exceptions), f"exit code {code}")
        raise RunError(f"training failed: {reason}")


def _signal_group(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, how)


def _kill_rest(process: subprocess.Popen[bytes], mark: str, on_line: Callable[[str], None]) -> None:
    """Kill all remaining processes of a launch, and wait until they have ended."""
    until = time.monotonic() + GRACE
    # An ending process loses its environment, and with it the mark, before it is gone: so each is found before it is killed.
    left = _marked(mark)
    _signal_group(process, signal.SIGKILL)
    while left and time.monotonic() < until:
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        _, alive = psutil.wait_procs(left, PATIENCE)
        left = [*filter(_is_running, {*alive, *_marked(mark)})]
    if left:
        names = ", ".join(str(each.pid) for each in left)
        on_line(f"processes {names} were killed but are still alive, because a driver hangs; restart the machine")
    process.poll()
    cast("BinaryIO", process.stdout).close()


def _is_running(process: psutil.Process) -> bool:
    """False for a process that has ended, even if its parent hasn't asked for its exit code."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _marked(mark: str) -> list[psutil.Process]:
    """The running processes of a launch; the environment of other users' processes is hidden, and None."""
    running = psutil.process_iter(["environ"])
    return [each for each in running if (each.info["environ"] or {}).get(MARK) == mark]
