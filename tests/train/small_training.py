"""Small real preparations as training sees them, and a tiny model of random weights in a folder."""

import json

from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.train.job import TrainData, TrainSource
from transformers import LlamaConfig, LlamaForCausalLM, set_seed


def train_data(kind, folder, tokenizer, **changes):
    """What is prepared in `folder`; a dataset is named by the beginning of its file's name, or the number of the file."""
    blend = json.loads((folder / "blend.json").read_text())
    sources = [
        TrainSource(dataset=f"set-{number // 2}", split=split, files=[path], weights=[float(weight)], tokens=0)
        for split in ("train", "valid", "test")
        for number, weight, path in pairs(blend[split] or [])
    ]
    vocabulary = find_vocabulary(TokenizerSource(model=str(tokenizer)))
    known = {
        "path": str(folder), "kind": kind, "made_from": "f" * 32, "tokenizer": {"model": str(tokenizer)},
        "fingerprint": vocabulary.fingerprint, "vocabulary_size": vocabulary.size, "eos": vocabulary.eos,
        "sources": sources,
    }  # fmt: skip
    return TrainData(**{**known, **changes})


def pairs(flat):
    return [(number, flat[number], flat[number + 1]) for number in range(0, len(flat), 2)]


def saved_model(folder, vocabulary, longest=512, change=None):
    """A folder with a Llama of some thousand random weights, after `change(model)`."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=longest, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    return str(folder)
