"""Packing, held against plain loops: one sequence at a time, every bin looked at."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.pack.algorithms import Packs, pack
from tokenmill.tasks.splitmix import splitmix64

DECREASING = ("best_fit_decreasing", "first_fit_decreasing")
ANY_ORDER = (*DECREASING, "first_fit_shuffle")
ALL = (*ANY_ORDER, "concatenative")

SEEDS = st.integers(0, 2**64 - 1)
HASHES = st.integers(0, 5) | st.integers(0, 2**64 - 1)


@st.composite
def problems(draw):
    """A capacity and `(length, hash)` of sequences that fit, with many equal ones among them."""
    capacity = draw(st.integers(1, 40) | st.sampled_from([4096, 65_536, 65_537, 1_000_000]))
    lengths = st.integers(1, capacity) | st.integers(1, min(capacity, 4)) | st.just(capacity)
    return capacity, draw(st.lists(st.tuples(lengths, HASHES), max_size=60))


def lower_bound(lengths, capacity):
    """The fewest bins that hold so many tokens if sequences could be cut: no packing needs fewer."""
    return -(-int(lengths.sum()) // capacity)


def lognormal(count, seed=0):
    """As many sequences as a shard of conversations might have, none equal."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(np.log(512), 1.1, count), 1, 4096).astype(np.int64)
    return lengths, generator.integers(0, 2**64, count, dtype=np.uint64)


def packed(capacity, sequences, packing, seed=0) -> Packs:
    lengths = np.array([length for length, _ in sequences], np.int64)
    content = np.array([content for _, content in sequences], np.uint64)
    return pack(lengths, content, capacity, packing, seed)


def bins_of(packs):
    """The bins as lists of the numbers of their sequences."""
    return [packs.sequences[start:stop].tolist() for start, stop in pairwise(packs.offsets.tolist())]


def mixed(state):
    """The output of SplitMix64 in a state, as its paper gives it, on plain integers."""
    mask = 2**64 - 1
    bits = (state + 0x9E3779B97F4A7C15) & mask
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    return bits ^ (bits >> 31)


def placing_order(sequences, packing, seed):
    """The numbers of the sequences in the order in which the packing's name says they are placed."""
    if packing == "first_fit_shuffle":
        return sorted(range(len(sequences)), key=lambda i: (mixed(sequences[i][1] ^ mixed(seed)), sequences[i][0]))
    if packing == "concatenative":
        return list(range(len(sequences)))
    return sorted(range(len(sequences)), key=lambda i: (-sequences[i][0], sequences[i][1]))


def by_the_loop(capacity, sequences, packing, seed=0):
    """The bins, in the order in which they are opened."""
    bins, gaps, changed = [], [], []
    for turn, number in enumerate(placing_order(sequences, packing, seed)):
        length = sequences[number][0]
        fitting = [place for place, gap in enumerate(gaps) if gap >= length]
        if packing == "concatenative":
            fitting = [place for place in fitting if place == len(bins) - 1]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            gaps.append(capacity)
            changed.append(turn)
        chosen = fitting[0]
        if packing == "best_fit_decreasing":
            chosen = min(fitting, key=lambda place: (gaps[place], -changed[place]))
        bins[chosen].append(number)
        gaps[chosen] -= length
        changed[chosen] = turn
    return bins


@pytest.mark.parametrize("packing", ALL)
@given(problem=problems(), seed=SEEDS)
@example(problem=(65_537, [(1, 0), (65_537, 0)]), seed=0)
def test_bins_match_a_plain_loop(packing, problem, seed):
    capacity, sequences = problem
    packs = packed(capacity, sequences, packing, seed)
    assert packs.offsets.dtype == packs.sequences.dtype == np.int64
    found = bins_of(packs)
    assert sorted(found) == sorted(by_the_loop(capacity, sequences, packing, seed))


@pytest.mark.parametrize("packing", ALL)
def test_many_bins_match_a_plain_loop(packing):
    sequences = list(zip(*(column.tolist() for column in lognormal(1500)), strict=True))
    expected = by_the_loop(4096, sequences, packing)
    assert len(expected) > 250
    assert sorted(bins_of(packed(4096, sequences, packing))) == sorted(expected)


