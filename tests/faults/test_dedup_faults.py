"""A whole deduplication that is interrupted anywhere, or damaged, then repeated: the same bytes as if nothing had
happened, and nothing left behind.

Three data sets in a slice each, two partitions, a cap and an evaluation: every round has work. That makes some 400
file-system operations. Every fourth of them is hit, in one of the four ways of `test_preparation_faults`.
"""

import json
import os
import random
import shutil

import pytest
from tokenmill.tasks.dedup.inspect import inspect_dedup_shard
from tokenmill.tasks.dedup.preparation import decided_plan
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.verify import verify

from tests.dedup.test_near import edited, prose
from tests.faults.injection import count_operations, killed_at
from tests.faults.interruptions import FAULTS, Repeatable, survive_each
from tests.forking import fork
from tests.preparing import tree
from tests.preparing_dedup import Run, build, decisions_of, plan, prepare
from tests.preparing_rl import write_rows

pytestmark = pytest.mark.slow

STRIDE = 16
"""The four ways take turns. All rounds write in one way, so that every fourth operation is enough."""

LONG_AGO = (1_000_000_000, 1_000_000_000)


class Preparation(Repeatable):
    """Data sets with versions, copies and bad rows, one of them in another."""

    def __init__(self, folder):
        self.folder, self.out = folder, folder / "out"
        generator = random.Random(0)
        texts = [prose(generator, 60) for _ in range(8)]
        versions = [edited(generator, text, 1) for text in texts[:3]]
        asked = [{"text": f"{prose(generator, 20)} {texts[7]}", "topic": "asked"}]
        rows = {
            "one": [*({"text": text, "topic": number % 2} for number, text in enumerate(texts[:6])), b"{broken"],
            "two": [{"text": text} for text in [*versions, *texts[3:5]]],
            "three": [*asked, b"", {"text": f" {texts[0]}"}, {"text": "short", "topic": 0}],
        }
        for name, lines in rows.items():
            os.utime(write_rows(folder / f"{name}.jsonl", lines), LONG_AGO)
        os.utime(write_rows(folder / "exam.jsonl", [{"text": texts[7]}]), LONG_AGO)
        self.blend = {"datasets": [{"name": name, "path": str(folder / f"{name}.jsonl")} for name in rows]}
        exams = {"datasets": [{"name": "exam", "path": str(folder / "exam.jsonl")}]}
        self.settings = {"evaluations": exams, "cap": 1, "cap_by": "topic"}

    def plan(self):
        return plan(self.blend, self.out, **self.settings)

    def run(self, **changed):
        return prepare(self.blend, self.out, **{**self.settings, **changed})


@pytest.fixture(scope="module")
def preparation(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tokenmill.tasks.dedup.rounds.PARTITION_BYTES", 5_000)
        yield Preparation(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(preparation):
    """What the folder holds after an undisturbed run, and how many operations that took."""
    preparation.clear()
    with count_operations() as log:
        decided, manifest = preparation.run()
    whole = tree(preparation.out)
    assert len(decided.plan.shards) == 3
    assert decided.plan.shards[0].identity["recipe"]["partitions"] == 2
    assert manifest["totals"]["dropped"] == {
        "exact_duplicate": 3, "near_duplicate": 3, "contaminated": 1, "beyond_cap": 2,
        "malformed_json": 1, "blank_line": 1,
    }  # fmt: skip
    return whole, len(log.operations)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_at_every_sixteenth_operation(preparation, undisturbed, fault):
    whole, operations = undisturbed
    survive_each(fault, preparation, whole, operations, STRIDE)


def published(found):
    return {name: content for name, content in found.items() if not name.startswith("shards/")}


def test_a_kill_while_an_earlier_output_is_replaced(preparation, undisturbed):
    """Names of rows mean what they meant, before and after; blend.json names only data sets that are there."""
    whole, _ = undisturbed
    preparation.clear()
    preparation.run(mode="tag")
    earlier, kept = tree(preparation.out), preparation.out.with_name("earlier")
    shutil.copytree(preparation.out, kept)
    with count_operations() as log:
        preparation.run()
    assert len(log.operations) > 20
    for number in range(1, len(log.operations) + 1, 7):
        preparation.clear()
        shutil.copytree(kept, preparation.out)
        assert killed_at(number, preparation.run)
        found = tree(preparation.out)
        for name in found:
            if name.startswith("data/"):
                assert found[name] == (earlier | whole)[name], f"operation {number}"
        for source in json.loads((preparation.out / "blend.json").read_bytes())["datasets"]:
            assert os.listdir(source["path"]), f"operation {number}"  # noqa: PTH208
        preparation.run()
        assert preparation.temporaries() == []
        assert published(tree(preparation.out)) == published(whole), f"operation {number}"


@pytest.mark.parametrize("seed", range(3))
def test_order_and_duplicates_change_no_byte(preparation, undisturbed, seed):
    """The shards of each round come in any order, some of them twice."""
    whole, _ = undisturbed
    preparation.clear()
    shuffle, run = random.Random(seed), Run()

    def disorderly(step, pending, *rest, **options):
        work = [*pending, *shuffle.sample(pending, len(pending) // 2)]
        shuffle.shuffle(work)
        run(step, work, *rest, **options)

    planned = preparation.plan()
    decisions = decisions_of(planned, disorderly)
    decided = decided_plan(planned, decisions)
    build(decided, decisions, list(reversed(decided.plan.pending)))
    again, _ = preparation.run()
    assert again.plan.pending == []
    assert tree(preparation.out) == whole


def test_a_second_run_builds_nothing(preparation, undisturbed):
    whole, _ = undisturbed
    preparation.clear()
    preparation.run()
    run = Run()
    with count_operations() as log:
        decided, _ = preparation.run(run=run)
    assert (run.built, decided.plan.pending) == ([], [])
    assert not [each for each in log.operations if "/shards/" in str(each.subject)]
    assert tree(preparation.out) == whole


def test_three_processes_that_do_the_same_at_once_agree(preparation, undisturbed):
    whole, _ = undisturbed
    preparation.clear()
    children = [fork(preparation.run) for _ in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert preparation.temporaries() == []
    assert tree(preparation.out) == whole


def test_a_source_that_changes_while_it_is_prepared_proves_nothing(tmp_path):
    own = Preparation(tmp_path)
    planned = own.plan()
    write_rows(tmp_path / "two.jsonl", [{"text": "another text"}])
    with pytest.raises(RunError, match=r"two\.jsonl: changed"):
        decisions_of(planned)
    own.clear()
    planned = own.plan()
    decisions = decisions_of(planned)
    decided = decided_plan(planned, decisions)
    write_rows(tmp_path / "one.jsonl", [{"text": "another text"}] * 7)
    with pytest.raises(RunError, match=r"one\.jsonl: changed"):
        build(decided, decisions, decided.plan.pending)
    own.run()
    assert verify(str(own.out), inspect_dedup_shard).problems == []
    assert own.temporaries() == []
