"""Scorings that are interrupted anywhere, then repeated: every row once, and the bytes of an undisturbed run.

Embeddings of two files in some four slices make a hundred file-system operations, and each of them is hit once: by a
full disk, an input/output error, a power cut or a SIGKILL. NLL, which is ranked after it is scored, is hit at every
seventh by what needs no process of its own.
"""

import os

import pytest

from tests.faults.injection import count_operations
from tests.faults.interruptions import FAULTS, Repeatable, survive, survive_each
from tests.preparing import tree
from tests.preparing_rl import write_rows
from tests.preparing_scores import harmony_model, prepare, table_of
from tests.score.test_shard import ANSWERED

pytestmark = pytest.mark.slow

SOME = 40


class Scoring(Repeatable):
    """Two files of rows, one of which has a bad one."""

    def __init__(self, folder, what, **settings):
        self.out, self.what, self.settings = folder / "out", what, settings
        for name, first in (("a", 0), ("b", SOME // 2)):
            rows = [{"row_id": str(first + number), "text": ANSWERED} for number in range(SOME // 2)]
            bad = [{"text": "nameless"}] if name == "b" else []
            os.utime(write_rows(folder / f"rows/{name}.jsonl", [*rows, *bad]), (1_000_000_000, 1_000_000_000))
        self.source = str(folder / "rows")

    def run(self):
        return prepare(self.what, self.source, self.out, shard_size=1_200, bad_row_ceiling=1.0, **self.settings)


def undisturbed(scoring):
    """What the folder holds after an undisturbed run, and how many operations that took."""
    scoring.run()  # warm: the model is loaded now
    scoring.clear()
    with count_operations() as log:
        planned, _ = scoring.run()
    assert len(planned.plan.shards) >= 4
    (folder,) = [path for path in scoring.out.iterdir() if path.name in {"nll", "embeddings"}]
    assert sorted(map(int, table_of(folder)["row_id"].to_pylist())) == list(range(SOME))
    return tree(scoring.out), len(log.operations)


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    return Scoring(tmp_path_factory.mktemp("embeddings"), "embed", dimensions=4)


@pytest.fixture(scope="module")
def undisturbed_embeddings(embeddings):
    return undisturbed(embeddings)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_at_every_fourth_operation(embeddings, undisturbed_embeddings, fault):
    whole, operations = undisturbed_embeddings
    survive_each(fault, embeddings, whole, operations, stride=4)


def test_ranking_is_interrupted_and_repeated(tmp_path):
    scoring = Scoring(tmp_path, "nll", model=harmony_model(tmp_path / "model"))
    whole, operations = undisturbed(scoring)
    errors = [error for error in FAULTS.values() if error]
    for number in range(1, operations + 1, 7):
        survive(scoring, whole, number, errors[number % len(errors)])
