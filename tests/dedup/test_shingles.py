"""Shingles, sketches and similarities, held against sets of Python strings and against probability."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.dedup.near import BANDS, ROWS, band_keys
from tokenmill.tasks.dedup.shingles import (
    RunLength,
    Sets,
    Shingles,
    alike_to_worse,
    normalized,
    sets_of,
    similarities,
    units_of,
)
from tokenmill.tasks.dedup.shingles import shingles as shingles_of

from tests.dedup.deduplication import large
from tests.dedup.scripts import jaccard

WORDS = st.sampled_from(["a", "b", "aa", "ab", "ba", "é", "\x00", "a\x00", "-" * 8, "x" * 40])
TEXTS = st.lists(st.lists(WORDS, max_size=20).map(" ".join), max_size=12)


def shingles(texts, words):
    """The shingles of texts, by runs of so many words."""
    return shingles_of(units_of(texts), RunLength(words))


def shingled(text, words):
    """The runs of words of a text, as strings."""
    each = text.split()
    return [" ".join(each[start : start + words]) for start in range(max(len(each) - words + 1, bool(each)))]


def per_text(found):
    return [found.hashes[start:stop].tolist() for start, stop in pairwise(found.offsets.tolist())]


@pytest.mark.parametrize("words", [1, 2, 5, 13])
@given(texts=TEXTS)
def test_two_hashes_are_equal_where_the_words_are(words, texts):
    found = per_text(shingles(normalized(large(texts)), words))
    expected = [shingled(text, words) for text in texts]
    assert [len(each) for each in found] == [len(each) for each in expected]
    pairs = {pair for one, other in zip(expected, found, strict=True) for pair in zip(one, other, strict=True)}
    assert len(pairs) == len({text for text, _ in pairs}) == len({value for _, value in pairs})


@given(texts=TEXTS, start=st.integers(0, 12), count=st.integers(0, 12))
def test_hashes_do_not_depend_on_the_texts_around(texts, start, count):
    whole = normalized(large(texts))
    part = shingles(whole.slice(start, count), 3)
    assert per_text(part) == per_text(shingles(whole, 3))[start : start + count]


def test_hashes_of_many_words_are_distinct_and_evenly_spread():
    words = [f"{number}" for number in range(200_000)] + [f"{number:08d}x" for number in range(200_000)]
    found = shingles(large([" ".join(words)]), 1).hashes
    assert len(np.unique(found)) == len(words)
    for shift in (0, 24, 56):
        counts = np.bincount((found >> np.uint64(shift)).astype(np.int64) & 0xFF, minlength=256)
        assert ((counts - 1562.5) ** 2 / 1562.5).sum() < 255 + 6 * math.sqrt(2 * 255)  # chi-squared, six deviations


@given(texts=TEXTS)
def test_similarity_matches_python_sets(texts):
    texts = [text for text in texts if text.strip()]
    pairs = np.array([*combinations(range(len(texts)), 2)], np.int64).reshape(-1, 2)
    found = similarities(sets_of(shingles(normalized(large(texts)), 2)), pairs)
    expected = [jaccard({*shingled(texts[one], 2)}, {*shingled(texts[other], 2)}) for one, other in pairs.tolist()]
    assert found.tolist() == expected


@given(
    found=st.lists(st.sets(st.integers(0, 9), min_size=1) | st.just({*range(8)}), min_size=1, max_size=12),
    threshold=st.sampled_from([0.5, 0.7, 0.8, 1.0]),
    count=st.integers(0, 12),
)
def test_one_set_against_all_others_is_what_two_sets_are(found, threshold, count):
    starts = np.cumsum([0, *(len(each) for each in found)])
    sets = Sets(np.array([member for each in found for member in sorted(each)], np.uint64), starts)
    rows = [[*zip(*(each.tolist() for each in row), strict=True)] for row in alike_to_worse(sets, threshold, count)]
    assert rows == [
        [
            (other, jaccard(found[one], found[other]))
            for other in range(one + 1, len(found))
            if jaccard(found[one], found[other]) >= threshold
        ]
        for one in range(min(count, len(found) - 1))
    ]


def alike(similarity, pairs, size=60, seed=0):
    """Sets of random shingles, two by two this similar: those of pair i are documents 2i and 2i + 1."""
    shared = round(2 * size * similarity / (1 + similarity))
    own = size - shared
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, 2**64, (pairs, shared + 2 * own), dtype=np.uint64)
    hashes = np.stack([drawn[:, :size], np.delete(drawn, np.s_[shared:size], axis=1)], axis=1)
    offsets = np.arange(2 * pairs + 1) * size
    return Shingles(hashes.reshape(-1), offsets), shared / (shared + 2 * own)


@pytest.mark.parametrize("similarity", [0.1, 0.3, 0.42, 0.5, 0.6, 0.8])
def test_bands_are_shared_with_the_odds_of_the_formula(similarity):
    sets, exactly = alike(similarity, 3000, seed=1)
    keys = band_keys(sets)
    found = (keys[0::2] == keys[1::2]).any(axis=1).mean()
    odds = 1 - (1 - exactly**ROWS) ** BANDS
    assert abs(found - odds) <= 6 * math.sqrt(odds * (1 - odds) / 3000) + 1e-4
