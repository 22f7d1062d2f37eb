"""Make the n-th file-system operation of `tasks.shards.publish` fail, to see what a disk fault or a kill leaves behind.

Everything that tokenmill writes goes through that one module, so its `os` is the only thing to replace: a stand-in there
numbers `open, write, fsync, replace, link, unlink, mkdir` from 1 and passes everything on. It belongs to this process and
its forked children; workers that are started anew don't inherit it.

    with count_operations() as log:
        prepare(...)
    for number in range(1, len(log.operations) + 1):
        with fail_operation(number, OSError(errno.ENOSPC, "disk full")), pytest.raises(OSError):
            prepare(...)

`killed_at` kills a forked child there, and `intercept` does anything before each operation, as a rival process would.
"""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.tasks.shards import publish as publish_module

from tests.forking import fork

OPERATIONS = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir")


class PowerOff(BaseException):
    """The machine stopped here: nothing after it ran, and what was not synced is lost. `pytest.raises(PowerOff)` takes it."""


@dataclass(frozen=True)
class Operation:
    """One call: its name, and the path that it was made on; where there are two, as in a rename, the second."""

    name: str
    subject: str


@dataclass
class Log:
    """The operations so far, the last of them perhaps the one that failed."""

    operations: list[Operation] = field(default_factory=list)

    def names(self):
        return [operation.name for operation in self.operations]


class FaultyOs:
    """`os` as `tasks.shards.publish` sees it: each operation is logged, then `before` may raise or kill."""

    def __init__(self, log, before):
        self._log = log
        self._before = before
        self._numbers = itertools.count(1)

    def __getattr__(self, name):
        original = getattr(os, name)
        if name not in OPERATIONS:
            return original

        def operation(*arguments, **keywords):
            place = arguments[1] if name in {"replace", "link"} else arguments[0]
            path = str(Path(f"/proc/self/fd/{place}").readlink() if isinstance(place, int) else place)
            self._log.operations.append(Operation(name, path))
            self._before(next(self._numbers), name, arguments)
            return original(*arguments, **keywords)

        return operation


@contextmanager
def intercept(before) -> Iterator[Log]:
    """A context in which `before(number, operation name, arguments)` is called ahead of each operation."""
    log = Log()
    publish_module.os = FaultyOs(log, before)
    try:
        yield log
    finally:
        publish_module.os = os


def count_operations():
    """A context whose log lists the operations made inside it; nothing fails."""
    return intercept(lambda number, name, arguments: None)


def fail_operation(number: int, error: BaseException):
    """A context in which operation `number` (from 1) raises `error`; its log is the value. A failing write has written half of
    its bytes, as on a full disk. From a PowerOff on, every operation raises it, so that no clean-up runs, and files that were
    written and not synced by then are emptied.
    """
    is_cut, unsynced = (
        isinstance(error, PowerOff),
        {},
    )  # a duplicate of the descriptor by which each such file was written

    def before(current, name, arguments):
        if is_cut and current > number:
            raise error
        if is_cut and name == "write" and arguments[0] not in unsynced:
            unsynced[arguments[0]] = os.dup(arguments[0])
        if current == number:
            if not is_cut:
                write_half(name, arguments)
            for descriptor in unsynced.values():
                os.ftruncate(descriptor, 0)
                os.close(descriptor)
            raise error
        if name == "fsync" and arguments[0] in unsynced:
            os.close(unsynced.pop(arguments[0]))

    return intercept(before)


def write_half(name, arguments):
    """A write that fails may have written a part of its bytes."""
    if name == "write":
        descriptor, content = arguments
        os.write(descriptor, content[: len(content) // 2])


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a forked child that SIGKILL hits at operation `number`; whether it did.

    Raises AssertionError when the child failed in another way; its traceback is on stderr.
    """

    def kill(current, name, arguments):
        if current == number:
            write_half(name, arguments)
            os.kill(os.getpid(), signal.SIGKILL)

    def killed():
        with intercept(kill):
            work()

    child = fork(killed)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed; see its traceback on stderr"
    return False
