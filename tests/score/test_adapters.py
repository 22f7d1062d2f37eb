"""The adapter for vLLM, held against the engine on transformers.

A stand-in has vLLM's documented interface and computes log-probabilities with a tiny model, so that what is checked is
the adapter's own: what it asks for, and which numbers it takes from the answer.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tasks.score.adapters import VllmScorer
from tasks.score.causal import CausalScorer
from tasks.score.finite import NonFiniteError
from tasks.score.weights import find_model
from tests.score.tiny_models import VOCABULARY, completions, corpus, llama


class StandIn:
    """A `vllm` whose LLM reads up to 90 tokens, one of which it generates."""

    def __init__(self, model):
        self.asked = []
        outer = self

        class LLM:
            def __init__(self, **options):
                assert options["trust_remote_code"] is False
                config = SimpleNamespace(max_model_len=90, get_vocab_size=lambda: VOCABULARY)
                self.llm_engine = SimpleNamespace(model_config=config)

            def generate(self, prompts, parameters, use_tqdm):
                assert parameters.prompt_logprobs == 0
                assert parameters.max_tokens == 1
                outer.asked += [len(prompt["prompt_token_ids"]) for prompt in prompts]
                return [outer.answer(model, prompt["prompt_token_ids"]) for prompt in prompts]

        self.LLM, self.SamplingParams = LLM, SimpleNamespace

    def answer(self, model, ids):
        """Nothing for the first token; for every other one the log-probability of itself."""
        with torch.inference_mode():
            found = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        tokens = [{token: SimpleNamespace(logprob=float(found[place, token]))} for place, token in enumerate(ids[1:])]
        return SimpleNamespace(prompt_logprobs=[None, *tokens])


@pytest.fixture
def files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return find_model(str(tmp_path))


def test_vllm_gives_the_same_scores(files):
    model, sequences = llama(), completions(*corpus(11))
    package = StandIn(model)
    found = VllmScorer(package, files, token_budget=300).score(sequences)
    expected = CausalScorer(model, max_length=89).score(sequences)
    assert sum(expected["truncated"].to_pylist()) > 0
    for name in found.column_names:
        np.testing.assert_allclose(found[name].to_numpy(), expected[name].to_numpy(), rtol=1e-5, err_msg=name)
    assert max(package.asked) <= 89


def test_a_length_asked_for_is_kept(files):
    model, sequences = llama(), completions(*corpus(11))
    found = VllmScorer(StandIn(model), files, max_length=30).score(sequences)
    expected = CausalScorer(model, max_length=30).score(sequences)
    assert found["cut_token_count"] == expected["cut_token_count"]


def test_a_score_that_is_no_number_names_its_row(files):
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[17] = math.nan
    sequences = completions(*([(number, 1, 3)] * 5 for number in range(30)))
    with pytest.raises(NonFiniteError, match="row 17: the NLL of a token is nan"):
        VllmScorer(StandIn(model), files).score(sequences)
