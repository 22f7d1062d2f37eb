"""No orphans: a process that ends with the one which started it, however that one ended.

Who is killed cannot clean up. A trainer whose watcher is gone would hold GPUs for hours and tell nobody, so the kernel is
asked to send a signal when the parent dies (`PR_SET_PDEATHSIG` of Linux; elsewhere nothing happens). A command is told
SIGTERM, because torchrun, srun and scripts have others to end; the processes that train are killed, because torchrun
starts them in sessions of their own and, killed itself, leaves them.

The signal comes when the thread ends that started the process, so this thread has to wait for it. A command is run by way
of this file, `python -I orphans.py PARENT COMMAND…`, in 20 ms: a function to be called between fork and exec could hang in a
process with threads.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def die_with_parent() -> None:
    """Be killed when the parent dies. Exits at once if it dies meanwhile."""
    _die_with(os.getppid(), signal.SIGKILL)


def _die_with(parent: int, how: signal.Signals) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(how), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(128 + how)


def with_parent(command: Sequence[str]) -> list[str]:
    """`command` as one that is told SIGTERM when this process dies."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def main() -> None:
    """Become the command that is named after the parent's process id."""
    parent, *command = sys.argv[1:]
    _die_with(int(parent), signal.SIGTERM)
    os.execvp(command[0], command)  # noqa: S606 - a command without a shell


if __name__ == "__main__":
    main()
