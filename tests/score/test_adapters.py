"""The adapters, held against the engines on transformers.

Stand-ins have the documented interfaces of vLLM, sentence-transformers and SGLang, and compute log-probabilities with a
tiny model or cut texts at the length they were given, so that what is checked is the adapters' own: what they ask for,
and what they take from the answers.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenmill.tasks.score.adapters import SentenceTransformersEmbedder, SglangEmbedder, VllmScorer
from tokenmill.tasks.score.causal import CausalScorer
from tokenmill.tasks.score.finite import ROW, NonFiniteError
from tokenmill.tasks.score.settings import EmbedRecipe
from tokenmill.tasks.score.shard import EmbedScoring
from tokenmill.tasks.score.weights import find_model

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


class Reading:
    """A model that cuts texts at `limit` words and remembers how many it has read of each."""

    def __init__(self):
        self.limit, self.read = 0, []

    def tokenizer(self, texts, truncation, return_attention_mask):
        assert not truncation
        assert not return_attention_mask
        return {"input_ids": [[1] * len(text.split()) for text in texts]}

    def vectors(self, texts):
        self.read = [min(len(text.split()), self.limit) for text in texts]
        return np.ones((len(texts), 4), np.float32)


def sentence_transformers(longest):
    """A `sentence_transformers` whose model's own settings name the length `longest`."""

    class SentenceTransformer(Reading):
        def __init__(self, folder, *, trust_remote_code, local_files_only, device):
            assert not trust_remote_code
            super().__init__()
            self.max_seq_length = longest

        def encode(self, texts, *, convert_to_numpy, show_progress_bar):
            self.limit = self.max_seq_length
            return self.vectors(texts)

    return SimpleNamespace(SentenceTransformer=SentenceTransformer)


def sglang(longest):
    """An `sglang` that refuses to read more than `longest` tokens."""

    class Engine(Reading):
        def __init__(self, *, model_path, is_embedding, trust_remote_code, context_length, allow_auto_truncate):
            assert not trust_remote_code
            assert allow_auto_truncate
            assert context_length <= longest
            super().__init__()
            self.limit, self.tokenizer_manager = context_length, SimpleNamespace(tokenizer=self.tokenizer)

        def encode(self, texts):
            return [{"embedding": vector} for vector in self.vectors(texts).tolist()]

    return SimpleNamespace(Engine=Engine)


RECIPE = EmbedRecipe(
    dataset="a", split=None, filters={}, fields=["text"], engine="sglang", model="m", model_revision="1", weights="w",
    pooling=None, dimensions=None, max_tokens=1024, token_budget=None, precision=None, device="cuda",
)  # fmt: skip


@pytest.mark.parametrize(
    ("made", "package", "config", "asked", "limit"),
    [
        (SentenceTransformersEmbedder, sentence_transformers(12), {}, 1024, 12),
        (SentenceTransformersEmbedder, sentence_transformers(12), {}, 7, 7),
        (SentenceTransformersEmbedder, sentence_transformers(None), {"max_position_embeddings": 20}, 1024, 20),
        (SentenceTransformersEmbedder, sentence_transformers(None), {}, 30, 30),
        (SglangEmbedder, sglang(20), {"max_position_embeddings": 20}, 1024, 20),
        (SglangEmbedder, sglang(20), {"text_config": {"max_position_embeddings": 20}}, 1024, 20),
        (SglangEmbedder, sglang(20), {"max_position_embeddings": 20}, 9, 9),
    ],
)
def test_what_an_engine_has_cut_is_called_truncated(files, made, package, config, asked, limit):
    (files.folder / "config.json").write_text(json.dumps(config))
    engine = made(package, files, max_tokens=asked)
    lengths = [1, limit - 1, limit, limit + 1, 100]
    found = EmbedScoring(RECIPE, engine).scored(["w " * length for length in lengths], ROW).table
    model = getattr(engine, "_model", None) or engine._engine  # noqa: SLF001 - to see what was read
    assert model.read == [min(length, limit) for length in lengths]
    assert found["truncated"].to_pylist() == [length > limit for length in lengths]
    assert found["token_count"].to_pylist() == lengths
