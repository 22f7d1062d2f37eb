"""The tensors of a megatron-core model, out of Llama's and back.

megatron-core keeps together what is multiplied together: queries, keys and values of a layer are one matrix, in which each
group of heads has its queries, its key and its value in turn, and so are the two matrices of a gate. Of a tensor that is
cut over processes each has a slice along one dimension; of a gate's, a slice of both halves.
"""

import torch

from .llama import EMBEDDING, HEAD, NORM, Weights
from .settings import ModelSettings

WHOLE = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": NORM,
    "output_layer.weight": HEAD,
}
LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
QUERIES, GATE = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"


def of_llama(name: str, layer: int, weights: Weights, model: ModelSettings) -> torch.Tensor:
    """megatron-core's tensor `name`, which is of the layer of that number if it is of one."""
    if name in WHOLE:
        return weights(EMBEDDING if model.tied_embeddings and WHOLE[name] == HEAD else WHOLE[name])
    of = f"model.layers.{layer}."
    if name == QUERIES:
        parts = [weights(f"{of}self_attn.{each}_proj.weight") for each in "qkv"]
        return torch.cat([part.unflatten(0, (model.key_value_heads, -1)) for part in parts], 1).flatten(0, 1)
    if name == GATE:
        return torch.cat([weights(f"{of}mlp.gate_proj.weight"), weights(f"{of}mlp.up_proj.weight")])
    return weights(of + LAYER[name])


def to_llama(name: str, layer: int, tensor: torch.Tensor, model: ModelSettings) -> dict[str, torch.Tensor]:
    """Llama's tensors that are in megatron-core's tensor `name`."""
    if name in WHOLE:
        return {WHOLE[name]: tensor}
    of = f"model.layers.{layer}."
    if name == QUERIES:
        head = model.hidden // model.heads
        sizes = [model.heads // model.key_value_heads * head, head, head]
        parts = tensor.unflatten(0, (model.key_value_heads, -1)).split(sizes, 1)
        return {
            f"{of}self_attn.{each}_proj.weight": part.flatten(0, 1) for each, part in zip("qkv", parts, strict=True)
        }
    if name == GATE:
        gate, up = tensor.chunk(2)
        return {f"{of}mlp.gate_proj.weight": gate, f"{of}mlp.up_proj.weight": up}
    return {of + LAYER[name]: tensor}


def slice_of(name: str, tensor: torch.Tensor, dimension: int, rank: int, size: int) -> torch.Tensor:
    """The slice of a tensor that process `rank` of `size` has."""
    if name == GATE:
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(size, dimension)[rank]


def joined_slices(name: str, slices: list[torch.Tensor], dimension: int) -> torch.Tensor:
    """The tensor that these slices are of."""
    if name == GATE:
        halves = zip(*(piece.chunk(2) for piece in slices), strict=True)
        return torch.cat([piece for half in halves for piece in half])
    return torch.cat(slices, dimension)


def name_in_layer(name: str, first: int) -> tuple[str, int]:
    """A parameter's name within its layer, and the number of that layer in the whole model; 0 for one outside of layers.

    `first` is the number of the first layer that this process has.
    """
    if not name.startswith("decoder.layers."):
        return name, 0
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    return rest, first + int(number)
