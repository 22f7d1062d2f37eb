"""Ranks, held against the order of tuples, exact duplicates against a dictionary, and the cap against a sort."""

import math
import random
import unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.dedup.documents import (
    BATCH_BYTES,
    KEYED,
    LARGEST,
    batches,
    exact_duplicates,
    grouped,
    keys,
    ranks_of,
    write_text_keys,
)
from tokenmill.tasks.dedup.partitions import ROWS_PER_SLICE, SliceFile, partitioned
from xxhash import xxh3_128_intdigest

from tests.dedup.deduplication import Wiring, documents, edges, large
from tests.examples import max_examples

QUALITIES = st.floats(width=32)
SIZES = st.integers(-LARGEST, LARGEST)


def key(quality, size):
    return (-math.inf if math.isnan(quality) else quality, size)


@given(rows=st.lists(st.tuples(QUALITIES | st.sampled_from([0.0, -0.0, 1.0]), SIZES), min_size=2))
def test_ranks_order_by_quality_then_size(rows):
    quality, size = (np.array(column) for column in zip(*rows, strict=True))
    ranks = ranks_of(quality.astype(np.float64), size.astype(np.int64)).tolist()
    for one, rank in zip(rows, ranks, strict=True):
        for other, other_rank in zip(rows, ranks, strict=True):
            assert (rank < other_rank) == (key(*one) < key(*other))


def test_sizes_beyond_the_largest_are_equal():
    ranks = ranks_of(np.zeros(4), np.array([LARGEST - 1, LARGEST, 2**40, -(2**40)]))
    assert ranks[3] < ranks[0] < ranks[1] == ranks[2]


@given(
    sizes=st.lists(st.sampled_from([0, 1, BATCH_BYTES // 3, BATCH_BYTES - 1, BATCH_BYTES, 2 * BATCH_BYTES]), max_size=8)
)
def test_batches_cover_all_texts_once_and_are_small(sizes):
    ranges = list(batches(large(["x" * size for size in sizes])))
    assert [number for start, stop in ranges for number in range(start, stop)] == list(range(len(sizes)))
    assert all(stop - start == 1 or sum(sizes[start:stop]) <= BATCH_BYTES for start, stop in ranges)


def by_sorting(prompts, ranks, most):
    """The numbers of the documents beyond the best `most` of each prompt."""
    groups = {}
    for number in sorted(range(len(prompts)), key=lambda number: (-ranks[number], number)):
        groups.setdefault(prompts[number], []).append(number)
    return {number for prompt, group in groups.items() if prompt is not None for number in group[most:]}


@max_examples(40)
@given(
    rows=st.lists(st.tuples(st.sampled_from([None, "", "p", "q", "p "]), st.integers(0, 3)), min_size=1, max_size=30),
    most=st.integers(1, 4),
    partitions=st.integers(1, 4),
    slice_size=st.integers(1, 30),
    seed=st.integers(0, 9),
)
def test_best_of_each_prompt_are_kept_for_any_cut(rows, most, partitions, slice_size, seed):
    prompts, ranks = [prompt for prompt, _ in rows], [rank for _, rank in rows]
    with TemporaryDirectory() as folder:
        wiring = Wiring(Path(folder), partitions, slice_size, seed)
        dropped = wiring.cap(documents([""] * len(rows), ranks), large(prompts), most)["dropped"].to_pylist()
    assert len(dropped) == len({*dropped})
    assert {*dropped} == by_sorting(prompts, ranks, most)


VARIANTS = ["a caf\u00e9 by the mill", " a caf\u00e9\n by\tthe  mill", "a cafe\u0301\u00a0by the\u3000mill\r\n"]


def by_dictionary(texts, ranks):
    """For each duplicate the number of the best of its kind, and the lowest number."""
    kinds = {}
    for number, text in enumerate(texts):
        kinds.setdefault(" ".join(unicodedata.normalize("NFC", text).split()), []).append(number)
    best = {kind: min(numbers, key=lambda number: (-ranks[number], number)) for kind, numbers in kinds.items()}
    return {
        number: (best[kind], min(numbers))
        for kind, numbers in kinds.items()
        for number in numbers
        if number != best[kind]
    }


def signed(documents, place, partitions, first=0):
    """The file of the keys of documents."""
    with partitioned(str(place), KEYED, partitions) as file:
        write_text_keys(file, documents)
    return SliceFile(file.output.path, first)


def found(table):
    assert table["jaccard"].to_pylist() == [1.0] * table.num_rows
    return {row["dropped"]: (row["kept"], row["group"]) for row in table.to_pylist()}


def test_whitespace_composition_and_number_gaps_are_ignored(tmp_path):
    texts = ["something else", *VARIANTS, "A caf\u00e9 by the mill", "a cafe by the mill"]
    assert edges(Wiring(tmp_path).exact(documents(texts))) == {2: (1, 1.0), 3: (1, 1.0)}
    whole = documents(["a", "b", "a"], numbers=[5, 2**40, 2**41])
    assert edges(Wiring(tmp_path, slice_size=1).exact(whole)) == {2**41: (5, 1.0)}


def test_files_may_lie_in_an_object_store_and_be_read_as_several_slices(tmp_path):
    files = [signed(documents(["a", "b"]), f"memory://dedup/{first}.arrow", 2, first) for first in (0, 2)]
    assert edges(pa.concat_tables(exact_duplicates(files, part, 2) for part in range(2))) == {2: (0, 1.0), 3: (1, 1.0)}
    file = signed(documents(["a", "b"]), tmp_path / "keys.arrow", 1)
    table = exact_duplicates([file, SliceFile(file.uri, 5 * ROWS_PER_SLICE)], 0, 1)
    assert edges(table) == {5 * ROWS_PER_SLICE: (0, 1.0), 5 * ROWS_PER_SLICE + 1: (1, 1.0)}


@max_examples(40)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["", " ", "a", "b", "a b", "a\nb", *VARIANTS]), st.integers(0, 2)), max_size=20
    ),
    partitions=st.integers(1, 5),
    slice_size=st.integers(1, 20),
    seed=st.integers(0, 9),
)
@example(rows=[], partitions=2, slice_size=1, seed=0)
def test_duplicates_match_a_dictionary_for_any_cut(rows, partitions, slice_size, seed):
    texts, ranks = [text for text, _ in rows], [rank for _, rank in rows]
    with TemporaryDirectory() as folder:
        wiring = Wiring(Path(folder), partitions, slice_size, seed)
        table = wiring.exact(documents(texts, ranks)) if rows else exact_duplicates([], 0, partitions)
    assert found(table) == by_dictionary(texts, ranks)


