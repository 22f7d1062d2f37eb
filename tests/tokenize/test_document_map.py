import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.tokenize.document_map import FILE, DocumentMap, read_map
from tokenmill.tasks.tokenize.preparation import inspect_pretrain_shard

from tests.preparing import blend_of, prepare, write_lines

OUTCOMES = st.lists(st.integers(0, 3), max_size=50)


@given(OUTCOMES)
def test_a_map_leads_from_each_document_to_its_row_and_back(outcomes):
    found = DocumentMap.load(DocumentMap(np.array(outcomes, np.uint8)).dump(), len(outcomes))
    for number, part in enumerate(("train", "valid", "test"), 1):
        rows = [row for row, outcome in enumerate(outcomes) if outcome == number]
        assert found.documents(part) == len(rows)
        assert [found.row(part, document) for document in range(len(rows))] == rows
        assert [found.document(row) for row in rows] == [*range(len(rows))]
    assert [found.document(row) for row, outcome in enumerate(outcomes) if not outcome] == [None] * outcomes.count(0)


@given(OUTCOMES)
def test_it_takes_two_bits_per_row(outcomes):
    assert len(DocumentMap(np.array(outcomes, np.uint8)).dump()) == (2 * len(outcomes) + 7) // 8


@pytest.mark.parametrize(("content", "rows"), [(b"", 1), (b"\x01\x00", 4), (b"\x10", 2)])
def test_a_map_of_another_number_of_rows_is_refused(content, rows):
    with pytest.raises(ValueError, match=f"is not one of {rows} rows"):
        DocumentMap.load(content, rows)


def prepared(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [f"text {number}" for number in range(50)])
    planned, _ = prepare(blend_of(source), tmp_path / "out")
    store = planned.plan.store
    (receipt,) = store.proven(planned.plan.keys).values()
    return store, receipt, str(tmp_path / "out")


def test_damage_to_a_map_is_found_and_withdraws_the_shard(tmp_path):
    store, receipt, out = prepared(tmp_path)
    place = tmp_path / "out/shards/pretrain" / receipt.key / FILE
    place.write_bytes(bytes([place.read_bytes()[0] ^ 1]) + place.read_bytes()[1:])
    with pytest.raises(RunError, match=f"{FILE}: damaged"):
        read_map(store, receipt)
    prepared(tmp_path)
    assert verify(out, inspect_pretrain_shard).problems == []


def test_a_map_that_does_not_fit_its_receipt_is_a_problem(tmp_path, monkeypatch):
    store, receipt, _ = prepared(tmp_path)
    content = bytearray(store.read(receipt, FILE))
    content[0] &= 0b11111100
    monkeypatch.setattr(Store, "read", lambda *_: bytes(content))
    (problem,) = [found for found in inspect_pretrain_shard(store, receipt) if "documents of train" in found]
    assert f"{receipt.parts['train'].documents:,}" in problem
