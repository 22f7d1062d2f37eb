"""Every document that does not stay has one reason: the steps one after the other, and the books."""

import random

import pyarrow as pa
import pytest
from tokenmill.tasks.dedup.contamination import Evaluations, hits
from tokenmill.tasks.dedup.decisions import DROPPED, dropped
from tokenmill.tasks.dedup.documents import EDGES
from tokenmill.tasks.errors import RunError

from tests.dedup.deduplication import Wiring, documents, large, left
from tests.dedup.test_near import edited, prose


def gone(*numbers):
    return pa.table({"dropped": pa.array(numbers, pa.int64())})


def test_each_step_sees_the_rest_of_the_previous_one(tmp_path):
    generator = random.Random(3)
    originals = [prose(generator, 80) for _ in range(60)]
    copies = [f"  {text}\n" for text in originals[:10]]
    versions = [edited(generator, text, 1) for text in originals[5:25]]
    exam = originals[30]
    whole = documents([*originals, *copies, *versions, f"{prose(generator, 20)} {exam} {prose(generator, 20)}"])
    wiring = Wiring(tmp_path, partitions=4, slice_size=17, seed=5)
    exact = wiring.exact(whole)
    near = wiring.near(left(whole, exact))
    remaining = left(whole, exact, near)
    held = hits(remaining, Evaluations.of({"exam": large([exam])}))
    contaminated = gone(*{*held["number"].to_pylist()})
    remaining = left(whole, exact, near, contaminated)
    cap = wiring.cap(remaining, large(["one prompt" if number < 8 else None for number in remaining.numbers]), 5)
    table = dropped({"dup_exact": exact, "dup_near": near, "contaminated": contaminated, "cap": cap})
    rows = table.to_pylist()
    assert {row["number"]: row["kept"] for row in rows} == {
        **dict(zip(range(60, 90), [*range(10), *range(5, 25)], strict=True)),
        **dict.fromkeys((30, 90, 5, 6, 7)),
    }
    assert {row["number"] for row in rows if row["outcome"] == "dup_exact"} == {*range(60, 70)}
    assert {row["number"] for row in rows if row["jaccard"] is None} == {30, 90, 5, 6, 7}
    assert table["number"].to_pylist() == sorted(table["number"].to_pylist())


def test_without_drops_all_rows_are_kept():
    assert dropped({}).equals(DROPPED.empty_table())
    assert dropped({"dup_exact": EDGES.empty_table(), "cap": gone()}).equals(DROPPED.empty_table())


@pytest.mark.parametrize("drops", [{"cap": gone(9, 4, 4)}, {"dup_exact": gone(4), "cap": gone(4, 9)}])
def test_a_document_dropped_twice_is_an_error(drops):
    with pytest.raises(RunError, match=r"^document 4 is dropped twice, the second time as cap \(1 such documents\)"):
        dropped(drops)
