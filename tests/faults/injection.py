"""Make the n-th file-system operation of `tasks.shards.publish` fail, to see what a disk fault or a kill leaves behind.

Everything that tokenmill writes goes through that one module, so its `os` is the only thing to replace: these functions
put a stand-in there that numbers `open, write, fsync, replace, link, unlink, mkdir` from 1 and passes everything on.
The product has no hooks. Reading, object stores and other modules are not touched.

How many operations there are, and which:

    with count_operations() as log:
        prepare(...)
    len(log.operations), log.operations[0].name

Fail each in turn (a failing write has written half of its bytes first, as a full disk does):

    for number in range(1, total + 1):
        with fail_operation(number, OSError(errno.ENOSPC, "disk full")), pytest.raises(OSError):
            prepare(...)

Cut the power at each: `PowerOff` is raised, every later operation raises it too, so that no clean-up runs, and files that
were written but not synced by then are emptied. It is a BaseException, which `pytest.raises(PowerOff)` takes:

    with fail_operation(number, PowerOff()), pytest.raises(PowerOff): ...

Kill a whole process at each. `work` runs in a forked child; the answer is False once the child ended by itself first:

    number = 1
    while killed_at(number, work):
        check(); number += 1

Or do anything at all before each operation, such as what a rival process would do:

    with intercept(lambda number, name, arguments: ...):
        prepare(...)

The stand-in belongs to this process and its forked children. Workers started anew (spawned, or Dask processes) do not
inherit it: run such a preparation with an in-process cluster, or call `killed_at` inside the worker.
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
    """The machine stopped here: nothing after it ran, and what was not synced is lost."""


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
    """A context in which operation `number` (from 1) raises `error`; its log is the value. See the module's page."""
    return intercept(PowerCut(number, error) if isinstance(error, PowerOff) else Failure(number, error))


@dataclass
class Failure:
    """Raises `error` at operation `number`, once."""

    number: int
    error: BaseException

    def __call__(self, number, name, arguments):
        if number == self.number:
            write_half(name, arguments)
            raise self.error


@dataclass
class PowerCut:
    """Raises `error` from operation `number` on, and empties the files that were not synced by then."""

    number: int
    error: BaseException
    unsynced: dict[int, int] = field(default_factory=dict)
    """A duplicate of the descriptor by which each unsynced file was written."""

    def __call__(self, number, name, arguments):
        if number > self.number:
            raise self.error
        if name == "write" and arguments[0] not in self.unsynced:
            self.unsynced[arguments[0]] = os.dup(arguments[0])
        if number == self.number:
            self.lose()
            raise self.error
        if name == "fsync" and arguments[0] in self.unsynced:
            os.close(self.unsynced.pop(arguments[0]))

    def lose(self):
        while self.unsynced:
            _, descriptor = self.unsynced.popitem()
            os.ftruncate(descriptor, 0)
            os.close(descriptor)


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
