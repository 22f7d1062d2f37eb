"""NLL under tiny models, held against what the models themselves call their loss."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.score import models
from tokenmill.tasks.score.models import CausalScorer
from tokenmill.tasks.score.nll import Completions, score_table, targets_of
from tokenmill.tasks.score.tables import PARTS, SCHEMA, NonFiniteError
from transformers import BertConfig, BertLMHeadModel, Gemma2Config, Gemma2ForCausalLM

from tests.examples import max_examples
from tests.score.tiny_models import SHAPE, VOCABULARY, completions, corpus, gpt_oss, llama

MEANS = ["nll_mean", *(f"nll_{part}" for part in PARTS)]


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def scorer(model):
    return CausalScorer(model)


def own_loss(model, sequence):
    """What the model says itself, given the labels."""
    ids, loss, _ = torch.tensor(sequence).T
    with torch.inference_mode():
        return float(model(ids[None], labels=torch.where(loss == 1, ids, -100)[None]).loss)


def scored(sequence):
    return sum(loss for _, loss, _ in sequence[1:])


def assert_alike(one, other, tolerance=1e-5):
    for name in ["nll_sum", "ppl", *MEANS]:
        some, others = one[name].to_numpy(), other[name].to_numpy()
        np.testing.assert_allclose(some, others, rtol=tolerance, atol=tolerance, err_msg=name)
    exact = [name for name in SCHEMA.names if name.endswith("count") or name == "truncated"]
    assert one.select(exact) == other.select(exact)


def test_the_vocabulary_of_gpt_oss_in_full():
    ignorant = gpt_oss(vocab_size=201_088, num_hidden_layers=1)
    torch.nn.init.zeros_(ignorant.lm_head.weight)
    table = CausalScorer(ignorant).score(completions(*corpus(count=3)))
    np.testing.assert_allclose(table["nll_mean"].to_numpy(), math.log(201_088), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("made", [llama, gpt_oss])
def test_it_is_the_models_own_loss(made):
    model, sequences = made(), corpus(1)
    means = CausalScorer(model).score(completions(*sequences))["nll_mean"].to_pylist()
    assert sum(map(bool, map(scored, sequences))) > 20
    for mean, sequence in zip(means, sequences, strict=True):
        assert mean is None if not scored(sequence) else mean == pytest.approx(own_loss(model, sequence), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("made", [llama, gpt_oss])
def test_batches_and_padding_do_not_matter(made):
    model, sequences = made(), completions(*corpus(2))
    alone = CausalScorer(model, token_budget=1).score(sequences)
    for budget in (130, 700, 10_000):
        assert_alike(CausalScorer(model, token_budget=budget).score(sequences), alone)


@given(order=st.permutations(range(12)), budget=st.integers(1, 2000))
@max_examples(15)
def test_order_does_not_matter(model, scorer, order, budget):
    sequences = corpus(3, 12)
    here = CausalScorer(model, token_budget=budget).score(completions(*(sequences[each] for each in order)))
    assert_alike(here, scorer.score(completions(*sequences)).take(order))


def test_parts_add_up(scorer):
    table = scorer.score(completions(*corpus(4)))
    counts = np.stack([table[f"{part}_token_count"].to_numpy() for part in PARTS])
    means = np.stack([table[f"nll_{part}"].fill_null(0).to_numpy() for part in PARTS])
    assert (counts.sum(axis=0) == table["completion_token_count"].to_numpy()).all()
    np.testing.assert_allclose((counts * means).sum(axis=0), table["nll_sum"].fill_null(0).to_numpy(), rtol=1e-12)
    for number, part in enumerate(PARTS):
        assert (counts[number] == 0).tolist() == table[f"nll_{part}"].is_null().to_pylist()
    assert (counts > 0).any(axis=1).all()


def test_part_loss_covers_its_tokens(model, scorer):
    sequence = corpus(5, 1, 200)[0]
    (row,) = scorer.score(completions(sequence)).to_pylist()
    for number, part in enumerate(PARTS, 1):
        alone = [(token, loss * (each == number), each) for token, loss, each in sequence]
        assert row[f"nll_{part}"] == pytest.approx(own_loss(model, alone), abs=1e-5)
        assert row[f"{part}_token_count"] == scored(alone)


def test_tokens_of_no_part_count_in_the_whole_only(model, scorer):
    sequence = [(token, loss, 0) for token, loss, _ in corpus(5, 1, 200)[0]]
    (row,) = scorer.score(completions(sequence)).to_pylist()
    assert row["nll_mean"] == pytest.approx(own_loss(model, sequence), abs=1e-5)
    assert [row[f"nll_{part}"] for part in PARTS] == [None] * 3


def test_the_first_token_is_never_scored(scorer):
    table = scorer.score(completions([(7, 1, 3)], [(7, 1, 3), (8, 1, 3)], [(7, 0, 0), (8, 1, 3)]))
    assert table["completion_token_count"].to_pylist() == [0, 1, 1]
    assert table["nll_sum"][0].as_py() is None
    assert table["nll_sum"][1] == table["nll_sum"][2]
    assert table["cut_token_count"].to_pylist() == [0, 0, 0]


def test_sequences_of_which_nothing_is_scored_have_nulls_and_counts(scorer):
    table = scorer.score(completions([], [(7, 0, 0)] * 5, [], [(7, 0, 0), (8, 1, 1)], []))
    assert table["total_token_count"].to_pylist() == [0, 5, 0, 2, 0]
    for name in ["nll_sum", "ppl", "nll_mean", "nll_analysis"]:
        assert table[name].is_null().to_pylist() == [True, True, True, False, True]
    assert scorer.score(completions()).num_rows == 0


@pytest.mark.parametrize(("own", "asked", "limit"), [(40, None, 40), (256, 40, 40), (40, 100, 40)])
def test_long_inputs_are_cut_flagged_and_counted(own, asked, limit):
    model, sequences = llama(own), corpus(6)
    table = CausalScorer(model, max_length=asked).score(completions(*sequences))
    cut = [sequence[:limit] for sequence in sequences]
    assert table["truncated"].to_pylist() == [len(sequence) > limit for sequence in sequences]
    assert 0 < sum(table["truncated"].to_pylist()) < len(sequences)
    assert table["total_token_count"].to_pylist() == [len(sequence) for sequence in sequences]
    assert table["completion_token_count"].to_pylist() == [scored(sequence) for sequence in cut]
    lost = [scored(sequence) - scored(short) for sequence, short in zip(sequences, cut, strict=True)]
    assert table["cut_token_count"].to_pylist() == lost
    whole = CausalScorer(model).score(completions(*cut))
    for name in ["nll_sum", "ppl", *MEANS]:
        np.testing.assert_allclose(table[name].to_numpy(), whole[name].to_numpy(), rtol=1e-5)


def test_a_sequence_as_long_as_the_limit_is_not_cut():
    sequence = [(7, 1, 3)] * 40
    table = CausalScorer(llama(), max_length=40).score(completions(sequence, [*sequence, (7, 0, 0)]))
    assert table["truncated"].to_pylist() == [False, True]
    assert table["cut_token_count"].to_pylist() == [0, 0]
    assert table["completion_token_count"].to_pylist() == [39, 39]


def test_the_output_layer_sees_scored_tokens_only_and_few_at_a_time(monkeypatch):
    model, sequences, seen = llama(), completions(*corpus(7)), []
    whole = CausalScorer(model).score(sequences)
    chunked = CausalScorer(model)
    monkeypatch.setattr(models, "LOGITS", VOCABULARY * 11)
    model.lm_head.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[:-1].numel()))
    assert_alike(chunked.score(sequences), whole)
    assert max(seen) == 11
    assert sum(seen) == sum(whole["completion_token_count"].to_pylist())


def test_a_model_that_caps_its_logits_is_run_as_it_is(monkeypatch):
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, final_logit_softcapping=0.05)).eval()
    sequences = corpus(8, 6)
    monkeypatch.setattr(models, "LOGITS", VOCABULARY * 150)
    scorer = CausalScorer(model)
    assert not scorer.applies_head_itself
    rows = []
    model.lm_head.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[:-1].numel()))
    means = scorer.score(completions(*sequences))["nll_mean"].to_pylist()
    assert max(rows) <= 150
    assert means == pytest.approx([own_loss(model, sequence) for sequence in sequences], abs=1e-5)


@pytest.mark.parametrize("made", [llama, gpt_oss])
def test_output_layer_runs_on_scored_positions(made):
    assert CausalScorer(made()).applies_head_itself


def test_non_causal_model_is_rejected():
    small = BertConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(InputError, match="BertLMHeadModel is not causal"):
        CausalScorer(BertLMHeadModel(small).eval())


@pytest.mark.parametrize(("token", "named"), [(VOCABULARY, "500"), (-1, "-1")])
def test_unknown_token_is_rejected(scorer, token, named):
    with pytest.raises(InputError, match=rf"token {named} is outside the model's vocabulary of 500; score with"):
        scorer.score(completions([(1, 0, 0), (token, 1, 3)]))


def test_nan_weights_stop_the_run_and_name_the_row():
    model, sequences = llama(), [[(number, 1, 3)] * 9 for number in range(30)]
    with torch.no_grad():
        model.model.embed_tokens.weight[17] = math.nan
    with pytest.raises(NonFiniteError, match=r"a\.parquet: row 22: the NLL of a token is nan"):
        CausalScorer(model).score(completions(*sequences), lambda row: f"a.parquet: row {row + 5}")
    sequences[17] = [(3, 0, 0)] * 9
    assert CausalScorer(model).score(completions(*sequences)).num_rows == 30


def test_perplexity_is_capped_and_the_mean_is_not():
    sequences = completions([(1, 0, 0), (2, 1, 3)], [(1, 0, 0), (2, 1, 3)])
    table = score_table(sequences, targets_of(sequences, None), np.array([31.5, 2], np.float32), None)
    assert table["nll_mean"].to_pylist() == [31.5, 2]
    assert table["ppl"].to_pylist() == pytest.approx([math.exp(30), math.exp(2)])


def test_sums_are_double():
    sequences = completions([(1, 1, 3)] * (1 + 40_000))
    nll = np.full(40_000, 0.1, np.float32)
    (row,) = score_table(sequences, targets_of(sequences, None), nll, None).to_pylist()
    assert row["nll_mean"] == pytest.approx(float(np.float32(0.1)), rel=1e-12)


def test_arrays_of_different_lengths_are_rejected():
    with pytest.raises(ValueError, match="must have the same number"):
        Completions(np.zeros(3, np.int32), np.array([0, 3]), np.zeros(3, np.int8), np.zeros(2, np.int8))
