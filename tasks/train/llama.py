"""The model that is trained, as Hugging Face's libraries know it: Llama's names, shapes and files.

Both engines begin from the tensors that are made or read here, by name, and give theirs back under the same names. So a
model begins with the same numbers however many processes share it and whichever engine trains it, a training can begin
with the model of another, and whatever reads Llama's format reads what was trained.

Weights are drawn from a normal distribution of 0.02; those that write into the residual stream from one narrower by the
root of twice the number of layers, because as many add up there (GPT-2, Radford et al. 2019). Each tensor has a random
generator of its own, seeded by its name.
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

WIDTH = 0.02

Weights = Callable[[str], torch.Tensor]
"""A tensor of the model by its name, on the CPU."""

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def shapes(model: ModelSettings, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor by name; `vocabulary` is padded already."""
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
    """Numbers that are trained."""
    return sum(math.prod(shape) for shape in shapes(model, vocabulary).values())


def fresh(model: ModelSettings, vocabulary: int, seed: int) -> Weights:
    """Weights to begin with, in float32."""
    known = shapes(model, vocabulary)
    narrow = WIDTH / math.sqrt(2 * model.layers)

    def weights(name: str) -> torch.Tensor:
        shape = known[name]
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
        width = narrow if name.endswith(("o_proj.weight", "down_proj.weight")) else WIDTH
        return torch.empty(shape).normal_(0, width, generator=generator)

    return weights


def configuration(model: ModelSettings, vocabulary: int, sequence_length: int, eos: int | None) -> LlamaConfig:
    """What config.json says of the model."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.feed_forward,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        max_position_embeddings=sequence_length,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_base},
        tie_word_embeddings=model.tied_embeddings,
        bos_token_id=None,
        eos_token_id=eos,
    )


def publish_model(
    folder: str, config: LlamaConfig, weights: Mapping[str, torch.Tensor], files: Mapping[str, bytes]
) -> None:
    """Write a model, and `files` (its tokenizer's) beside it, as `from_pretrained` reads them. Raises OSError."""
    with publish_folder(folder) as place:
        config.architectures = ["LlamaForCausalLM"]
        config.dtype = next(iter(weights.values())).dtype
        config.save_pretrained(place)
        save_file(dict(weights), Path(place, "model.safetensors"), metadata={"format": "pt"})
        for name, data in files.items():
            publish_bytes(f"{place}/{name}", data)


def stored(folder: Path, model: ModelSettings, vocabulary: int) -> Weights:
    """The weights in a folder that `from_pretrained` reads, in float32.

    Raises InputError for tensors that are missing or of other shapes than those of `model`; a smaller vocabulary is
    filled up with rows of zeros.
    """
    places = _places(folder)
    known = shapes(model, vocabulary)

    def weights(name: str) -> torch.Tensor:
        found = _read(places, name, folder)
        if name in {EMBEDDING, HEAD} and found.shape[0] < vocabulary:
            found = torch.cat([found, found.new_zeros(vocabulary - found.shape[0], found.shape[1])])
        if tuple(found.shape) != known[name]:
            raise InputError(
                f"start_from: {name} in {folder} is {tuple(found.shape)}, and the model of the settings has "
                f"{known[name]}; give the settings of that model"
            )
        return found.float()

    return weights


def _places(folder: Path) -> dict[str, Path]:
    """The file that each tensor is in."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in orjson.loads(index.read_bytes())["weight_map"].items()}
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        return dict.fromkeys(tensors.keys(), folder / "model.safetensors")


def _read(places: Mapping[str, Path], name: str, folder: Path) -> torch.Tensor:
    if name not in places:
        raise InputError(f"start_from: {folder} holds no {name}; it must be a Llama-like model in safetensors")
    with safe_open(places[name], "pt") as tensors:
        return tensors.get_tensor(name)
