"""The trained model in Llama's names, shapes and files, and its conversion to and from megatron-core.

Both engines start from the tensors created or read here, by name, and return theirs under the same names. So the initial
weights depend on neither the number of processes nor the engine, a training run can start from the model of an earlier one, and any
reader of Llama's format can load the result.

Initial weights are normal with standard deviation 0.02; those that write into the residual stream are scaled down by the
root of twice the number of layers (GPT-2, Radford et al. 2019). Each tensor has its own random generator, seeded by name.

megatron-core fuses matrices: the queries, keys and values of a layer are one matrix, interleaved by key-value head, and so
are the two halves of the gated feed-forward layer. A process's shard of a gated matrix holds a slice of both halves.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import orjson
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.publish import publish_bytes, publish_folder
from transformers import LlamaConfig

from .settings import ModelSettings

DEVIATION = 0.02

Weights = Callable[[str], torch.Tensor]  # a tensor of the model by its name, on the CPU

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# megatron-core's and Llama's names of the tensors that are the same in both.
OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": NORM,
    "output_layer.weight": HEAD,
}
IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}

QKV, GATED = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"


def shapes(model: ModelSettings, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name; `vocabulary` is padded already."""
    head = model.hidden // model.heads
    layer = {
        "input_layernorm.weight": (model.hidden,),
        "self_attn.q_proj.weight": (model.heads * head, model.hidden),
        "self_attn.k_proj.weight": (model.key_value_heads * head, model.hidden),
        "self_attn.v_proj.weight": (model.key_value_heads * head, model.hidden),
        "self_attn.o_proj.weight": (model.hidden, model.heads * head),
        "post_attention_layernorm.weight": (model.hidden,),
        "mlp.gate_proj.weight": (model.feed_forward, model.hidden),
        "mlp.up_proj.weight": (model.feed_forward, model.hidden),
        "mlp.down_proj.weight": (model.hidden, model.feed_forward),
    }
    layers = {f"model.layers.{number}.{name}": shape for number in range(model.layers) for name, shape in layer.items()}
    ends = {EMBEDDING: (vocabulary, model.hidden), NORM: (model.hidden,)}
    return ends | layers | ({} if model.tied_embeddings else {HEAD: (vocabulary, model.hidden)})


def parameters(model: ModelSettings, vocabulary: int) -> int:
    """Return the number of trained parameters."""
    return sum(math.prod(shape) for shape in shapes(model, vocabulary).values())


def fresh(model: ModelSettings, vocabulary: int, seed: int) -> Weights:
    """Random initial weights in float32."""
    known = shapes(model, vocabulary)
    residual = DEVIATION / math.sqrt(2 * model.layers)

    def weights(name: str) -> torch.Tensor:
        shape = known[name]
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
        deviation = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else DEVIATION
        return torch.empty(shape).normal_(0, deviation, generator=generator)

    return weights


def configuration(model: ModelSettings, vocabulary: int, sequence_length: int, eos: int | None) -> LlamaConfig:
    """Return the model's config.json."""
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=model.hidden, intermediate_size=model.feed_forward,
        num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.key_value_heads,
        max_position_embeddings=sequence_length, rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_base},
        tie_word_embeddings=model.tied_embeddings, bos_token_id=None, eos_token_id=eos,
    )  # fmt: skip


def publish_model(
    folder: str, config: LlamaConfig, weights: Mapping[str, torch.Tensor], files: Mapping[str, bytes]
) -> None:
    """Write a model and its tokenizer's `files` in one folder, for `from_pretrained`. Raises OSError."""
    with publish_folder(folder) as place:
        config.architectures = ["LlamaForCausalLM"]
        config.dtype = next(iter(weights.values())).dtype
        config.save_pretrained(place)
        save_file(dict(weights), Path(place, "model.safetensors"), metadata={"format": "pt"})
        for name, data in files.items():
            publish_bytes(f"{place}/{name}", data)


