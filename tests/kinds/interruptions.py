"""A preparation whose file-system operations are failed, each in a run of its own, and which is then repeated."""

import errno
import itertools
import re
from pathlib import PurePosixPath

from tokenmill.tasks.shards.publish import TEMPORARY

from tests.faults.injection import PowerOff, fail_operation, killed_at
from tests.preparing import tree

FAULTS = {
    "a full disk": OSError(errno.ENOSPC, "No space left on device"),
    "an input/output error": OSError(errno.EIO, "Input/output error"),
    "a power cut": PowerOff(),
    "a kill": None,
}
"""What can befall a file-system operation: an error that it raises, or a SIGKILL of the whole process."""


THREADED = {"nll"}
"""Kinds whose threads a forked child would wait for: torch's."""

OF_MANY = {("data",), ("train",), ("valid",), ("test",), ("splits",), ("pools",), ("quarantine",), ("tools",)}
"""Folders of files whose names say which, and not what, they are."""


def points(log, out):
    """The number of the first operation, from 1, at each distinct point: an operation on a kind of file at a stage.

    All files are written by the same few lines, so that one of each ending stands for the others of its stage: of the store's folder
    for its kind, or of a folder of the output. Receipts are apart, and each name is given once.
    """
    found = {}
    for number, operation in enumerate(log.operations, 1):
        path = PurePosixPath(operation.subject.removesuffix(" (deleted)"))
        if path.is_relative_to(out):
            folder = path.relative_to(out).parts[:-1]
            stage = folder[: 2 if folder[:1] == ("shards",) else 1]
            name = path.name[1:-21] if TEMPORARY.fullmatch(path.name) else path.name
            apart = name == "receipt.json" or (operation.name == "replace" and stage not in OF_MANY)
            named = re.sub(r"train|valid|test|val|[0-9a-f]{32}", "", name)
            found.setdefault((operation.name, stage, named if apart else PurePosixPath(name).suffix), number)
    return found


def temporaries(out):
    """Files that are being written, or were when a process ended."""
    return [path for path in out.rglob("*") if TEMPORARY.fullmatch(path.name)]


def by_fault(log, numbers, faults=FAULTS):
    """The numbers of operations by the fault that hits each: every kind of operation meets all faults in turn."""
    turns, hit = {}, {fault: [] for fault in faults}
    for number in numbers:
        turn = turns.setdefault(log.operations[number - 1].name, itertools.cycle(faults))
        hit[next(turn)].append(number)
    return hit


def assert_mended(sample, whole, number):
    """Run again; a file that was there already was complete."""
    found = tree(sample.out)
    assert {name for name in found.keys() & whole.keys() if found[name] != whole[name]} == set(), f"operation {number}"
    sample.run()
    assert temporaries(sample.out) == [], f"operation {number}"
    assert tree(sample.out) == whole, f"operation {number}"


def survive(sample, whole, number, error):
    """Fail one operation; the run may notice or may have been done with the file, but never ends well with less."""
    with fail_operation(number, error):
        try:
            sample.run()
        except (OSError, PowerOff) as raised:
            assert raised is error  # noqa: PT017 - whether it is raised is not the point
        else:
            assert tree(sample.out) == whole
    assert_mended(sample, whole, number)


def survive_a_kill(sample, whole, number):
    """The same for a process that is killed before an operation."""
    assert killed_at(number, sample.run)
    assert_mended(sample, whole, number)
