"""Tables of questions that change, are touched or moved between preparations of RL."""

import os
import shutil

import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.shards.verify import verify

from tests.building import prepare_here
from tests.kinds.interruptions import temporaries
from tests.kinds.preparations import Reinforcement
from tests.preparing import tree
from tests.preparing_rl import build

pytestmark = pytest.mark.slow


class Changing(Reinforcement):
    """A preparation whose tables a test may change."""

    def change_table(self, name, change):
        """Replace a table by what `change` makes of it, a minute later."""
        modified = self.table(name).stat().st_mtime
        pq.write_table(change(pq.read_table(self.table(name))), self.table(name))
        os.utime(self.table(name), (modified + 60, modified + 60))


def published(found):
    return {name: content for name, content in found.items() if not name.startswith("shards/")}


def problems_of(out):
    return verify(str(out), inspector_of(str(out))).problems


@pytest.fixture
def own(tmp_path):
    """A preparation whose tables a test may change, done once."""
    preparation = Changing(tmp_path)
    preparation.run()
    return preparation


def backwards(table):
    """The same rows under other numbers."""
    return table.take(list(reversed(range(table.num_rows))))


def fresh(preparation):
    """What a preparation that knows nothing of an earlier one publishes now."""
    out = preparation.out.with_name("fresh")
    shutil.rmtree(out, ignore_errors=True)
    prepare_here("rl", preparation.blend, out, **preparation.settings)
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
    own.blend["datasets"] = own.sources()
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
    assert temporaries(own.out) == []
    assert published(tree(own.out)) == fresh(own)
