"""Weights by name: drawn, cut and joined, written and read as Hugging Face's libraries do."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.train.model import (
    EMBEDDING,
    GATED,
    HEAD,
    IN_LAYER,
    OUTSIDE_LAYERS,
    QKV,
    configuration,
    fresh,
    from_llama,
    joined_slices,
    name_in_layer,
    parameters,
    publish_model,
    shapes,
    slice_of,
    stored,
    to_llama,
)
from tokenmill.tasks.train.settings import ModelSettings
from transformers import LlamaForCausalLM

torch.set_num_threads(1)

VOCABULARY = 96
SHAPES = [
    {"layers": 2, "hidden": 32, "heads": 4, "key_value_heads": 2, "feed_forward": 48},
    {"layers": 1, "hidden": 24, "heads": 6, "key_value_heads": 6, "feed_forward": 16, "tied_embeddings": True},
    {"layers": 3, "hidden": 16, "heads": 4, "key_value_heads": 1, "feed_forward": 40, "rope_base": 777.5},
]
models = pytest.mark.parametrize("model", [ModelSettings(**each) for each in SHAPES], ids=["gqa", "tied", "mqa"])


def llama(model, seed=0):
    """A model of transformers with the weights that `fresh` draws, and these."""
    weights = fresh(model, VOCABULARY, seed)
    made = LlamaForCausalLM(configuration(model, VOCABULARY, 64, 5))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(weights(name))
    return made.eval(), {name: weights(name) for name in shapes(model, VOCABULARY)}


@models
def test_shapes_match_transformers(model):
    made, _ = llama(model)
    assert {name: tuple(each.shape) for name, each in made.named_parameters()} == shapes(model, VOCABULARY)
    assert parameters(model, VOCABULARY) == sum(each.numel() for each in made.parameters())


@models
def test_published_model_computes_the_same(model, tmp_path):
    made, weights = llama(model)
    publish_model(str(tmp_path / "model"), configuration(model, VOCABULARY, 64, 5), weights, {"tokenizer.json": b"{}"})
    read, notes = LlamaForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        assert torch.equal(read.eval()(ids).logits, made(ids).logits)
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (5, 64)
    assert (tmp_path / "model/tokenizer.json").read_bytes() == b"{}"


def test_a_model_is_published_in_its_own_precision(tmp_path):
    model = ModelSettings(**SHAPES[0])
    weights = {name: tensor.bfloat16() for name, tensor in llama(model)[1].items()}
    publish_model(str(tmp_path / "model"), configuration(model, VOCABULARY, 64, None), weights, {})
    assert LlamaForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_weights_are_drawn_by_seed_and_name():
    model = ModelSettings(layers=8, hidden=128, heads=4, key_value_heads=2, feed_forward=256)
    one, again, other = (fresh(model, 1024, seed) for seed in (1, 1, 2))
    names = list(shapes(model, 1024))
    drawn = {name: one(name) for name in names}
    for name in reversed(names):
        assert torch.equal(again(name), drawn[name])
        if drawn[name].dim() == 1:
            assert torch.equal(drawn[name], torch.ones(128))
            continue
        assert not torch.equal(other(name), drawn[name])
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert drawn[name].std() == pytest.approx(0.02 / (math.sqrt(16) if residual else 1), rel=0.05)
        assert abs(drawn[name].mean()) < 0.001
    matrices = [tensor.ravel()[:1000] for tensor in drawn.values() if tensor.dim() > 1]
    assert len({tuple(each.tolist()) for each in matrices}) == len(matrices)


@models
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_what_transformers_has_saved_is_read(model, size, tmp_path):
    made, weights = llama(model)
    made.save_pretrained(tmp_path, max_shard_size=size)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if size == "5GB" else len(files) > 1
    read = stored(tmp_path, model, VOCABULARY)
    assert all(torch.equal(read(name), tensor) for name, tensor in weights.items())


def test_weights_of_half_precision_are_read_in_float32(tmp_path):
    model = ModelSettings(**SHAPES[0])
    made, weights = llama(model)
    made.bfloat16().save_pretrained(tmp_path)
    read = stored(tmp_path, model, VOCABULARY)(EMBEDDING)
    assert read.dtype == torch.float32
    assert torch.equal(read, weights[EMBEDDING].bfloat16().float())


def test_a_smaller_vocabulary_is_filled_up_with_zeros(tmp_path):
    model = ModelSettings(**SHAPES[0])
    made, weights = llama(model)
    made.save_pretrained(tmp_path)
    read = stored(tmp_path, model, VOCABULARY + 32)
    for name in (EMBEDDING, HEAD):
        assert torch.equal(read(name)[:VOCABULARY], weights[name])
        assert read(name).shape == (VOCABULARY + 32, 32)
        assert not read(name)[VOCABULARY:].any()


def test_wrong_or_missing_weights_are_rejected(tmp_path):
    model = ModelSettings(**SHAPES[0])
    llama(model)[0].save_pretrained(tmp_path)
    wider = model.model_copy(update={"feed_forward": 64})
    with pytest.raises(InputError, match=r"gate_proj.* is \(48, 32\), but the model of the settings has \(64, 32\)"):
        stored(tmp_path, wider, VOCABULARY)("model.layers.0.mlp.gate_proj.weight")
    with pytest.raises(InputError, match=r"is \(96, 32\), but .* has \(80, 32\)"):
        stored(tmp_path, model, 80)(EMBEDDING)
    deeper = model.model_copy(update={"layers": 3})
    with pytest.raises(InputError, match=r"holds no model\.layers\.2\.mlp\.up_proj\.weight"):
        stored(tmp_path, deeper, VOCABULARY)("model.layers.2.mlp.up_proj.weight")


NAMES = [*OUTSIDE_LAYERS, *IN_LAYER, QKV, GATED]


@models
def test_every_tensor_returns_from_megatron_core(model):
    _, weights = llama(model)
    back = {}
    for layer in range(model.layers):
        for name in NAMES:
            tensor = from_llama(name, layer, weights.__getitem__, model)
            if model.tied_embeddings and OUTSIDE_LAYERS.get(name) == HEAD:
                assert torch.equal(tensor, weights[EMBEDDING])
                continue
            back |= to_llama(name, layer, tensor, model)
    assert back.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())


def test_each_group_of_heads_has_its_queries_its_key_and_its_value_in_turn():
    model = ModelSettings(layers=1, hidden=12, heads=6, key_value_heads=2, feed_forward=4)  # heads of two rows
    rows = {"q": range(12), "k": range(100, 104), "v": range(200, 204)}
    weights = {f"model.layers.0.self_attn.{each}_proj.weight": torch.tensor(rows[each])[:, None] for each in rows}
    found = from_llama(QKV, 0, weights.__getitem__, model)[:, 0].tolist()
    assert found == [*range(6), 100, 101, 200, 201, *range(6, 12), 102, 103, 202, 203]


@given(size=st.sampled_from([1, 2, 4]), rows=st.integers(1, 3), columns=st.integers(1, 3), dimension=st.integers(0, 1))
def test_slices_make_the_tensor(size, rows, columns, dimension):
    tensor = torch.rand(rows * 8, columns * 8)
    slices = [slice_of(QKV, tensor, dimension, rank, size) for rank in range(size)]
    assert torch.equal(joined_slices(QKV, slices, dimension), tensor)
    assert {each.shape[dimension] for each in slices} == {tensor.shape[dimension] // size}
    gates = [slice_of(GATED, tensor, 0, rank, size) for rank in range(size)]
    assert torch.equal(joined_slices(GATED, gates, 0), tensor)


def test_of_a_gate_each_process_has_a_slice_of_both_halves():
    tensor = torch.arange(8)[:, None]
    assert [slice_of(GATED, tensor, 0, rank, 2)[:, 0].tolist() for rank in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_layer_is_named_by_its_number_in_the_whole_model():
    assert name_in_layer("decoder.layers.1.mlp.linear_fc1.weight", 4) == (GATED, 5)
    assert name_in_layer("decoder.layers.10.mlp.linear_fc1.weight", 0) == (GATED, 10)
    assert name_in_layer("decoder.final_layernorm.weight", 4) == ("decoder.final_layernorm.weight", 0)
