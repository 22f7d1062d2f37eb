"""Lock a folder: one run at a time, one publication, and no publication while its store is pruned.

The lock is the kernel's (`flock` on the folder itself). It doesn't leave a file, and is released when its holder ends, even if
killed. On file systems without locks (some network mounts) publication proceeds unlocked; every file is still replaced
atomically. For a folder of an object store, runs of one user on one machine lock a folder in the user's cache.
"""

import errno
import fcntl
import os
import shlex
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import psutil
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import absolute, is_local, user_cache
from xxhash import xxh3_128_hexdigest

UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF}
"""Errors of file systems without folder locks; NFS gives EBADF."""

LOCKS = Path("/proc/locks")
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
LONGEST_COMMAND = 100

Tell = Callable[[str], object]

Inode = tuple[int, int]
"""A folder's device and inode number."""

_held: ContextVar[frozenset[Inode]] = ContextVar("_held", default=frozenset())
"""The folders that this run has locked, so that it does not wait for itself."""


@contextmanager
def turn_in(output_dir: str, tell: Tell) -> Generator[None]:
    """Lock an output folder for this run, waiting for the current holder. Errors as in `locked`."""
    place = absolute(output_dir)
    folder = place if is_local(place) else user_cache("outputs", xxh3_128_hexdigest(place.encode()))
    with locked(folder, lambda holder: tell(f"waiting for {holder}, which is using {place}")):
        yield


@contextmanager
def locked(folder: str, tell: Tell = lambda _: None, *, shared: bool = False) -> Generator[None]:
    """Hold the exclusive lock of a local folder, which is created if missing; or one that others hold too, if they share it.

    Waits for the current holder, after calling `tell` with its description. Raises InputError if the folder cannot be created.
    """
    descriptor = _opened(folder)
    try:
        status = os.fstat(descriptor)
        inode, held = (status.st_dev, status.st_ino), _held.get()
        if inode not in held:
            _lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, lambda: tell(_holder(inode)))
        token = _held.set(held | {inode})
        try:
            yield
        finally:
            _held.reset(token)
    finally:
        os.close(descriptor)


def _opened(folder: str) -> int:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{folder}: cannot be used as a folder ({error.strerror}); choose a different one") from error


def _lock(descriptor: int, kind: int, before_waiting: Callable[[], object]) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        before_waiting()
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def _holder(inode: Inode) -> str:
    """A description of a lock's holder, as far as this machine knows.

    Lines of /proc/locks: `1: FLOCK ADVISORY WRITE <process> <major>:<minor>:<inode> 0 EOF` (proc_locks(5)).
    """
    device, number = inode
    place = f"{os.major(device):02x}:{os.minor(device):02x}:{number}"
    with suppress(OSError):
        for fields in map(str.split, LOCKS.read_text().splitlines()):
            if fields[1] == "FLOCK" and fields[5] == place:
                return _described(int(fields[4]))
    return "a different run"


def _described(process: int) -> str:
    try:
        found = psutil.Process(process)
        run, command = found.environ().get(FLOW_RUN), shlex.join(found.cmdline())
    except psutil.Error:
        return f"process {process}"
    return f"flow run {run} (process {process})" if run else f"process {process} ({command[:LONGEST_COMMAND]})"
