"""End this process when a rendering spends too long in one call of C.

Python checks limits, and handles Ctrl-C and other signals, between operations only, and one operation on a nested value can take
years. `filters` bounds every such operation that is known; this ends the process in all other cases. A timer of the kernel counts
the thread's CPU time, so that a busy or suspended machine is no fault; when it expires, the C library starts a thread, which needs
no interpreter, to show the sentence and to end the process. A Dask worker that ends takes its shard with it: the run tries others,
then fails. Setting the timer and clearing it takes some 3 µs.
"""

import ctypes
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

SECONDS = 30

CPU_TIME_OF_THREAD = 3  # CLOCK_THREAD_CPUTIME_ID
CALL_IN_THREAD = 2  # SIGEV_THREAD

_C = ctypes.PyDLL("librt.so.1", use_errno=True)  # part of libc since glibc 2.34


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux: call a function with a value."""

    _fields_ = (
        ("value", ctypes.c_char_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("others", ctypes.c_long * 8),
    )


class _Time(ctypes.Structure):
    """`struct itimerspec`: seconds and nanoseconds between expiries, and until the first."""

    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


_LIMIT, _NEVER = _Time(value=(SECONDS, 0)), _Time()
_SENTENCE = f"tokenmill: the chat template computes for more than {SECONDS} seconds in one operation; fix the template"
_EVENT = _Event(
    f"echo '{_SENTENCE}' >&2; kill -KILL $PPID".encode(),
    0,
    CALL_IN_THREAD,
    ctypes.cast(_C.system, ctypes.c_void_p).value,
)
_of_thread = threading.local()
os.register_at_fork(after_in_child=lambda: vars(_of_thread).clear())  # a child has none of its parent's timers


def _timer() -> ctypes.c_void_p:
    """The timer of this thread. Raises OSError if the kernel has no more."""
    found = getattr(_of_thread, "timer", None)
    if found is None:
        found = ctypes.c_void_p()
        if _C.timer_create(CPU_TIME_OF_THREAD, ctypes.byref(_EVENT), ctypes.byref(found)):
            raise OSError(ctypes.get_errno(), "the kernel has no timer to watch a chat template with")
        _of_thread.timer = found
    return found


@contextmanager
def watched() -> Generator[None]:
    """A context that may take SECONDS of this thread's CPU time."""
    timer = _timer()
    _C.timer_settime(timer, 0, ctypes.byref(_LIMIT), None)
    try:
        yield
    finally:
        _C.timer_settime(timer, 0, ctypes.byref(_NEVER), None)
