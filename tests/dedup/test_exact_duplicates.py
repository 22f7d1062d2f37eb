"""Exact duplicates, held against a dictionary of texts."""

import random
import unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.dedup.documents import KEYED, exact_duplicates, grouped, keys, write_text_keys
from tokenmill.tasks.dedup.partitions import ROWS_PER_SLICE, SliceFile, partitioned
from xxhash import xxh3_128_intdigest

from tests.dedup.deduplication import Wiring, documents, edges, large
from tests.examples import max_examples

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
