"""Models of a few thousand random weights, and sequences for them."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenmill.tasks.score.nll import Completions
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)  # threads that wait for each other are slower on models as small as these

VOCABULARY = 500
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def llama(longest=256, **changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=longest, **changes)).eval()


def gpt_oss(**changes):
    """Experts, attention sinks, and windows of 16 tokens in every other layer."""
    torch.manual_seed(0)
    rotation = {"rope_type": "default", "rope_theta": 1e4}
    wanted = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, **changes}
    return GptOssForCausalLM(GptOssConfig(**wanted, rope_parameters=rotation)).eval()


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SCALE = 120
"""The exponent of a block of MXFP4, from 127 on."""


def save_mxfp4(folder):
    """Save a gpt-oss whose experts are MXFP4, as the published ones are, in `folder`; returns the same model unquantized."""
    model = gpt_oss()
    model.save_pretrained(folder)
    written, plain = load_file(folder / "model.safetensors"), model.state_dict()
    for name in [name for name in written if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, rows = written.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        written[f"{name}_blocks"] = blocks
        written[f"{name}_scales"] = torch.full(blocks.shape[:3], SCALE, dtype=torch.uint8)
        nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).reshape(experts, rows, width).long()
        values = torch.where(nibbles < 8, 1, -1) * FP4[nibbles % 8] * 2.0 ** (SCALE - 127)
        plain[name].copy_(values.transpose(1, 2))
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = json.loads((folder / "config.json").read_bytes())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(settings))
    return model


def completions(*sequences):
    """Sequences given as lists of (id, loss, part)."""
    tokens = np.array([token for sequence in sequences for token in sequence], np.int64).reshape(-1, 3)
    offsets = np.cumsum([0, *map(len, sequences)])
    return Completions(tokens[:, 0].astype(np.int32), offsets, *tokens[:, 1:].T.astype(np.int8))


def sequence(generator, length, share=0.4):
    """A random sequence: runs of tokens that are scored, as parts, between such as are not."""
    parts = np.repeat(generator.integers(0, 4, length), generator.integers(1, 8, length))[:length]
    loss = (parts > 0) & (generator.random(length) < share * 2)
    return np.stack([generator.integers(0, VOCABULARY, length), loss, parts * loss], axis=1).tolist()


def corpus(seed=0, count=24, longest=120):
    """Sequences of 2 to `longest` tokens."""
    generator = np.random.default_rng(seed)
    return [sequence(generator, int(length)) for length in generator.integers(2, longest, count)]
