"""A map leads from every document to its row, in 2 bits per row; a damaged or a false one is found."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.tokenize.document_map import FILE, DocumentMap, read_map
from xxhash import xxh3_128_hexdigest

from tests.building import prepare_here
from tests.preparing import blend_of, write_lines

OUTCOMES = st.lists(st.integers(0, 3), max_size=50)


@given(OUTCOMES)
def test_a_map_leads_from_each_document_to_its_row(outcomes):
    found = DocumentMap.load(DocumentMap(np.array(outcomes, np.uint8)).dump(), len(outcomes))
    for number, part in enumerate(("train", "valid", "test"), 1):
        rows = [row for row, outcome in enumerate(outcomes) if outcome == number]
        assert found.documents(part) == len(rows)
        assert found.rows(part).tolist() == rows


@given(OUTCOMES)
def test_it_takes_two_bits_per_row(outcomes):
    assert len(DocumentMap(np.array(outcomes, np.uint8)).dump()) == (2 * len(outcomes) + 7) // 8


@pytest.fixture(params=["pretrain", "rl", "dedup"])
def built(request, tmp_path):
    """The store and the receipt of one shard of each kind that has maps."""
    source = write_lines(tmp_path / "a.jsonl", [f"text {number}" for number in range(50)])
    planned, manifest = prepare_here(request.param, blend_of(source), tmp_path / "out")
    return planned.plan.store, planned.plan.store.receipt(manifest["shards"][0]["key"])


def change(store, receipt):
    """Mark the first row as dropped; returns the new content of the map."""
    place = Path(store.path(receipt.key, FILE))
    content = place.read_bytes()
    place.write_bytes(bytes([content[0] & 0b11111100]) + content[1:])
    return place.read_bytes()


def test_a_damaged_map_is_not_read(built):
    change(*built)
    with pytest.raises(RunError, match=f"{FILE}: missing or damaged"):
        read_map(*built)


def test_a_map_with_fewer_documents_than_its_receipt_is_a_problem(built):
    store, receipt = built
    changed = xxh3_128_hexdigest(change(store, receipt))
    forged = [replace(each, xxh3_128=changed) if each.path == FILE else each for each in receipt.outputs]
    (problem,) = preparation(store.kind).inspect(store, replace(receipt, outputs=forged))
    part = next(iter(receipt.parts))
    documents = receipt.parts[part].documents
    assert problem.endswith(f"{FILE}: has {documents - 1} documents of {part}, but its receipt records {documents}")
