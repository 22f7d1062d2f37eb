"""A whole RL preparation that is interrupted anywhere, or damaged, then repeated: the same bytes as if nothing had
happened, and nothing left behind.

A preparation of three data sets in a shard each, with questions out of tables, a quarantine and rows held out, makes
some 200 file-system operations. Each of them is hit once, in the four ways of `test_preparation_faults`.
"""

import json
import os
import random
import shutil
import time
from itertools import cycle
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.rl.inspect import inspect_rl_shard
from tokenmill.tasks.shards.verify import verify

from tests.building import publish_here
from tests.faults.injection import count_operations, killed_at
from tests.faults.interruptions import FAULTS, Repeatable, survive_each
from tests.forking import fork
from tests.preparing import tree
from tests.preparing_rl import build, plan, prepare, write_rows
from tests.shards.damage import DAMAGES, names_of, proofs, shard_of

pytestmark = pytest.mark.slow

STRIDE = 4
TINY = Path(__file__).parents[2] / "blends/tiny"
LONG_AGO = (1_000_000_000, 1_000_000_000)
STYLES = {"marbles": "dapo", "rectangles": "skywork"}
KEYS = ("train", "val", "test")


def questions(name, count, *tables):
    """Questions of the tiny blend, those that stand in the row itself or in one of `tables`, as rows of `name`."""
    rows = [json.loads(line) for line in (TINY / "questions.jsonl").read_bytes().splitlines()]
    rows = [row for row in rows if row.get("dataset") in {None, *tables}]
    return [{**row, "uuid": f"{name}-{number}"} for number, row in zip(range(count), cycle(rows), strict=False)]


class Preparation(Repeatable):
    """Data sets that use both tables, one of them, and none."""

    def __init__(self, folder):
        self.folder, self.out = folder, folder / "out"
        for name in STYLES:
            shutil.copyfile(TINY / f"{name}.parquet", self.table(name))
            os.utime(self.table(name), LONG_AGO)
        both = questions("both", 22, *STYLES)
        nowhere = {"dataset": "marbles", "_hf_placeholder": {"row": 6, "question_template": None}, "uuid": "none"}
        rows = {
            "both": [*both[:8], b"broken", *both[8:], nowhere],
            "one": questions("one", 16, "rectangles"),
            "none": [{"uuid": "empty"}, *questions("none", 12)],
        }
        for name, lines in rows.items():
            os.utime(write_rows(folder / f"{name}.jsonl", lines), LONG_AGO)
        self.blend = {"datasets": [self.source("both", *STYLES), self.source("one", "rectangles"), self.source("none")]}

    def source(self, name, *tables):
        found = {"name": name, "path": str(self.folder / f"{name}.jsonl")}
        places = {table: {"path": str(self.table(table)), "style": STYLES[table]} for table in tables}
        return {**found, "transforms": [{"resolve_placeholders": places}]} if tables else found

    def table(self, name):
        return self.folder / f"{name}.parquet"

    def change_table(self, name, change):
        """Replace a table by what `change` makes of it, a minute later."""
        modified = self.table(name).stat().st_mtime
        pq.write_table(change(pq.read_table(self.table(name))), self.table(name))
        os.utime(self.table(name), (modified + 60, modified + 60))

    def plan(self, **changed):
        return plan(self.blend, self.out, **{**SETTINGS, **changed})

    def run(self, **changed):
        return prepare(self.blend, self.out, **{**SETTINGS, **changed})


SETTINGS = {
    "target": "nemo_gym", "transforms": [{"select": ["uuid", "agent_ref", "responses_create_params"]}],
    "holdout": {"valid": 0.2, "test": 0.015},
}  # fmt: skip


