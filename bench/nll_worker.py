"""Score the same sequences with our engine and with a plain loop, on a GPU where there is one; print facts as JSON.

    python -m bench.nll_worker [SEQUENCES]

The model is a Llama with random weights: its scores mean nothing, its cost is real. Lengths are those of conversations,
most of them short and a few long, and two fifths of the tokens are scored.
"""

import json
import sys
import time

import numpy as np
import torch
from tokenmill.tasks.score.models import CausalScorer
from tokenmill.tasks.score.nll import Completions
from transformers import LlamaConfig, LlamaForCausalLM

from bench import nll_loop

SIZES = {
    "cuda": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 201_088, "max_position_embeddings": 4096,
    },
    "cpu": {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 32_000, "max_position_embeddings": 1024,
    },
}  # fmt: skip
SEQUENCES = {"cuda": 10_000, "cpu": 96}
TYPICAL = {"cuda": 600, "cpu": 200}
"""Tokens of a sequence in the middle."""

PEER_BATCH = 4
"""Sequences at a time: 8 of 4,096 tokens and 200,000 words take 65 GB of logits, almost all that a card may have."""

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 operations a second, by the makers' data sheets."""


def sequences(device, count):
    """Random tokens in sequences of lognormal length."""
    generator = np.random.default_rng(0)
    longest, words = SIZES[device]["max_position_embeddings"], SIZES[device]["vocab_size"]
    lengths = generator.lognormal(np.log(TYPICAL[device]), 0.8, count).clip(16, longest).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    ids = generator.integers(0, words, offsets[-1]).astype(np.int32)
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    loss = (places >= np.repeat(lengths * 3 // 5, lengths)).astype(np.int8)
    return Completions(ids, offsets, loss, loss * np.int8(3))


def operations(model, given):
    """Of a forward pass over all tokens, the output layer on those that are scored alone."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = sum(each.numel() for each in model.parameters()) - 2 * head
    attention = 2 * config.num_hidden_layers * config.hidden_size * (given.lengths.astype(np.float64) ** 2).sum()
    return 2.0 * body * len(given.ids) + 2.0 * head * given.loss.sum() + attention


def timed(device, score):
    """What `score` gives, its seconds, and the peak of memory where the device tells."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    found = score()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return found, {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None}


def measured(count=None):
    """What both cost on so many sequences, and how far apart their sums are."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = LlamaConfig(**SIZES[device], tie_word_embeddings=False)
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    scorer, given = CausalScorer(model), sequences(device, count or SEQUENCES[device])
    offsets = given.offsets[: PEER_BATCH + 1]
    few = Completions(given.ids[: offsets[-1]], offsets, given.loss[: offsets[-1]], given.parts[: offsets[-1]])
    scorer.score(few), nll_loop.sums(model, few, PEER_BATCH)
    table, ours = timed(device, lambda: scorer.score(given))
    sums, theirs = timed(device, lambda: nll_loop.sums(model, given, PEER_BATCH))
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    peak = next((value for kind, value in PEAKS.items() if kind in name), None)
    return {
        "device": name, "threads": torch.get_num_threads(), "parameters": sum(each.numel() for each in model.parameters()),
        "sequences": len(given.lengths), "tokens": len(given.ids), "scored": int(given.loss.sum()),
        "ours": ours, "loop": theirs,
        "share_of_peak": operations(model, given) / ours["seconds"] / peak if peak else None,
        "largest_difference": float(np.abs(table["nll_sum"].to_numpy() / sums - 1).max()),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:]))))
