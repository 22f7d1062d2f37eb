"""The fates of rows lead from documents to rows and to reasons; damaged and false ones are found."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.fates import FATES, FateRecorder, RowFates, fate_problems, read_fates
from tokenmill.tasks.shards.store import Store
from xxhash import xxh3_128_hexdigest

from tests.building import prepare_here
from tests.preparing import blend_of, write_lines

PARTS = ("train", "valid", "test")
LIVES = st.lists(st.sampled_from([*PARTS, "too_short", "blank_line", "an odd one"]), max_size=50)


def recorded(lives):
    """The fates of rows, noted a part or reason at a time."""
    recorder = FateRecorder(bytearray(len(lives)))
    for name in dict.fromkeys(lives):
        rows = np.array([row for row, each in enumerate(lives) if each == name])
        (recorder.keep if name in PARTS else recorder.drop)(name, rows)
    return recorder.fates()


@given(LIVES)
def test_every_row_has_its_fate(lives):
    written = recorded(lives)
    found = RowFates.load(written.codes.tobytes(), len(lives), {*lives} - {*PARTS})
    assert found.why().tolist() == [None if each in PARTS else each for each in lives]
    for part in PARTS:
        rows = [row for row, each in enumerate(lives) if each == part]
        assert (found.documents(part), found.rows(part).tolist()) == (len(rows), rows)
        assert [found.place(row, PARTS) for row in rows] == [(part, number) for number in range(len(rows))]
    assert [found.place(row, PARTS) for row, each in enumerate(lives) if each not in PARTS] == [None] * (
        len(lives) - sum(found.documents(part) for part in PARTS)
    )


@given(st.lists(st.integers(0, 3), max_size=50))
def test_maps_of_two_bits(outcomes):
    """An earlier version wrote them: 0 for a dropped row, four rows to a byte."""
    bits = "".join(f"{code:02b}" for code in reversed(outcomes))
    content = int(bits or "0", 2).to_bytes(-(-len(outcomes) // 4), "little")
    found = RowFates.load(content, len(outcomes), ["too_short"])
    assert found.why().tolist() == [None] * len(outcomes)
    for code, part in enumerate(PARTS, 1):
        assert found.rows(part).tolist() == [row for row, each in enumerate(outcomes) if each == code]


@pytest.fixture
def built(tmp_path):
    """The store and the receipt of a shard."""
    texts = write_lines(tmp_path / "a.jsonl", [f"text {number}" for number in range(50)])
    _, manifest = prepare_here("dedup", blend_of(texts), tmp_path / "out")
    store = Store(manifest["volatile"]["store"], "dedup")
    return store, store.receipt(manifest["shards"][0]["key"])


def change(store, receipt):
    """Say that the first row had a different fate; returns the new content."""
    place = Path(store.path(receipt.key, FATES))
    content = place.read_bytes()
    place.write_bytes(bytes([3 if content[0] != 3 else 1]) + content[1:])
    return place.read_bytes()


def test_damaged_fates_are_not_read(built):
    assert read_fates(*built).codes.all()
    change(*built)
    with pytest.raises(RunError, match=f"{FATES}: missing or damaged"):
        read_fates(*built)


def test_fates_that_differ_from_the_receipt(built):
    store, receipt = built
    assert fate_problems(store, receipt) == []
    changed = xxh3_128_hexdigest(change(store, receipt))
    forged = [replace(each, xxh3_128=changed) if each.path == FATES else each for each in receipt.outputs]
    problems = fate_problems(store, replace(receipt, outputs=forged))
    assert "but its receipt records" in problems[0]