@pytest.mark.parametrize("packing", ANY_ORDER)
@given(problem=problems(), seed=SEEDS, data=st.data())
def test_arrival_order_does_not_matter(packing, problem, seed, data):
    capacity, sequences = problem
    contents = [
        [[arrived[number] for number in numbers] for numbers in bins_of(packed(capacity, arrived, packing, seed))]
        for arrived in (sequences, data.draw(st.permutations(sequences)))
    ]
    assert contents[0] == contents[1]


@pytest.mark.parametrize("packing", [*DECREASING, "concatenative"])
def test_new_seed_reorders_the_same_bins(packing):
    one, same, other = (bins_of(pack(*lognormal(1000), 4096, packing, seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert sorted(one) == sorted(other)


def test_new_seed_shuffles_sequences_differently():
    one, same, other = (bins_of(pack(*lognormal(1000), 4096, "first_fit_shuffle", seed)) for seed in (1, 1, 2))
    assert one == same
    several, several_other = ({frozenset(numbers) for numbers in bins if len(numbers) > 1} for bins in (one, other))
    assert len(several & several_other) < len(several) / 10


@pytest.mark.parametrize("packing", ALL)
@given(hashes=st.lists(HASHES, unique=True), place=st.integers(0), more=HASHES, seed=SEEDS)
def test_a_bin_more_leaves_the_others_in_their_order(packing, hashes, place, more, seed):
    without, within = (
        [sequences[number][1] for (number,) in bins_of(packed(8, sequences, packing, seed))]
        for sequences in (
            [(8, content) for content in hashes],
            [(8, content) for content in (*hashes[place:], more, *hashes[:place])],
        )
    )
    within.remove(more)
    assert within == without


def test_a_seed_of_any_size_will_do():
    low, high = (bins_of(pack(*lognormal(100), 4096, "first_fit_shuffle", seed)) for seed in (-1, 2**64 - 1))
    assert low == high


@pytest.mark.parametrize("packing", ALL)
def test_bin_position_is_independent_of_its_sequences(packing):
    lengths, content = lognormal(20_000)
    lengths = np.sort(lengths)  # which concatenative packing keeps together
    packs = pack(lengths, content, 4096, packing, 3)
    longest = np.maximum.reduceat(lengths[packs.sequences], packs.offsets[:-1])
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.05  # three standard errors of no correlation


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("packing", DECREASING)
def test_decreasing_packings_leave_next_to_nothing_empty(packing, seed):
    lengths, content = lognormal(100_000, seed)
    packs = pack(lengths, content, 4096, packing, 0)
    assert len(packs.offsets) - 1 <= 1.001 * lower_bound(lengths, 4096)


def test_best_fit_prefers_the_fuller_bin_and_first_fit_the_earlier():
    lengths = [70, 45, 35, 20, 15, 15]
    best, first = (
        sorted(
            [lengths[number] for number in numbers]
            for numbers in bins_of(packed(100, [(length, 0) for length in lengths], packing))
        )
        for packing in DECREASING
    )
    assert best == [[45, 35, 20], [70, 15, 15]]
    assert first == [[15], [45, 35, 15], [70, 20]]


@pytest.mark.parametrize("packing", ALL)
@pytest.mark.parametrize("unfit", [0, -1, 9])
def test_a_sequence_that_fits_no_bin_is_named(packing, unfit):
    with pytest.raises(ValueError, match=rf"^sequence 2 has {unfit} tokens, but a pack holds 1 to 8 \(2 such .*drop"):
        packed(8, [(1, 0), (8, 0), (unfit, 0), (3, 0), (10, 0)], packing)


@pytest.mark.parametrize("packing", ALL)
def test_lengths_without_a_hash_are_rejected(packing):
    with pytest.raises(ValueError, match=r"^3 lengths but 2 hashes"):
        pack(np.ones(3, np.int64), np.ones(2, np.uint64), 8, packing, 0)


def test_splitmix64_gives_the_published_numbers():
    """The first five for the seed 1234567, as listed at rosettacode.org under "Pseudo-random numbers/Splitmix64"."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [(1234567 + place * 0x9E3779B97F4A7C15) % 2**64 for place in range(5)]
    assert splitmix64(np.array(states, np.uint64)).tolist() == published
    assert [mixed(state) for state in states] == published
