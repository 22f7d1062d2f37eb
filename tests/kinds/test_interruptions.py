"""Every kind of preparation, interrupted anywhere, run again, in another order, several times at once, or on another day:
the bytes of an undisturbed run, and nothing left behind.

Pretraining is hit at each of its file-system operations, the other kinds at each distinct point; the faults take turns.
"""

import errno
import itertools
import json
import os
import random
import re
import shutil
import time
from pathlib import Path, PurePosixPath

import pytest
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.publish import TEMPORARY
from tokenmill.tasks.shards.verify import verify

from tests.building import build_here
from tests.faults.injection import PowerOff, count_operations, fail_operation, killed_at
from tests.forking import fork
from tests.kinds.preparations import LONG_AGO, THREADED
from tests.preparing import tree

pytestmark = pytest.mark.slow

FAULTS = {
    "a full disk": OSError(errno.ENOSPC, "No space left on device"),
    "an input/output error": OSError(errno.EIO, "Input/output error"),
    "a power cut": PowerOff(),
    "a kill": None,
}
"""What can befall a file-system operation: an error that it raises, or a SIGKILL of the whole process."""


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


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_anywhere(prepared, fault):
    faults = [each for each in FAULTS if each != "a kill" or prepared.kind not in THREADED]
    for begin, log in prepared.logs.items():
        everywhere = range(1, len(log.operations) + 1)
        hit = everywhere if prepared.kind == "pretrain" else points(log, prepared.out).values()
        stored = ["/out/shards/" in each.subject for each in log.operations]
        own = [number for number in hit if stored[number - 1] == (begin is None)]
        for number in by_fault(log, own, faults).get(fault, []):
            prepared.clear(begin)
            if FAULTS[fault] is None:
                survive_a_kill(prepared, prepared.whole, number)
            else:
                survive(prepared, prepared.whole, number, FAULTS[fault])


def published(found):
    return {name: content for name, content in found.items() if not name.startswith("shards/")}


def shown(out, found):
    """The files that blend.json names, itself or by the start of their names; each name leads to some."""
    strings = json.dumps(json.loads((out / "blend.json").read_bytes())).split('"')
    names = [text.removeprefix(f"{out}/") for text in strings if text.startswith(f"{out}/")]
    temporary = {str(path.relative_to(out)) for path in temporaries(out)}
    files = {name: [file for file in found.keys() - temporary if file.startswith(name)] for name in names}
    assert names
    assert all(files.values())
    return {file for listed in files.values() for file in listed}


def test_a_kill_while_an_earlier_output_is_replaced(forking):
    """What a reader is shown meanwhile is whole: names mean what they meant, before and after."""
    prepared = forking
    out, whole = prepared.out, prepared.whole
    prepared.clear(prepared.store)  # what is hit is publication alone
    prepared.run(**prepared.earlier)
    earlier, kept = tree(out), out.with_name("earlier")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(out, kept)
    with count_operations() as log:
        prepared.run()
    replacing = [
        number
        for (name, stage, _), number in points(log, out).items()
        if stage[:1] != ("shards",) and name in {"replace", "link", "unlink"}  # between these, names mean the same
    ]
    assert len(replacing) > 5
    for number in replacing:
        prepared.clear()
        shutil.copytree(kept, out)
        assert killed_at(number, prepared.run)
        found = tree(out)
        meant = whole | earlier if found["blend.json"] == earlier["blend.json"] else earlier | whole
        for name in shown(out, found):
            assert found[name] == meant[name], f"operation {number}: {name}"
        for file in json.loads(found["manifest.json"])["files"]:
            name = file["path"]
            if name in earlier.keys() | whole.keys():
                assert found[name] in (earlier.get(name), whole.get(name)), f"operation {number}"
        prepared.run()
        assert temporaries(prepared.out) == []
        assert published(tree(out)) == published(whole), f"operation {number}"


