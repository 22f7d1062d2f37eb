"""The process of a command: its standard streams, and how Ctrl-C ends it.

The first Ctrl-C raises KeyboardInterrupt, so that the run can report its end and close its resources. After GRACE
seconds, or at the second Ctrl-C, its child processes are killed. Either way the exit code is 130, and the last line shown
prints the next step. A command that a shell starts in the background ignores Ctrl-C.

A standard stream may be closed, full, or a pipe without a reader. Work continues, and output that cannot be written is
dropped. Results go to stdout, so the exit code reports lost output. Characters that the encoding of a stream lacks are
escaped as in JSON.
"""

import atexit
import codecs
import io
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from threading import Event, Thread
from typing import TextIO

import psutil

from .options import terminal

INTERRUPTED = 128 + signal.SIGINT

ADVICE = "interrupted; run the same command again to continue"

ESCAPED = "tokenmill.escaped"
"""The handler of characters that the encoding of a stream lacks."""

GRACE = 3.0
"""Seconds a run may take to end after Ctrl-C."""

_pressed, _pressed_again = Event(), Event()


class Stream(io.TextIOWrapper):
    """Standard output or error. When a write fails, `lost` holds the error and later output is discarded."""

    lost: OSError | None = None

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost = self.lost or error
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, self.fileno())
        os.close(sink)


def open_streams() -> None:
    """Open standard streams that are closed, and keep the others from failing.

    The next file opened would get the number of a closed stream, and data and messages would mix in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - open as long as the process
    sys.stdout, sys.stderr = _stream(sys.stdout, 1), _stream(sys.stderr, 2)


def _stream(given: TextIO | None, number: int) -> Stream:
    buffer = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
    codecs.register_error(ESCAPED, _escaped)
    return Stream(buffer, given.encoding if given else "utf-8", ESCAPED, line_buffering=True)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def lost_output() -> OSError | None:
    """Return the error that lost output on stdout, or None. A reader that closes its pipe has read all it wants."""
    sys.stdout.flush()
    lost = sys.stdout.lost if isinstance(sys.stdout, Stream) else None
    return None if isinstance(lost, BrokenPipeError) else lost


def end_when_interrupted() -> None:
    """Let Ctrl-C end this process and its children."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
        # After Ctrl-C, errors are those that libraries made of it: pydantic, for one, raises its own.
        sys.excepthook = lambda kind, error, trace: (
            None if _pressed.is_set() else sys.__excepthook__(kind, error, trace)
        )
        sys.unraisablehook = lambda error: None if _pressed.is_set() else sys.__unraisablehook__(error)
        atexit.register(_leave)  # the first to register is the last to be called
        Thread(target=_end_later, daemon=True).start()


def _interrupt(_number: int, _frame: object) -> None:
    if _pressed.is_set():
        _pressed_again.set()
        return
    _pressed.set()
    # Dask's scheduler logs a traceback for each connection that the interrupt breaks.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("distributed") and isinstance(logger, logging.Logger):
            logger.disabled = True
    raise KeyboardInterrupt


def _end_later() -> None:
    _pressed.wait()
    _pressed_again.wait(GRACE)
    _end()


def _leave() -> None:
    """End an interrupted process. Any other has done its work, so Ctrl-C no longer changes its exit code."""
    if _pressed.is_set():
        _end()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end() -> None:
    """Kill all child processes, and exit without freeing memory, which can take a second more.

    The advice is given here, because every interrupted process ends here: in time, late, or while Python shuts down.
    """
    try:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        advising = Thread(target=_advise, daemon=True)  # blocks while Ctrl-S holds the terminal
        advising.start()
        advising.join(0.2)
    finally:
        os._exit(INTERRUPTED)


def _advise() -> None:
    terminal.show_cursor()
    sys.stdout.flush()
    sys.stderr.write(f"tokenmill: {ADVICE}\n")
