"""Weights come true in tokens, and where they cannot it is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.pack.sampling import Draw, PackedFile, account, draw, order, warnings

SIZES = st.lists(st.integers(1, 10**9), min_size=1, max_size=6)
BLENDS = st.lists(st.tuples(SIZES, st.floats(1e-3, 1e3)), min_size=1, max_size=4)


def held_of(blend):
    """Datasets named 0, 1, …, with their files and weights."""
    held = {
        ("datasets", str(place)): [PackedFile(f"{place}-{number}", size) for number, size in enumerate(sizes)]
        for place, (sizes, _) in enumerate(blend)
    }
    return held, {("datasets", str(place)): weight for place, (_, weight) in enumerate(blend)}


def tokens_in(files, drawn):
    """The tokens of a draw, if a file could be cut anywhere."""
    return sum(file.tokens * copies for file, copies in zip(files, drawn.copies, strict=True)) + drawn.rest


@given(BLENDS, st.sampled_from(["down", "up"]), st.integers(0, 2**64 - 1))
def test_tokens_are_drawn_in_proportion_to_the_weights(blend, sampling, seed):
    held, weights = held_of(blend)
    drawn = draw(held, weights, sampling, seed)
    taken = {dataset: tokens_in(held[dataset], each) for dataset, each in drawn.items()}
    unit = {dataset: tokens / weights[dataset] for dataset, tokens in taken.items()}
    bound = (min if sampling == "down" else max)(
        sum(file.tokens for file in files) / weights[dataset] for dataset, files in held.items()
    )
    for dataset in held:
        assert unit[dataset] == pytest.approx(bound, abs=1 / weights[dataset], rel=1e-9)


@given(BLENDS, st.sampled_from(["down", "up"]), st.integers(0, 2**64 - 1))
def test_sampling_modes_use_one_dataset_exactly(blend, sampling, seed):
    held, weights = held_of(blend)
    drawn = draw(held, weights, sampling, seed)
    exactly = [Draw((1,) * len(files)) for files in held.values()]
    assert any(each in exactly for each in drawn.values())
    for dataset, each in drawn.items():
        files = held[dataset]
        assert max(each.copies) - min(each.copies) <= 1
        assert 0 <= each.rest < files[each.cut].tokens
        if each.rest:
            assert each.copies[each.cut] == min(each.copies)
        if sampling == "up":
            assert min(each.copies) >= 1
        else:
            assert max(each.copies) <= 1


@given(BLENDS, st.integers(0, 2**64 - 1), st.randoms(use_true_random=False))
def test_only_ratios_of_weights_count_and_not_the_order_of_files(blend, seed, shuffle):
    held, weights = held_of(blend)
    shuffled = {dataset: shuffle.sample(files, len(files)) for dataset, files in held.items()}
    for sampling in ("none", "down", "up"):
        drawn = draw(held, weights, sampling, seed)
        assert draw(held, {dataset: 4 * weight for dataset, weight in weights.items()}, sampling, seed) == drawn
        for dataset, each in draw(shuffled, weights, sampling, seed).items():
            first, second = drawn[dataset], each
            assert (first.rest, sum(first.copies)) == (second.rest, sum(second.copies))
            assert not first.rest or held[dataset][first.cut] == shuffled[dataset][second.cut]
            assert dict(zip(held[dataset], first.copies, strict=True)) == dict(
                zip(shuffled[dataset], second.copies, strict=True)
            )


A, B = ("datasets", "a"), ("datasets", "b")


def test_two_datasets_by_hand():
    """a holds 300 tokens and shall have three times the tokens of b, which holds 400."""
    held = {A: [PackedFile("a", 300)], B: [PackedFile("b", 400)]}
    weights = {A: 0.75, B: 0.25}
    assert draw(held, weights, "none", 1) == {A: Draw((1,)), B: Draw((1,))}
    assert draw(held, weights, "down", 1) == {A: Draw((1,)), B: Draw((0,), 0, 100)}
    assert draw(held, weights, "up", 1) == {A: Draw((4,)), B: Draw((1,))}
    assert draw(held, {A: 0.7, B: 0.3}, "up", 1) == {A: Draw((3,), 0, 33), B: Draw((1,))}


@pytest.mark.parametrize("sampling", ["none", "down", "up"])
def test_datasets_without_weight_or_packs_are_skipped(sampling):
    held = {A: [PackedFile("a", 300)], B: [PackedFile("b", 4)], ("datasets", "c"): []}
    weights = {A: 2.0, B: 0.0, ("datasets", "c"): 5.0, ("datasets", "d"): 5.0}
    assert draw(held, weights, sampling, 1) == {A: Draw((1,))}
    assert draw({}, weights, sampling, 1) == {}


def test_every_seed_chooses_other_files_and_each_is_chosen_by_some():
    held = {A: [PackedFile(f"a{number}", 100) for number in range(5)], B: [PackedFile("b", 100)]}
    chosen = {draw(held, {A: 1.0, B: 1.0}, "down", seed)[A].copies for seed in range(100)}
    assert len(chosen) == 5
    assert {sum(copies) for copies in chosen} == {1}
    assert len({order("0123456789abcdef" * 2, copy, seed) for copy in range(30) for seed in range(30)}) == 900


def test_account_has_target_and_result():
    held = {A: [PackedFile("a", 300), PackedFile("a2", 100)], B: [PackedFile("b", 400)]}
    books = account(held, {A: 3.0, B: 1.0}, {A: 400, B: 100})
    assert books["a"] == {"wanted": 0.75, "realised": 0.8, "tokens": 400, "copies": 1.0}
    assert books["b"] == {"wanted": 0.25, "realised": pytest.approx(0.2), "tokens": 100, "copies": 0.25}


@pytest.mark.parametrize(("realised", "warned"), [(0.5, 0), (0.509, 0), (0.4901, 0), (0.511, 1), (0.489, 1), (0.0, 1)])
def test_a_share_that_misses_by_more_than_a_fiftieth_is_warned_of(realised, warned):
    found = warnings("train", {"math": {"wanted": 0.5, "realised": realised, "tokens": 1, "copies": 1.0}}, ["math"])
    assert len(found) == warned
    assert all("'math'" in sentence and "50.00%" in sentence and f"{realised:.2%}" in sentence for sentence in found)


def test_a_dataset_with_a_weight_but_without_packs_is_warned_of():
    (sentence,) = warnings("valid", {}, ["code"])
    assert sentence.startswith("valid: dataset 'code' doesn't have packs")
