"""A preparation that is interrupted, then repeated: what preparations of every kind have to stand."""

import errno
import shutil
from pathlib import Path

from tokenmill.tasks.shards import publish as publish_module

from tests.faults.injection import PowerOff, fail_operation, killed_at
from tests.preparing import tree

FAULTS = {
    "a full disk": OSError(errno.ENOSPC, "No space left on device"),
    "an input/output error": OSError(errno.EIO, "Input/output error"),
    "a power cut": PowerOff(),
    "a kill": None,
}
"""What can befall a file-system operation: an error that it raises, or a SIGKILL of the whole process."""


class Repeatable:
    """The same preparation again and again, into the folder `out` that can be emptied; `run` is its kind's own."""

    out: Path

    def run(self):
        raise NotImplementedError

    def clear(self):
        shutil.rmtree(self.out, ignore_errors=True)

    def temporaries(self):
        return [path for path in self.out.rglob("*") if publish_module.TEMPORARY.fullmatch(path.name)]


def assert_mended(preparation, whole, number):
    preparation.run()
    assert preparation.temporaries() == [], f"operation {number}"
    assert tree(preparation.out) == whole, f"operation {number}"


def survive(preparation, whole, number, error):
    """Fail one operation; the run may notice or may have been done with the file, but never ends well with less."""
    preparation.clear()
    with fail_operation(number, error):
        try:
            preparation.run()
        except (OSError, PowerOff) as raised:
            assert raised is error  # noqa: PT017 - whether it is raised is not the point
        else:
            assert tree(preparation.out) == whole
    assert_mended(preparation, whole, number)


def survive_a_kill(preparation, whole, number):
    """The same for a process that is killed before an operation."""
    preparation.clear()
    assert killed_at(number, preparation.run)
    assert_mended(preparation, whole, number)


def survive_each(fault, preparation, whole, operations, stride):
    """Hit every `stride`-th of so many operations by a fault, each in a run of its own; each kind of fault hits others."""
    first = 1 + list(FAULTS).index(fault) * stride // len(FAULTS)
    hit = range(first, operations + 1, stride)
    assert hit
    for number in hit:
        error = FAULTS[fault]
        if error is None:
            survive_a_kill(preparation, whole, number)
        else:
            survive(preparation, whole, number, error)
