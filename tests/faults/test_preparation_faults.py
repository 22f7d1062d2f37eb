"""A whole preparation that is interrupted anywhere, then repeated: the same bytes as if nothing had happened.

A preparation of a large file and a bundle of small ones in three shards, with a quarantine and held-out documents, makes
some 230 file-system operations. Each of them is hit once, so that the tests take seconds: every fourth by a full disk, every fourth by an
input/output error, every fourth by a power cut, which loses what was not synced, and the others by a SIGKILL of the
whole process.
"""

import os
import random
import time
from pathlib import Path

import pytest
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.preparation import PRETRAIN, build_pretrain_shard, inspect_pretrain_shard, plan_pretrain
from tokenmill.tasks.tokenize.settings import PretrainSettings

from tests.building import build_shards, publish_here
from tests.faults.injection import count_operations, killed_at
from tests.faults.interruptions import FAULTS, Repeatable, survive_each
from tests.preparing import blend_of, build_pending, prepare, tree, write_lines
from tests.tokenize.small_vocabularies import byte_level_bpe

pytestmark = pytest.mark.slow

STRIDE = 4
TEXTS = [f"document {number} says hello to the {number * 7919 % 1000}th world" for number in range(120)]


class Preparation(Repeatable):
    """A large file in two shards, and a bundle of small ones."""

    def __init__(self, folder):
        rows = {"a": [*TEXTS[:50], b"broken", *TEXTS[50:114]], "b": [b'{"text": null}']}
        rows |= {"c": TEXTS[114:117], "d": TEXTS[117:]}
        self.blend = blend_of(folder / "corpus")
        for name, lines in rows.items():
            os.utime(write_lines(folder / "corpus" / f"{name}.jsonl", lines), (1_000_000_000, 1_000_000_000))
        self.model = str(byte_level_bpe(folder / "vocabulary", size=400))
        self.out = folder / "out"

    def settings(self, shard_size=4000):
        fields = {"tokenizer": {"model": self.model}, "shard_size": shard_size, "holdout": {"valid": 0.2, "test": 0}}
        return parse(PretrainSettings, fields, "settings")

    def plan(self, **changed):
        return plan_pretrain(load_blend(self.blend), self.settings(**changed), str(self.out))

    def run(self, **changed):
        return prepare(self.blend, self.out, **self.settings(**changed).model_dump())


@pytest.fixture(scope="module")
def preparation(tmp_path_factory):
    return Preparation(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(preparation):
    """What the folder holds after an undisturbed preparation, and how many operations that took."""
    preparation.clear()
    preparation.run()  # warm: the vocabulary, the gate and the encoders are loaded now
    preparation.clear()
    with count_operations() as log:
        preparation.run()
    assert [len(shard.part.members) for shard in preparation.plan().plan.shards] == [0, 0, 3]
    return tree(preparation.out), len(log.operations)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_at_every_fourth_operation(preparation, undisturbed, fault):
    whole, operations = undisturbed
    survive_each(fault, preparation, whole, operations, STRIDE)


def test_a_kill_while_an_earlier_output_is_replaced(preparation, undisturbed):
    """The folder holds another preparation; what it shows a trainer is whole until the new one is."""
    whole, _ = undisturbed
    preparation.clear()
    preparation.run(shard_size=2500)
    earlier = tree(preparation.out)
    with count_operations() as log:
        preparation.run()
    for number in range(1, len(log.operations) + 1, 13):
        preparation.clear()
        preparation.run(shard_size=2500)
        assert killed_at(number, preparation.run)
        found = tree(preparation.out)
        expected = earlier if found["blend.json"] == earlier["blend.json"] else whole
        for name in expected:
            if name.startswith(("blend.json", "train/", "valid/", "test/")):
                assert found[name] == expected[name]
        preparation.run()
        assert preparation.temporaries() == []
        assert {name: content for name, content in tree(preparation.out).items() if "shards/" not in name} == {
            name: content for name, content in whole.items() if "shards/" not in name
        }


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_that_jumps_between_runs_changes_nothing(preparation, undisturbed, monkeypatch, days):
    whole, _ = undisturbed
    preparation.clear()
    preparation.run()
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + days * 86_400)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + days * 86_400 * 10**9)
    plan, _ = preparation.run()
    assert plan.plan.pending == []
    assert tree(preparation.out) == whole
    preparation.clear()
    preparation.run()
    assert tree(preparation.out) == whole
    assert verify(str(preparation.out), inspect_pretrain_shard).problems == []


def build(planned, shards):
    """One batch in this process."""
    return build_shards("pretrain", planned, shards)


@pytest.mark.parametrize("seed", range(5))
def test_order_batches_and_duplicates_change_no_byte(preparation, seed):
    """Shards come in any order, some of them twice, in batches of any size."""
    preparation.clear()
    preparation.run(shard_size=700)
    expected = tree(preparation.out)
    preparation.clear()
    shuffle = random.Random(seed)
    planned = preparation.plan(shard_size=700)
    twice = shuffle.sample(planned.plan.pending, 6)
    work = [*planned.plan.pending, *twice]
    shuffle.shuffle(work)
    done = []
    while work:
        size = shuffle.randint(1, 4)
        batch, work = work[:size], work[size:]
        done += build(planned, batch)
    assert sum(shard.reused for shard in done) == len(twice)
    assert len(done) == len(planned.plan.pending) + len(twice)
    publish_here("pretrain", planned)
    assert tree(preparation.out) == expected


@pytest.mark.parametrize("seed", range(3))
def test_a_run_stopped_after_some_shards_goes_on_from_there(preparation, seed):
    preparation.clear()
    preparation.run(shard_size=700)
    expected = tree(preparation.out)
    preparation.clear()
    planned = preparation.plan(shard_size=700)
    done = random.Random(seed).sample(planned.plan.pending, 5)
    build(planned, done)
    again, _ = preparation.run(shard_size=700)
    assert len(again.plan.pending) == len(planned.plan.pending) - 5
    assert tree(preparation.out) == expected


def test_a_shard_that_is_built_again_has_the_same_bytes(preparation, undisturbed):
    whole, _ = undisturbed
    preparation.clear()
    planned, _ = preparation.run()
    for shard in planned.plan.shards:
        build_pretrain_shard(shard, planned.plan.store, **PRETRAIN.arguments(planned))
    publish_here("pretrain", planned)
    assert tree(preparation.out) == whole


def test_two_processes_that_prepare_the_same_at_once_agree(preparation, undisturbed):
    whole, _ = undisturbed
    preparation.clear()
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                preparation.run()
            except BaseException:  # noqa: BLE001 - the child must never return into the caller's stack
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert preparation.temporaries() == []
    assert tree(preparation.out) == whole


def test_planning_alone_publishes_nothing(preparation):
    preparation.clear()
    planned = preparation.plan()
    build_pending(planned)
    assert {path.name for path in Path(preparation.out).iterdir()} == {"shards"}