class Disorder:
    """Builds the shards of every stage in any order, some of them twice, in batches of any size."""

    def __init__(self, seed):
        self.shuffle, self.reused = random.Random(seed), 0

    def __call__(self, step, pending, store, arguments, *, rebuild):
        again = self.shuffle.sample(pending, len(pending) // 2)
        work, done = [*pending, *again], []
        self.shuffle.shuffle(work)
        while work:
            size = self.shuffle.randint(1, 4)
            done += build_here(step, work[:size], store, arguments, rebuild=rebuild, announce=self.count)
            work = work[size:]
        return done

    def count(self, record):
        self.reused += record["reused"]


@pytest.mark.parametrize("seed", range(2))
def test_order_batches_and_duplicates_change_no_byte(prepared, seed):
    prepared.run(shard_size=prepared.slices)
    expected, disorder = tree(prepared.out), Disorder(seed)
    prepared.clear()
    prepared.run(build=disorder, shard_size=prepared.slices)
    assert disorder.reused > 1
    assert tree(prepared.out) == expected


def test_stopped_run_is_not_published_and_resumes(prepared):
    prepared.run(shard_size=prepared.slices)
    expected = tree(prepared.out)
    prepared.clear()
    planned = prepared.plan(shard_size=prepared.slices)
    total, built = len(planned.plan.pending), []

    def stopping(step, pending, store, arguments, *, rebuild):
        return build_here(step, random.Random(0).sample(pending, len(pending) // 2), store, arguments, rebuild=rebuild)

    with pytest.raises(RunError, match="don't have a receipt"):
        prepared.run(build=stopping, shard_size=prepared.slices)
    assert not published(tree(prepared.out)).keys() & {"blend.json"}

    def noting(step, pending, store, arguments, *, rebuild):
        built.extend(shard.key for shard in pending)
        return build_here(step, pending, store, arguments, rebuild=rebuild)

    prepared.run(build=noting, shard_size=prepared.slices)
    assert len({shard.key for shard in planned.plan.pending} & set(built)) == total - total // 2
    assert tree(prepared.out) == expected


def no_shards(step, pending, store, arguments, *, rebuild):
    assert list(pending) == [], step.name
    return []


def test_second_run_reuses_every_shard_at_any_time(prepared, monkeypatch):
    prepared.run()
    real, real_ns = time.time, time.time_ns
    for days in (0, 1, -1):
        monkeypatch.setattr(time, "time", lambda days=days: real() + days * 86_400)
        monkeypatch.setattr(time, "time_ns", lambda days=days: real_ns() + days * 86_400 * 10**9)
        with count_operations() as log:
            prepared.run(build=no_shards)
        assert not [each for each in log.operations if each.name == "write" and "/shards/" in each.subject]
        assert tree(prepared.out) == prepared.whole
    prepared.clear()
    prepared.run()
    assert tree(prepared.out) == prepared.whole
    assert verify(str(prepared.out), inspector_of(str(prepared.out))).problems == []


def test_three_processes_that_prepare_the_same_at_once_agree(forking):
    children = [fork(forking.run) for _ in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert temporaries(forking.out) == []
    assert tree(forking.out) == forking.whole


def test_planning_does_not_publish(prepared):
    planned = prepared.plan()
    assert [*planned.plan.pending] == [*planned.plan.shards]
    assert not prepared.out.exists() or {path.name for path in prepared.out.iterdir()} <= {"shards"}
    assert not list(prepared.out.rglob("receipt.json"))


def test_source_changed_after_planning_is_not_receipted(prepared):
    """Nothing of its slices; the next run finds it as it was."""
    planned = prepared.plan()
    source = next(Path(shard.part.file.uri) for shard in planned.plan.shards if shard.part.file.uri.endswith(".jsonl"))
    content = source.read_bytes()
    source.write_bytes(content[: len(content) // 2] + content)
    with pytest.raises(RunError, match=rf"{source.name}: changed"):
        preparation(prepared.kind).build(planned, build_here)
    source.write_bytes(content)
    os.utime(source, LONG_AGO)
    prepared.run()
    assert tree(prepared.out) == prepared.whole