def test_every_partition_gets_its_share(tmp_path):
    texts = [f"document {number // 2}" for number in range(4000)]
    file = signed(documents(texts), tmp_path / "keys.arrow", 8)
    shares = [exact_duplicates([file], part, 8).num_rows for part in range(8)]
    assert sum(shares) == 2000
    assert min(shares) > 180


@pytest.mark.parametrize("waiting", [1, 100_000, 1 << 40])
def test_rows_meet_at_any_cut_size(tmp_path, monkeypatch, waiting):
    monkeypatch.setattr("tokenmill.tasks.dedup.partitions.WAITING_BYTES", waiting)
    texts = [f"document {number % 3000}" for number in range(6000)]
    with partitioned(str(tmp_path / "keys.arrow"), KEYED, 4) as file:
        for start in range(0, 6000, 100):
            write_text_keys(file, documents(texts[start : start + 100], numbers=range(start, start + 100)))
    found = [exact_duplicates([SliceFile(file.output.path, 0)], part, 4) for part in range(4)]
    assert edges(pa.concat_tables(found)) == {number: (number - 3000, 1.0) for number in range(3000, 6000)}


def test_documents_are_of_one_group_only_when_both_halves_of_their_keys_are_equal():
    halves = [(1, 1), (1, 2), (2, 1), (1, 1), (2, 2), (2, 1)]
    rows = [{"high": high, "low": low, "number": 9 - place, "rank": 0} for place, (high, low) in enumerate(halves)]
    groups = grouped(pa.Table.from_pylist(rows, schema=KEYED))
    assert groups.starts.tolist() == [0, 2, 3, 5, 6]
    assert groups.numbers.tolist() == [6, 9, 8, 4, 7, 5]
    assert groups.places.tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_key_is_the_hash_of_the_text_in_two_halves(start):
    texts = ["", "a", "é", "", "x" * 1000]
    random.Random(start).shuffle(texts)
    expected = [divmod(xxh3_128_intdigest(text.encode()), 2**64) for text in texts[start:]]
    assert [tuple(key) for key in keys(large(texts).slice(start)).tolist()] == expected
