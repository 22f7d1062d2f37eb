"""A whole Harmony normalization that is interrupted anywhere, then repeated: the same bytes as if nothing had happened,
and nothing of it published half.

Two data sets are normalized, signed, held against each other and against an evaluation, marked, selected and published:
14 shards and some 520 file-system operations, a third of a second's work. So only every fourth or fifth of them is hit,
once, in the four ways of `test_preparation_faults` by turns: operation 1, 18, 35, ... by a full disk, 5, 22, 39, ... by an
input/output error, and so on. Publishing a file takes six to eight operations, and as 17 is prime to that, each way comes
upon every kind of operation.
"""

import json
import os
import shutil

import pytest

from tests.faults.injection import count_operations, killed_at
from tests.faults.interruptions import FAULTS, Repeatable, survive_each
from tests.harmony.rows import AGENTIC
from tests.peers.conversations import talk, thinking, user
from tests.preparing import tree, write_lines
from tests.preparing_harmony import left_behind, prepare
from tests.preparing_rl import write_rows

pytestmark = pytest.mark.slow

STRIDE = 17
LONG_AGO = (1_000_000_000, 1_000_000_000)
QUESTION = "A mill grinds twelve sacks of wheat in three hours; how many sacks does it grind in seven?"


def conversation(number, end="."):
    """A conversation of some fifty words, of which no other number has runs of five."""
    words = [f"w{number}x{place}" for place in range(50)]
    return talk(user(" ".join(words[:10])), thinking(" ".join(words[10:30]), " ".join(words[30:]) + end))


ROWS = {
    "chats": [
        *map(conversation, range(8)),
        b"broken",
        conversation(3),
        conversation(4, end="!"),
        talk(user("No answer?")),
        talk(*conversation(5)["messages"][:1], thinking("Again.", "Another answer.")),
        talk(user(f"We ask: {QUESTION}"), thinking("4 an hour.", "28.")),
    ],
    "orders": [AGENTIC, *map(conversation, range(20, 24)), conversation(7)],
}


class Preparation(Repeatable):
    """Two data sets with everything that makes a row go. `whole` is what the folder holds afterwards, once that is known:
    then a run finds some of these files in it, each whole, and no others.
    """

    def __init__(self, folder):
        self.out, self.whole = folder / "out", None
        paths = {name: write_rows(folder / f"{name}.jsonl", rows) for name, rows in ROWS.items()}
        paths["exam"] = write_lines(folder / "exam.jsonl", [QUESTION])
        for path in paths.values():
            os.utime(path, LONG_AGO)
        sources = {name: {"name": name, "path": str(path)} for name, path in paths.items()}
        self.exam = {"datasets": [sources.pop("exam")]}
        self.blend = {"datasets": [{**each, "converter": "openai_messages"} for each in sources.values()]}

    def run(self, **changed):
        if self.whole is not None:
            assert self.published().items() <= self.whole.items()
        return prepare(self.blend, self.out, dedup={"cap": 1, "evaluations": self.exam, **changed})

    def published(self):
        """Everything but files that are being written."""
        temporary = {str(path.relative_to(self.out)) for path in self.temporaries()}
        return {name: content for name, content in tree(self.out).items() if name not in temporary}


@pytest.fixture(scope="module")
def preparation(tmp_path_factory):
    return Preparation(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def operations(preparation):
    """How many operations an undisturbed preparation takes, after one that has loaded what is loaded once."""
    preparation.run()
    preparation.clear()
    with count_operations() as log:
        planned, manifest = preparation.run()
    preparation.whole = tree(preparation.out)
    assert len(planned.plan.shards) == 2
    assert any(name.startswith("shards/dedup/") for name in preparation.whole)
    assert left_behind(manifest) == {"beyond_cap": 1, "contaminated": 1, "exact_duplicate": 2, "near_duplicate": 1}
    assert {"edges.parquet", "hits.parquet", "pools.json", "quarantine/chats.jsonl"} <= preparation.whole.keys()
    assert {name.partition("/")[0] for name in rows_of(preparation.whole)} == {"data", "pools", "candidates"}
    assert any(name.startswith("tools/") for name in preparation.whole)
    return len(log.operations)


def rows_of(found):
    """The published files whose names say what is in them."""
    return {name: found[name] for name in found if name.startswith(("data/", "pools/", "candidates/"))}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_anywhere(preparation, operations, fault):
    survive_each(fault, preparation, preparation.whole, operations, STRIDE)


def test_a_kill_while_an_earlier_output_is_replaced(preparation, operations, tmp_path, monkeypatch):
    """The files that the manifest names mean what they meant, before and after."""
    whole = preparation.whole
    monkeypatch.setattr(preparation, "whole", None)
    preparation.clear()
    preparation.run(mode="drop", cap=None)
    either = rows_of(tree(preparation.out)) | rows_of(whole)
    assert len(either) > len(rows_of(whole))
    shutil.copytree(preparation.out, tmp_path / "earlier")
    with count_operations() as log:
        preparation.run()
    for number in range(3, len(log.operations) + 1, 2 * STRIDE):
        preparation.clear()
        shutil.copytree(tmp_path / "earlier", preparation.out)
        assert killed_at(number, preparation.run)
        found = tree(preparation.out)
        listed = {file["path"] for file in json.loads(found["manifest.json"])["files"]} & either.keys()
        assert {name: found.get(name) for name in listed} == {name: either[name] for name in listed}, number
        preparation.run()
        assert preparation.temporaries() == []
        assert rows_of(tree(preparation.out)) == rows_of(whole), f"operation {number}"
