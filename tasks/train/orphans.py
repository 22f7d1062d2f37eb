"""End a process when its parent ends for any reason.

A killed watcher cannot clean up, and its trainers would hold GPUs for hours. So the kernel sends a signal when the parent dies
(Linux's `PR_SET_PDEATHSIG`; other systems do nothing). A command gets SIGTERM, because torchrun, srun and scripts have children
to end; trainers are killed, because torchrun starts them in their own sessions.

The signal is sent when the thread that started the process ends, so that thread must wait for it. A command is started through
this file, `python -I orphans.py PARENT COMMAND…`, in 20 ms: a function between fork and exec could deadlock in a process with
threads.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def die_with_parent() -> None:
    """Kill this process when its parent dies."""
    _die_with(os.getppid(), signal.SIGKILL)


def _die_with(parent: int, how: signal.Signals) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(how), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call
        sys.exit(128 + how)


def with_parent(command: Sequence[str]) -> list[str]:
    """Wrap `command` so that it gets SIGTERM when this process dies."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def main() -> None:
    """Replace this process with the command after the parent's process id."""
    parent, *command = sys.argv[1:]
    _die_with(int(parent), signal.SIGTERM)
    os.execvp(command[0], command)  # noqa: S606 - a command without a shell


if __name__ == "__main__":
    main()
