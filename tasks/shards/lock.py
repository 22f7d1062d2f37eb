"""Taking turns: one publication of a folder at a time.

The lock is the kernel's (`flock` on the folder itself): it leaves no file behind and is gone the moment its holder
is, however it ended. On file systems without locks (some network mounts) publication goes ahead without one; every
single file is replaced atomically all the same.
"""

import errno
import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


@contextmanager
def locked(folder: str) -> Generator[None]:
    """Hold the exclusive lock of a local folder, waiting for whoever has it; the folder is made when missing."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked_if_free(folder: str) -> Generator[bool]:
    """Hold the exclusive lock of a local folder unless another holds it; whether it is held. The folder is made when missing."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(descriptor, fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int = 0) -> bool:
    """Whether the lock was had, or there are none; only without waiting (LOCK_NB) can it be another's."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return True
