"""Near-duplicates, held against every pair of documents compared as sets of Python strings."""

import random
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.dedup import near
from tokenmill.tasks.dedup.near import (
    BANDS,
    BANDS_SCHEMA,
    LEADERS,
    VERIFIED,
    band_table,
    buckets_of,
    candidate_pairs,
)
from tokenmill.tasks.dedup.partitions import SliceFile, read_partition
from tokenmill.tasks.errors import RunError

from tests.dedup.deduplication import Wiring, documents, edges, left, sign_near
from tests.dedup.scripts import LANGUAGES, UNBROKEN, changed, jaccard, shingles, unbroken, written
from tests.dedup.test_shingles import shingled
from tests.examples import max_examples

VOCABULARY = [f"word{number}" for number in range(3000)]


def prose(generator, words):
    return " ".join(generator.choices(VOCABULARY, k=words))


def edited(generator, text, edits):
    """The text with as many words replaced, each in another place."""
    words = text.split(" ")
    for place in generator.sample(range(len(words)), edits):
        words[place] = "edited" + str(generator.random())
    return " ".join(words)


def corpus(seed, originals=80):
    """Texts of 60 to 160 words, each with versions of 1 to 6 edits: similarities on both sides of 0.8."""
    generator = random.Random(seed)
    texts = []
    for _ in range(originals):
        text = prose(generator, generator.randint(60, 160))
        texts += [text, *(edited(generator, text, generator.randint(1, 6)) for _ in range(generator.randint(0, 6)))]
    generator.shuffle(texts)
    return texts


def truth(texts):
    """Every pair of a similarity of 0.8 or more, the lower number first."""
    sets = [{*shingled(text, 5)} for text in texts]
    pairs = combinations([number for number, found in enumerate(sets) if found], 2)
    found = {(one, other): jaccard(sets[one], sets[other]) for one, other in pairs}
    return {pair: similarity for pair, similarity in found.items() if similarity >= 0.8}


@cache
def planted(seed):
    """A corpus and its pairs."""
    texts = corpus(seed)
    return texts, truth(texts)


def from_the_best_down(count, ranks, alike):
    """For each document that goes, the one that stays: the most alike, and of those the first."""
    symmetric = alike | {(other, one): similarity for (one, other), similarity in alike.items()}
    stays, gone = [], {}
    for number in sorted(range(count), key=lambda number: (-ranks[number], number)):
        witnesses = [each for each in stays if (number, each) in symmetric]
        if witnesses:
            gone[number] = min(witnesses, key=lambda each: (-symmetric[number, each], each))
        else:
            stays.append(number)
    return {number: (kept, symmetric[number, kept]) for number, kept in gone.items()}


def pairs_of(tables):
    return {
        tuple(sorted((row["better"], row["worse"]))): row["jaccard"] for table in tables for row in table.to_pylist()
    }


def versions(language, count=25):
    """Texts of one language or of one kind without blanks, and of each three versions, the first with one edit."""
    generator = random.Random(language)
    for _ in range(count):
        if language in UNBROKEN:
            text = unbroken(generator, language, generator.randint(500, 1000))
        else:
            text = written(generator, language, generator.randint(70, 150))
        yield [
            text,
            changed(generator, text, 1),
            *(changed(generator, text, generator.randint(2, 9)) for _ in range(2)),
        ]


@pytest.mark.slow
@pytest.mark.parametrize("language", [*LANGUAGES, *UNBROKEN])
def test_versions_are_found_in_every_script_and_no_other_pair_is(tmp_path, language):
    texts = [text for each in versions(language) for text in each]
    sets = [shingles(text) for text in texts]
    pairs = {pair: jaccard(*(sets[each] for each in pair)) for pair in combinations(range(len(texts)), 2)}
    alike = {pair: similarity for pair, similarity in pairs.items() if similarity >= 0.8}
    assert all((first, first + 1) in alike for first in range(0, len(texts), 4))
    assert len(alike) > 26
    assert pairs_of(Wiring(tmp_path).verified(documents(texts))) == alike


def test_versions_that_are_cut_in_other_units_are_compared_by_those_they_share(tmp_path):
    generator = random.Random(0)
    chinese, code = written(generator, "Chinese", 100), unbroken(generator, "minified code", 300)
    words = prose(generator, 60)
    texts = [chinese, f"{chinese} {prose(generator, 3)}", f"{words} {code}", f"{words} {code[:150]} {code[150:]}"]
    assert edges(Wiring(tmp_path).near(documents(texts))).keys() == {1, 3}


@pytest.mark.parametrize("seed", range(2))
def test_no_pair_remains_and_drops_have_a_witness(tmp_path, seed):
    texts, alike = planted(seed)
    ranks = [number * 31 % 5 for number in range(len(texts))]
    whole = documents(texts, ranks)
    table = Wiring(tmp_path).near(whole)
    assert edges(table) == from_the_best_down(len(texts), ranks, alike)
    stays = {*left(whole, table).numbers.tolist()}
    assert not any({*pair} <= stays for pair in alike)
    assert {kept for kept, _ in edges(table).values()} <= stays


@pytest.mark.parametrize(("shared", "found"), [(7, False), (8, True)])
def test_the_threshold_itself_is_near_enough(tmp_path, shared, found):
    text = " ".join(VOCABULARY[: shared + 4])
    table = Wiring(tmp_path).near(documents([text, f"{text} two more"]))
    assert edges(table) == ({1: (0, 0.8)} if found else {})


