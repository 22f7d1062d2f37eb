"""Runs a launch and watches it: events and lines of the log as they come, a reason when it fails, and nobody left at the end.

One thread reads, waits and is interrupted, by Ctrl-C, by a signal that became an exception, or by an exception that
another thread asks for; all of them arrive within PATIENCE, because nothing here waits longer. Then the command is told
SIGTERM, as is everything in its process group, and has GRACE to end its own: torchrun its trainers, srun its job.

Who is left is killed, whatever it is. Trainers are in sessions of their own and, once torchrun is gone, nobody's children,
so they are known by a mark in their environment, which all that is started inherits. When this process itself is
killed, `orphans` sees to the rest. Watching costs a system call or two per line.
"""

import os
import re
import selectors
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, cast

import psutil
from tokenmill.tasks.errors import InputError, RunError

from .events import Event, Failed, heard
from .launchers.launch import Launch
from .orphans import with_parent

PATIENCE = 0.2
GRACE = 15.0
"""Seconds. Prefect kills a flow 30 s after it was told to end."""

MARK = "TOKENMILL_LAUNCH"
LONGEST = 64 * 1024
"""Bytes of a line that are kept; a progress bar into a file can be one line of many MB."""

PIECE = 64 * 1024
EVENT = '{"event":'

EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?$")
"""How a traceback ends."""

CONSEQUENCE = re.compile(r"\.ChildFailedError|DistBackendError|DistNetworkError|Connection (?:closed|reset) by peer")
"""What other processes, and torchrun itself, say when one has failed."""

WORKER_KILLED = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID")
"""What torchrun says of a process that a signal has ended."""


def run(launch: Launch, on_event: Callable[[Event], None], on_line: Callable[[str], None]) -> None:
    """Run the command of `launch` to its end, telling of every event and of every other line.

    Raises InputError when the trainer says that the call is wrong, and RunError when training failed. Whatever is raised,
    here or by a callback, nothing of the launch is running afterwards (a process that survives a kill because its driver
    hangs is told as a line).
    """
    mark = uuid.uuid4().hex
    heard_of = _Heard()
    process = _started(launch, mark)
    try:
        for line in _lines(process):
            event = heard_of.take(line, on_line)
            if event is not None:
                on_event(event)
    except BaseException:
        _end(process)
        raise
    finally:
        _kill_rest(process, mark, on_line)
    _raise_for(process.returncode, heard_of)


def _started(launch: Launch, mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - the launcher's command, with no shell between
        with_parent(launch.command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env={**os.environ, **launch.environment, MARK: mark},
        start_new_session=True,
    )


@dataclass(slots=True)
class _Cutter:
    """Cuts a stream of bytes into lines, none of which is longer than LONGEST."""

    rest: bytes = b""
    cut: bool = False

    def take(self, piece: bytes) -> Iterator[str]:
        """The lines that end in `piece`."""
        first, *others = piece.split(b"\n")
        self._keep(first)
        for beginning in others:
            yield self.last()
            self._keep(beginning)

    def last(self) -> str:
        """The line that there is, as text; of what a progress bar has overwritten, what is to be seen."""
        text = self.rest.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        text += " … (cut)" * self.cut
        self.rest, self.cut = b"", False
        return text

    def _keep(self, piece: bytes) -> None:
        room = LONGEST - len(self.rest)
        self.rest += piece[:room]
        self.cut |= len(piece) > room


def _lines(process: subprocess.Popen[bytes], until: float = float("inf")) -> Iterator[str]:
    """The lines of a process until it ends, or until a time of the monotonic clock.

    Others may hold the pipe beyond that, so its end is not waited for; what lies in it by then is read.
    """
    cutter = _Cutter()
    for piece in _pieces(process, until):
        yield from cutter.take(piece)
    if cutter.rest:
        yield cutter.last()


def _pieces(process: subprocess.Popen[bytes], until: float) -> Iterator[bytes]:
    pipe = cast("BinaryIO", process.stdout)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while time.monotonic() < until:
            ended = process.poll() is not None
            if not selector.select(0 if ended else PATIENCE):
                if ended:
                    return
                continue
            piece = pipe.read(PIECE)
            if not piece:
                break
            yield piece
    while process.poll() is None and time.monotonic() < until:
        time.sleep(PATIENCE / 10)


@dataclass(slots=True)
class _Heard:
    """What of a log tells why it ended."""

    failed: Failed | None = None
    exceptions: list[str] = field(default_factory=list[str])
    killed: str | None = None

    def take(self, line: str, on_line: Callable[[str], None]) -> Event | None:
        """The event in a line; what is no event, all or the beginning of it, is told to `on_line`.

        An event can stand behind the beginning of a line that another process has not ended, such as a progress bar.
        """
        log, begins, rest = line.partition(EVENT)
        event = heard(begins + rest)
        log = line if event is None else log
        if log or event is None:
            self._read(log)
            on_line(log)
        if isinstance(event, Failed):
            self.failed = event
        return event

    def _read(self, line: str) -> None:
        if EXCEPTION.match(line):
            self.exceptions.append(line)
        if found := WORKER_KILLED.search(line):
            self.killed = found[1]

    @property
    def exception(self) -> str | None:
        """The last exception that is not the consequence of another."""
        return next((line for line in reversed(self.exceptions) if not CONSEQUENCE.search(line)), None)


def _raise_for(code: int, said: _Heard) -> None:
    """Raise what the end of a training is to who asked for it; nothing, when all is well."""
    if said.failed is not None:
        raise (InputError if said.failed.wrong_call else RunError)(said.failed.reason)
    if code:
        raise RunError(f"training failed: {_reason(code, said)}")


def _reason(code: int, said: _Heard) -> str:
    if code < 0:
        return _killed("it was", signal.Signals(-code).name)
    if said.exception is not None:
        return said.exception
    if said.killed is not None:
        return _killed("a process of it was", said.killed)
    return next(iter(said.exceptions), f"exit code {code}")


def _killed(who: str, name: str) -> str:
    memory = ", perhaps because memory had run out" if name == signal.SIGKILL.name else ""
    return f"{who} ended by {name}{memory}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Tell a process and its group to end, and give them GRACE for it; what they still write is read and left."""
    _tell_group(process, signal.SIGTERM)
    for _ in _lines(process, time.monotonic() + GRACE):
        pass


def _tell_group(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, how)


def _kill_rest(process: subprocess.Popen[bytes], mark: str, on_line: Callable[[str], None]) -> None:
    """Kill all that is left of a launch, and see it dead."""
    _tell_group(process, signal.SIGKILL)
    until = time.monotonic() + GRACE
    while (left := _marked(mark)) and time.monotonic() < until:
        for each in left:
            _kill(each)
        psutil.wait_procs(left, PATIENCE)
    if left:
        names = ", ".join(str(each.pid) for each in left)
        on_line(f"processes {names} do not end, although they were killed: a driver hangs; restart the machine")
    process.poll()
    cast("BinaryIO", process.stdout).close()


def _marked(mark: str) -> list[psutil.Process]:
    """The living processes with the mark of a launch; those of other users have none that we may see."""
    return [each for each in psutil.process_iter() if _environment(each).get(MARK) == mark]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
