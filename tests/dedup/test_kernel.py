"""The compiled loops, held against plain Python."""

import ctypes

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.dedup import kernel
from tokenmill.tasks.dedup.near import band_keys
from tokenmill.tasks.dedup.shingles import KINDS, RunLength, Shingles, normalized, shingles, units_of

from tests.dedup import reference
from tests.dedup.deduplication import large
from tests.dedup.scripts import units
from tests.dedup.test_shingles import per_text
from tests.dedup.test_units import PARTS

NUMBERS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**56, 2**56 + 1, 2**64 - 1])


def ragged(lists):
    """Lists of numbers one after the other, uint64, and their bounds."""
    return np.array([each for some in lists for each in some], np.uint64), np.cumsum([0, *map(len, lists)])


@pytest.mark.parametrize(
    "length", [RunLength(1), RunLength(5, letters=2), RunLength(3, characters=4, letters=1, pieces=2)]
)
@given(texts=st.lists(st.lists(PARTS, max_size=12).map(" ".join), max_size=5))
@example(texts=["", "中 文and ไทย", "x" * 41 + "中" + "y" * 100, "12345678 123456789 1234567812345678 a\x00"])
def test_shingles_match_plain_python(length, texts):
    found = normalized(large(texts))
    weights = dict(zip(KINDS, length.by_kind.tolist(), strict=True))
    expected = [reference.shingles(units(text), weights, length.parts) for text in found.to_pylist()]
    assert per_text(shingles(units_of(found), length)) == expected


@given(lists=st.lists(st.lists(NUMBERS, min_size=1, max_size=40), min_size=1, max_size=9))
def test_band_keys_match_plain_python(lists):
    found = Shingles(*ragged(lists))
    assert band_keys(found).tolist() == [reference.keys(sketch) for sketch in reference.sketches(found)]


@given(lists=st.lists(st.lists(NUMBERS, max_size=90), max_size=6), repeats=st.integers(1, 40))
@example(lists=[[2**40 + 2 * number % 77 for number in range(200)], [*range(300, 0, -1)], [7]], repeats=3)
def test_distinct_values_are_ascending(lists, repeats):
    values, bounds = kernel.distinct(*ragged([each * repeats for each in lists]))
    assert per_text(Shingles(values, bounds)) == [sorted({*each}) for each in lists]


@given(sets=st.lists(st.sets(NUMBERS | st.integers(0, 9)), min_size=1, max_size=6), data=st.data())
def test_common_members_are_counted(sets, data):
    places = st.integers(0, len(sets) - 1)
    pairs = np.array(data.draw(st.lists(st.tuples(places, places), max_size=9)), np.int64).reshape(-1, 2)
    expected = [len(sets[one] & sets[other]) for one, other in pairs.tolist()]
    assert kernel.common(*ragged([sorted(each) for each in sets]), pairs).tolist() == expected


def test_keys_that_occur_again_are_found_with_few_others():
    generator = np.random.default_rng(0)
    alone, again = np.split(generator.integers(0, 2**64, 100_000, np.uint64), [90_000])
    keys = generator.permutation(np.concatenate([alone, again, again, again[:5000]]))
    found = kernel.repeated(keys)
    assert found[np.isin(keys, again)].all()
    assert found.sum() < 25_000 + 0.15 * len(alone)


def test_wrong_bounds_and_types_are_rejected():
    values, pair = np.arange(4, dtype=np.uint64), np.zeros((1, 2), np.int64)
    for bounds in ([0, 5], [-1, 4], [0, 3, 2, 4]):
        with pytest.raises(ValueError, match="bounds"):
            kernel.distinct(values, np.array(bounds))
    for wrong in (-1, 1):
        with pytest.raises(IndexError):
            kernel.common(values, np.array([0, 4]), pair + wrong)
    with pytest.raises(ctypes.ArgumentError, match="uint64"):
        kernel.distinct(values.astype(np.int64), np.array([0, 4]))


@pytest.mark.parametrize("cut", [b"word \xe4", b"\xe4\xb8", b"\xf0\x9f\x98", b"\xe2\x80", b"\xc2", b"a\x80\x80\xff"])
def test_text_that_ends_within_a_character_is_read_no_further(cut):
    text = np.frombuffer(cut + "中 \u3000".encode(), np.uint8)
    for kind in (np.zeros(0x40000, np.uint8), np.ones(0x40000, np.uint8)):
        one, all_ = (kernel.units(each, np.array([0, len(cut)]), kind) for each in (text[: len(cut)], text))
        assert [each.tolist() for each in one] == [each.tolist() for each in all_]
    one, all_ = (kernel.collapse(each, np.array([0, len(cut)])) for each in (text[: len(cut)], text))
    assert [each.tolist() for each in one] == [each.tolist() for each in all_]