def test_short_texts_are_alike_only_when_they_are_the_same(tmp_path):
    texts = ["", " ", "one two three four", "one two three", "one  two\nthree four", "one two three four five", ""]
    assert edges(Wiring(tmp_path).near(documents(texts))) == {4: (2, 1.0)}


def test_a_document_without_words_is_nobodys_candidate(tmp_path):
    sign_near(documents(["", "a b", ""]), f"{tmp_path}/bands", f"{tmp_path}/shingles", 1)
    assert read_partition([f"{tmp_path}/bands"], 0, 1, BANDS_SCHEMA)["number"].to_pylist() == [1] * BANDS


@pytest.fixture(scope="module")
def cut_no_way(tmp_path_factory):
    whole = documents(planted(0)[0], [number % 3 for number in range(len(planted(0)[0]))])
    return whole, Wiring(tmp_path_factory.mktemp("whole"), partitions=1).near(whole)


@max_examples(8)
@given(partitions=st.integers(1, 6), slice_size=st.integers(20, 300), seed=st.integers(0, 99))
@example(partitions=6, slice_size=20, seed=0)
def test_the_answer_does_not_depend_on_how_the_work_is_cut(cut_no_way, partitions, slice_size, seed):
    whole, expected = cut_no_way
    assert expected.num_rows > 50
    with TemporaryDirectory() as folder:
        assert Wiring(Path(folder), partitions, slice_size, seed).near(whole).equals(expected)


@given(
    graph=st.integers(1, 14).flatmap(
        lambda count: st.tuples(
            st.lists(st.integers(0, 3), min_size=count, max_size=count),
            st.dictionaries(
                st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda pair: pair[0] < pair[1]),
                st.sampled_from([0.8, 0.9]),
            ),
        )
    ),
    parts=st.integers(1, 3),
    data=st.data(),
)
def test_groups_are_resolved_from_the_best_down(graph, parts, data):
    ranks, alike = graph
    rows = [
        {"better": one, "worse": other, "jaccard": alike[min(one, other), max(one, other)]}
        for pair in alike
        for one, other in [sorted(pair, key=lambda number: (-ranks[number], number))]
    ]
    shuffled = data.draw(st.permutations(rows))
    table = near.resolve(pa.Table.from_pylist(shuffled[part::parts], schema=VERIFIED) for part in range(parts))
    assert edges(table) == from_the_best_down(len(ranks), ranks, alike)
    assert dict(zip(table["dropped"].to_pylist(), table["group"].to_pylist(), strict=True)) == {
        number: component(number, alike) for number in table["dropped"].to_pylist()
    }


def component(number, alike):
    """The lowest number that can be reached."""
    reached, added = {number}, True
    while added:
        added = {each for pair in alike if {*pair} & reached for each in pair} - reached
        reached |= added
    return min(reached)


def test_a_chain_of_versions_keeps_those_that_are_not_alike(tmp_path):
    words = prose(random.Random(0), 400).split()
    texts = [" ".join(words[5 * step : 5 * step + 60]) for step in range(20)]  # 46 of 66 runs with the next but one
    assert len(truth(texts)) == 19
    table = Wiring(tmp_path).near(documents(texts))
    assert table["dropped"].to_pylist() == list(range(1, 20, 2))
    assert table["group"].to_pylist() == [0] * 10


@pytest.mark.parametrize("at_once", [1, 100, 1 << 22])
def test_candidates_are_the_leaders_of_each_bucket_with_all_others(monkeypatch, at_once):
    monkeypatch.setattr("tokenmill.tasks.dedup.near.CANDIDATES_AT_ONCE", at_once)
    generator = np.random.default_rng(0)
    buckets = {0: 2, 1: LEADERS, 2: LEADERS + 1, 3: 3 * LEADERS, 4: 1}
    keys = np.repeat(np.array([*buckets], np.uint64) << np.uint64(60), [*buckets.values()])
    numbers, ranks = generator.permutation(len(keys)), generator.integers(0, 5, len(keys)).astype(np.uint64)
    expected = set()
    for key in set(keys.tolist()):
        members = np.flatnonzero(keys == key)
        members = sorted(members.tolist(), key=lambda place: (-int(ranks[place]), numbers[place]))
        pairs = [(one, other) for place, other in enumerate(members) for one in members[: min(place, LEADERS)]]
        expected |= {(int(numbers[one]), int(numbers[other])) for one, other in pairs}
    shuffled = generator.permutation(len(keys))
    table = band_table(keys[shuffled, None], numbers[shuffled], ranks[shuffled])
    found = [tuple(pair) for pairs in candidate_pairs(buckets_of(table)) for pair in pairs.tolist()]
    assert len(found) == len({*found})
    assert {*found} == expected


def test_no_candidates_without_documents(tmp_path):
    assert list(candidate_pairs(buckets_of(BANDS_SCHEMA.empty_table()))) == []
    assert Wiring(tmp_path).near(documents(["", "a"])).num_rows == 0
    assert near.resolve([]).num_rows == 0


def test_the_shingles_of_a_slice_that_are_missing_are_an_error(tmp_path):
    text = prose(random.Random(0), 60)
    wiring = Wiring(tmp_path, partitions=1, slice_size=1)
    wiring.near(documents([text, text]))
    first = [SliceFile(str(tmp_path / "shingles-0.arrow"), 0)]
    with pytest.raises(RunError, match="the shingles of 2 documents are needed, but only 1 were found"):
        near.verify([str(tmp_path / "pairs-0.arrow")], first, 0, 1)