@pytest.fixture(scope="module")
def preparation(tmp_path_factory):
    return Preparation(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(preparation):
    """What the folder holds after an undisturbed preparation, and how many operations that took."""
    preparation.clear()
    preparation.run()  # warm: the tables are loaded now
    preparation.clear()
    with count_operations() as log:
        planned, manifest = preparation.run()
    whole = tree(preparation.out)
    assert len(planned.plan.shards) == 3
    assert manifest["totals"]["dropped"] == {"malformed_json": 1, "placeholder_out_of_range": 1, "missing_field": 1}
    assert {"quarantine/both.jsonl", "quarantine/none.jsonl", "shards/tables.json"} <= whole.keys()
    shards = [shards_of(whole, split) for split in ("train", "valid", "test")]
    assert [whole[name] for name in offered(preparation.out)[: len(KEYS)]] == [b"".join(each) for each in shards]
    assert list(map(len, shards)) == [3, 3, 1], "joined, and of one shard"
    return whole, len(log.operations)


def shards_of(whole, split):
    """The published files of the shards of a split, in order."""
    return [content for name, content in sorted(whole.items()) if name.startswith(f"{split}/")]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_at_every_fourth_operation(preparation, undisturbed, fault):
    whole, operations = undisturbed
    survive_each(fault, preparation, whole, operations, STRIDE)


def published(found):
    return {name: content for name, content in found.items() if not name.startswith("shards/")}


def offered(out):
    """The files that a trainer would open now, by the manifest and by blend.json, by their names in `out`."""
    manifest, blend = (json.loads((out / name).read_bytes()) for name in ("manifest.json", "blend.json"))
    paths = [manifest[key] for key in KEYS if manifest[key]]
    paths += [path for listed in blend.values() if listed for path in listed[1::2]]
    return [str(Path(path).relative_to(out)) for path in paths]


def test_a_kill_while_an_earlier_output_is_replaced(preparation, undisturbed):
    """Whatever a trainer is shown meanwhile, it finds whole: names mean what they meant, before and after."""
    whole, _ = undisturbed
    preparation.clear()
    preparation.run(holdout={"valid": 0.4, "test": 0})
    earlier, kept = tree(preparation.out), preparation.out.with_name("earlier")
    shutil.copytree(preparation.out, kept)
    names = {name for name in earlier.keys() & whole.keys() if name.endswith(".jsonl")}
    assert {name for name in names if earlier[name] != whole[name]} <= {
        "quarantine/both.jsonl",
        "quarantine/none.jsonl",
    }
    with count_operations() as log:
        preparation.run()
    for number in range(1, len(log.operations) + 1, 7):
        preparation.clear()
        shutil.copytree(kept, preparation.out)
        assert killed_at(number, preparation.run)
        found = tree(preparation.out)
        for name in offered(preparation.out):
            assert found[name] == (earlier | whole)[name], f"operation {number}"
        preparation.run()
        assert preparation.temporaries() == []
        assert published(tree(preparation.out)) == published(whole), f"operation {number}"


@pytest.mark.parametrize("seed", range(3))
def test_order_batches_duplicates_and_a_stop_between_change_no_byte(preparation, seed):
    """Shards come in any order, some of them twice, in batches of any size; then the run is stopped, and goes on."""
    preparation.clear()
    preparation.run(shard_size=1_000)
    expected = tree(preparation.out)
    preparation.clear()
    shuffle = random.Random(seed)
    planned = preparation.plan(shard_size=1_000)
    some = shuffle.sample(planned.plan.pending, len(planned.plan.pending) - 3)
    twice = shuffle.sample(some, 4)
    work = [*some, *twice]
    shuffle.shuffle(work)
    done = []
    while work:
        size = shuffle.randint(1, 4)
        batch, work = work[:size], work[size:]
        done += build(planned, batch)
    assert sum(shard.reused for shard in done) == len(twice)
    with pytest.raises(RunError, match=r"3 of \d+ planned shards have no receipt"):
        publish_here("rl", planned)
    assert not published(tree(preparation.out))
    again, _ = preparation.run(shard_size=1_000)
    assert len(again.plan.pending) == 3
    assert tree(preparation.out) == expected


def test_a_second_run_builds_nothing_whatever_the_clock_says(preparation, undisturbed, monkeypatch):
    whole, _ = undisturbed
    preparation.clear()
    preparation.run()
    real, real_ns = time.time, time.time_ns
    for days in (0, 1, -1):
        monkeypatch.setattr(time, "time", lambda days=days: real() + days * 86_400)
        monkeypatch.setattr(time, "time_ns", lambda days=days: real_ns() + days * 86_400 * 10**9)
        with count_operations() as log:
            planned, _ = preparation.run()
        assert planned.plan.pending == []
        assert not [each for each in log.operations if "/shards/" in str(each.subject)]
        assert tree(preparation.out) == whole


def test_three_processes_that_prepare_the_same_at_once_agree(preparation, undisturbed):
    whole, _ = undisturbed
    preparation.clear()
    children = [fork(preparation.run) for _ in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert preparation.temporaries() == []
    assert tree(preparation.out) == whole


# Damage to what is there.


def problems_of(out):
    """What verification finds; damage to the manifest itself ends it with an error."""
    try:
        return verify(str(out), inspect_rl_shard).problems
    except InputError as error:
        return [str(error).replace(f"{out}: no manifest.json", f"{out}/manifest.json: missing")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_named_and_the_next_run_mends_only_that(preparation, undisturbed, damage):
    whole, _ = undisturbed
    preparation.clear()
    preparation.run()
    out = preparation.out
    assert problems_of(out) == []
    for path in proofs(out):
        if path.name == "tables.json":  # a cache of planning
            continue
        links = names_of(path, out)
        DAMAGES[damage](path)
        damaged = links if path.exists() and path.stat().st_nlink > 1 else {str(path)}
        assert any(problem.startswith(tuple(damaged)) for problem in problems_of(out)), path
        planned, _ = preparation.run()
        concerned = {key for name in damaged for key in shard_of(Path(name), planned)}
        assert {shard.key for shard in planned.plan.pending} == concerned, path
        assert tree(out) == whole, path
    assert problems_of(out) == []


def test_damage_to_what_planning_remembers_costs_nothing_but_time(preparation, undisturbed):
    whole, _ = undisturbed
    preparation.clear()
    preparation.run()
    for name in ("tables.json", "index.json"):
        for damage in DAMAGES.values():
            damage(preparation.out / "shards" / name)
            planned, _ = preparation.run()
            assert planned.plan.pending == []
            assert tree(preparation.out) == whole


# Tables that change.


@pytest.fixture
def own(tmp_path):
    """A preparation whose tables a test may change, done once."""
    preparation = Preparation(tmp_path)
    preparation.run()
    return preparation


def backwards(table):
    """The same rows under other numbers."""
    return table.take(list(reversed(range(table.num_rows))))


def fresh(preparation):
    """What a preparation that knows nothing of an earlier one publishes now."""
    out = preparation.out.with_name("fresh")
    shutil.rmtree(out, ignore_errors=True)
    prepare(preparation.blend, out, **SETTINGS)
    return published(tree(out))


def test_a_changed_table_rebuilds_the_shards_that_use_it_and_no_other(own):
    for name, users in {"marbles": {"both"}, "rectangles": {"both", "one"}}.items():
        before = published(tree(own.out))
        own.change_table(name, backwards)
        planned, _ = own.run()
        assert {shard.dataset for shard in planned.plan.pending} == users
        assert published(tree(own.out)) == fresh(own) != before
        assert problems_of(own.out) == []


def test_a_table_that_is_touched_or_moved_is_the_same_table(own):
    whole = published(tree(own.out))
    os.utime(own.table("marbles"))
    assert own.plan().plan.pending == []
    own.table("rectangles").rename(own.folder / "moved.parquet")
    own.table = lambda name: own.folder / {"rectangles": "moved.parquet"}.get(name, f"{name}.parquet")
    own.blend["datasets"] = [own.source("both", *STYLES), own.source("one", "rectangles"), own.source("none")]
    planned, _ = own.run()
    assert planned.plan.pending == []
    found = published(tree(own.out))
    assert {name for name in whole if found[name] != whole[name]} == {"manifest.json"}, "which tells of the blend"


def test_a_table_that_changes_after_planning_proves_nothing(own):
    own.clear()
    own.change_table("marbles", backwards)  # to one that this process has not loaded yet
    planned = own.plan()
    own.change_table("marbles", backwards)
    with pytest.raises(RunError, match=r"marbles\.parquet: changed"):
        build(planned, planned.plan.pending)
    assert not list(own.out.rglob("receipt.json"))
    own.run()
    assert own.temporaries() == []
    assert published(tree(own.out)) == fresh(own)
