"""Embeddings: vectors by hashing, vectors by tiny models, and what is stored."""

import json
import math
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.score.embed import HashEmbedder, as_stored, as_vectors, unit_vectors
from tokenmill.tasks.score.models import PoolingEmbedder, load_embedder
from tokenmill.tasks.score.tables import NonFiniteError
from tokenmill.tasks.score.weights import find_model
from transformers import BertConfig, BertModel, LlamaModel, PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

from tests.examples import max_examples
from tests.score.tiny_models import SHAPE, llama

WORDS = [f"w{number}" for number in range(400)]
END, STOP = "<end>", "<stop>"


def tokenizer(*, ends_with=None, eos=END):
    """Words of WORDS; `ends_with` is put behind every text, `eos` is what it calls its end token."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", END, STOP, *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    if ends_with:
        words.post_processor = TemplateProcessing(
            single=f"$A {ends_with}", special_tokens=[(ends_with, vocabulary[ends_with])]
        )
    names = {"eos_token": eos} if eos else {}
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", additional_special_tokens=[STOP], **names)


def decoder():
    torch.manual_seed(1)
    return LlamaModel(llama().config).eval()


def encoder():
    torch.manual_seed(1)
    return BertModel(BertConfig(**SHAPE, max_position_embeddings=128)).eval()


def texts(count, longest=60, seed=0):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, length)) for length in generator.integers(1, longest, count)]


def states(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0].double().numpy()


def unit(vector):
    return vector / np.linalg.norm(vector)


def ids_of(text, *, end=None):
    return [3 + WORDS.index(word) for word in text.split()] + ([] if end is None else [end])


@given(st.lists(st.text(max_size=60), max_size=8), st.integers(1, 300))
@max_examples(60)
def test_hashing_gives_vectors_that_can_be_stored(found, dimensions):
    vectors = HashEmbedder(dimensions).encode(found)
    assert vectors.shape == (len(found), dimensions)
    assert vectors.dtype == np.float32
    assert as_stored(vectors).type == pa.list_(pa.float16(), dimensions)


@given(st.permutations(range(6)))
def test_hashed_text_has_a_fixed_vector(order):
    found = ["", "one", "one two", "two one", "One, TWO!", "three " * 50]
    whole = HashEmbedder(64).encode(found)
    assert np.array_equal(HashEmbedder(64).encode([found[each] for each in order]), whole[list(order)])


def test_hashed_texts_are_alike_as_far_as_they_share_words():
    base = WORDS[:40]
    variants = [base, [*base[:36], *WORDS[100:104]], [*base[:20], *WORDS[100:120]], WORDS[200:240]]
    one, close, half, other = HashEmbedder(1024).encode([" ".join(words) for words in variants])
    assert one @ close == pytest.approx(0.9, abs=0.06)
    assert one @ half == pytest.approx(0.5, abs=0.1)
    assert one @ other == pytest.approx(0, abs=0.12)


def test_the_order_of_words_is_seen():
    one, other = HashEmbedder(1024).encode([" ".join(WORDS[:30]), " ".join(WORDS[:30][::-1])])
    assert 0.3 < one @ other < 0.7


@pytest.mark.slow
def test_hashing_is_the_same_everywhere():
    code = "from tokenmill.tasks.score.embed import HashEmbedder as H; print(H(16).encode(['to be or not to be']).tolist())"
    found = {subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}) for seed in "12"}
    assert len(found) == 1
    assert json.loads(found.pop()) == HashEmbedder(16).encode(["to be or not to be"]).tolist()


def test_hashing_counts_words():
    assert HashEmbedder().token_counts(["", "one", "one two  one"]).tolist() == [0, 1, 3]
    assert HashEmbedder().dimensions == HashEmbedder().encode(["a"]).shape[1] == 256


@pytest.mark.parametrize(("ends_with", "eos", "end"), [(None, END, 1), (END, END, 1), (STOP, END, 2), (STOP, None, 2)])
def test_last_takes_the_state_of_the_end_token_of_the_tokenizer(ends_with, eos, end):
    model, found = decoder(), texts(5)
    engine = PoolingEmbedder(model, tokenizer(ends_with=ends_with, eos=eos), "last")
    for vector, text in zip(engine.encode(found), found, strict=True):
        np.testing.assert_allclose(vector, unit(states(model, ids_of(text, end=end))[-1]), atol=1e-5)


@pytest.mark.parametrize(
    ("eos", "options", "message"),
    [
        (None, ["last"], "pooling=last needs an end token"),
        (END, ["mean", 33], "dimensions=33: the model's vectors have 32"),
        (END, ["mean"], "text 1 doesn't have tokens"),
    ],
)
def test_unusable_models_are_rejected(eos, options, message):
    with pytest.raises(InputError, match=message):
        PoolingEmbedder(decoder(), tokenizer(eos=eos), *options).encode(["w1", " ", "w2"])


@pytest.mark.parametrize("made", [decoder, encoder])
def test_mean_averages_the_states_of_the_text_and_not_of_the_padding(made):
    model, found = made(), texts(9)
    vectors = PoolingEmbedder(model, tokenizer(), "mean").encode(found)
    for vector, text in zip(vectors, found, strict=True):
        np.testing.assert_allclose(vector, unit(states(model, ids_of(text)).mean(axis=0)), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("made", [decoder, encoder])
def test_vectors_do_not_depend_on_batches_or_order(made, pooling):
    model, found = made(), texts(12)
    alone = PoolingEmbedder(model, tokenizer(), pooling, token_budget=1).encode(found)
    for budget in (50, 1000):
        engine = PoolingEmbedder(model, tokenizer(), pooling, token_budget=budget)
        np.testing.assert_allclose(engine.encode(found), alone, atol=1e-5)
        np.testing.assert_allclose(engine.encode(found[::-1])[::-1], alone, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_cut_to_their_first_dimensions_and_made_long_one_again(pooling):
    model, found = decoder(), texts(5)
    whole = PoolingEmbedder(model, tokenizer(), pooling).encode(found)
    engine = PoolingEmbedder(model, tokenizer(), pooling, dimensions=12)
    assert engine.dimensions == 12
    expected = whole[:, :12] / np.linalg.norm(whole[:, :12], axis=1, keepdims=True)
    np.testing.assert_allclose(engine.encode(found), expected, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"ends_with": STOP}])
def test_a_long_text_is_cut_and_keeps_its_end_token(options):
    model, text = decoder(), " ".join(WORDS[:50])
    engine = PoolingEmbedder(model, tokenizer(**options), "last", max_tokens=10)
    expected = states(model, [*ids_of(text)[:9], 2 if options else 1])[-1]
    np.testing.assert_allclose(engine.encode([text])[0], unit(expected), atol=1e-5)
    assert engine.token_counts([text, "w1"]).tolist() == [51, 2]


def test_reading_stops_at_model_and_tokenizer_limits():
    words = tokenizer()
    engine = PoolingEmbedder(encoder(), words, "mean", max_tokens=1000)
    assert engine.max_tokens == 128
    assert engine.encode([" ".join(WORDS)]).shape == (1, 32)
    words.model_max_length = 20
    assert PoolingEmbedder(encoder(), words, "mean").max_tokens == 20


@pytest.mark.parametrize("padding", [0, 1])
def test_a_model_that_counts_positions_from_its_padding_reads_fewer_than_its_table_has(padding):
    torch.manual_seed(1)
    model = XLMRobertaModel(XLMRobertaConfig(**SHAPE, max_position_embeddings=66, pad_token_id=padding)).eval()
    engine = PoolingEmbedder(model, tokenizer(), "mean")
    readable = 66 - padding - 1
    assert engine.max_tokens == readable
    for length in (readable - 1, readable, readable + 1, 400):
        text = " ".join(WORDS[:length])
        expected = unit(states(model, ids_of(text)[:readable]).mean(axis=0))
        np.testing.assert_allclose(engine.encode([text])[0], expected, atol=1e-5)


def test_empty_input_gives_empty_vectors():
    assert PoolingEmbedder(decoder(), tokenizer(), "mean").encode([]).shape == (0, 32)
    assert HashEmbedder(8).encode([]).shape == (0, 8)
    assert len(as_stored(np.empty((0, 8), np.float32))) == 0


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("made", [decoder, llama])  # the one without an output layer, and the one with it
def test_a_model_from_a_folder_embeds_as_before(tmp_path, made, pooling):
    model, words = made(), tokenizer()
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    engine = load_embedder(find_model(str(tmp_path)), pooling=pooling, dimensions=16, device="cpu")
    before = PoolingEmbedder(getattr(model, "model", model), words, pooling, 16)
    assert np.array_equal(engine.encode(texts(7)), before.encode(texts(7)))


def test_a_folder_without_a_tokenizer_is_an_error_that_helps(tmp_path):
    decoder().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"the tokenizer of .* cannot be loaded"):
        load_embedder(find_model(str(tmp_path)), pooling="mean", device="cpu")


def test_stored_vectors_round_trip_with_rounding():
    vectors = unit_vectors(np.random.default_rng(0).normal(size=(200, 64)), 64)
    stored = as_stored(vectors)
    assert stored.type == pa.list_(pa.float16(), 64)
    assert stored.null_count == 0
    assert np.array_equal(np.stack(stored.to_numpy(zero_copy_only=False)), vectors.astype(np.float16))
    back = as_vectors(pa.chunked_array([stored.slice(0, 50), stored.slice(50)]))
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, vectors, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(back, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(back @ back.T, vectors @ vectors.T, atol=5e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_found_and_its_row_named(value):
    vectors = unit_vectors(np.random.default_rng(0).normal(size=(30, 8)), 8)
    vectors[17, 3] = value
    with pytest.raises(NonFiniteError, match=rf"part-00000\.parquet: row 117: the embedding is {value}"):
        as_stored(vectors, lambda row: f"part-00000.parquet: row {row + 100}")


def test_rows_without_a_vector_cannot_be_read():
    stored = pa.chunked_array([pa.array([[1.0, 0.0], None], pa.list_(pa.float16(), 2))])
    with pytest.raises(InputError, match="1 rows don't have an embedding"):
        as_vectors(stored)


@pytest.mark.parametrize(
    ("vector", "fault"),
    [
        ([1.0009, 0], None),
        ([0.9991, 0], None),
        ([1.0011, 0], "has length 1.0011 instead of 1"),
        ([0.998, 0], "has length 0.998 "),
        ([0, 0], "has length 0 "),
        ([100_000, 0], "has length 100000 "),  # more than half precision holds: not stored as infinity
    ],
)
def test_only_vectors_of_length_one_are_stored(vector, fault):
    vectors = np.array([[0, 1], vector], np.float32)
    with pytest.raises(NonFiniteError, match=f"row 1: the embedding {fault}") if fault else nullcontext():
        assert len(as_stored(vectors)) == 2


def test_zero_vector_lacks_a_direction():
    with pytest.raises(NonFiniteError, match="row 1: the embedding is nan"):
        as_stored(unit_vectors(np.array([[1.0, 0], [0, 0]]), 2))