def stored(folder: Path, model: ModelSettings, vocabulary: int) -> Weights:
    """Return the weights of a folder in Hugging Face's format, in float32; missing rows of the vocabulary are zeros.

    Raises InputError for tensors that are missing or whose shapes differ from `model`'s.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():  # several files
        places = {name: folder / file for name, file in orjson.loads(index.read_bytes())["weight_map"].items()}
    else:
        with safe_open(folder / "model.safetensors", "pt") as tensors:
            places = dict.fromkeys(tensors.keys(), folder / "model.safetensors")
    known = shapes(model, vocabulary)

    def weights(name: str) -> torch.Tensor:
        if name not in places:
            raise InputError(f"start_from: {folder} holds no {name}; it must be a Llama-like model in safetensors")
        with safe_open(places[name], "pt") as tensors:
            found = tensors.get_tensor(name)
        if name in {EMBEDDING, HEAD} and found.shape[0] < vocabulary:
            found = torch.cat([found, found.new_zeros(vocabulary - found.shape[0], found.shape[1])])
        if tuple(found.shape) != known[name]:
            raise InputError(
                f"start_from: {name} in {folder} is {tuple(found.shape)}, but the model of the settings has "
                f"{known[name]}; set model to match these weights"
            )
        return found.float()

    return weights


def from_llama(name: str, layer: int, weights: Weights, model: ModelSettings) -> torch.Tensor:
    """megatron-core's tensor `name`, in layer `layer` if it belongs to one."""
    if name in OUTSIDE_LAYERS:
        tied = model.tied_embeddings and OUTSIDE_LAYERS[name] == HEAD
        return weights(EMBEDDING if tied else OUTSIDE_LAYERS[name])
    prefix = f"model.layers.{layer}."
    if name == QKV:
        parts = [weights(f"{prefix}self_attn.{each}_proj.weight") for each in "qkv"]
        return torch.cat([part.unflatten(0, (model.key_value_heads, -1)) for part in parts], 1).flatten(0, 1)
    if name == GATED:
        return torch.cat([weights(f"{prefix}mlp.gate_proj.weight"), weights(f"{prefix}mlp.up_proj.weight")])
    return weights(prefix + IN_LAYER[name])


def to_llama(name: str, layer: int, tensor: torch.Tensor, model: ModelSettings) -> dict[str, torch.Tensor]:
    """Llama's tensors in megatron-core's tensor `name`."""
    if name in OUTSIDE_LAYERS:
        return {OUTSIDE_LAYERS[name]: tensor}
    prefix = f"model.layers.{layer}."
    if name == QKV:
        head = model.hidden // model.heads
        sizes = [model.heads // model.key_value_heads * head, head, head]
        parts = tensor.unflatten(0, (model.key_value_heads, -1)).split(sizes, 1)
        named = zip("qkv", parts, strict=True)
        return {f"{prefix}self_attn.{each}_proj.weight": part.flatten(0, 1) for each, part in named}
    if name == GATED:
        gate, up = tensor.chunk(2)
        return {f"{prefix}mlp.gate_proj.weight": gate, f"{prefix}mlp.up_proj.weight": up}
    return {prefix + IN_LAYER[name]: tensor}


def slice_of(name: str, tensor: torch.Tensor, dimension: int, rank: int, size: int) -> torch.Tensor:
    """Return the slice of megatron-core's tensor that process `rank` of `size` holds."""
    if name == GATED:
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(size, dimension)[rank]


def joined_slices(name: str, slices: list[torch.Tensor], dimension: int) -> torch.Tensor:
    """megatron-core's tensor, from the slices of all processes."""
    if name == GATED:
        halves = zip(*(piece.chunk(2) for piece in slices), strict=True)
        return torch.cat([piece for half in halves for piece in half])
    return torch.cat(slices, dimension)


def name_in_layer(name: str, first: int) -> tuple[str, int]:
    """Return a parameter's name within its layer, and the number of the layer in the whole model; 0 outside layers.

    `first` is the number of this process's first layer.
    """
    if not name.startswith("decoder.layers."):
        return name, 0
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    return rest, first + int(number)
