"""Small real tokenizers, each trained in well under a second on the standard library's sources and the gate's strings.

A byte-level BPE reads every text and gives it back exactly, so that documents can be recognized by their ids; a
WordPiece does neither; SentencePiece models come as BPE with bytes to fall back on, and as unigram.
"""

import io
import json
import json.decoder
import textwrap
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenmill.tasks.tokenize.gate import NASTY
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSettings

BOS, EOS, TURN = "<s>", "<|endoftext|>", "<|turn|>"
TRAINING_TEXT = [Path(json.decoder.__file__).read_text("utf-8"), Path(textwrap.__file__).read_text("utf-8"), *NASTY]


def byte_level_bpe(folder, size=700, special=(BOS, EOS, TURN)):
    """A folder with a tokenizer.json of `size` ids, control strings last, and a config that names BOS and EOS."""
    tokenizer = Tokenizer.from_str(_trained_bpe(size - len(special)))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return _saved(tokenizer, folder, {"bos_token": BOS, "eos_token": {"content": EOS, "lstrip": False}})


@cache
def _trained_bpe(size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer.to_str()


VERBATIM = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
"""The options of a SentencePiece model that leaves text as it is, as those of Llama and Gemma do."""


def word_piece(folder):
    """A folder with a BERT-like tokenizer, which gigatoken does not know how to run."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return _saved(tokenizer, folder, {"eos_token": "[SEP]"})


def sentencepiece_model(path, kind, **options):
    """A `.model` file; `kind` is bpe (with byte fallback) or unigram. Without options, text is brought into NFKC and
    stripped first.
    """
    lines = [line for text in TRAINING_TEXT for line in text.splitlines() if 0 < len(line.encode()) < 4000]
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=made, model_type=kind, vocab_size=1200, byte_fallback=kind == "bpe",
        hard_vocab_limit=False, character_coverage=0.99, minloglevel=2, **options,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(made.getvalue())
    return path


def reference(folder, *, literal=True):
    """The Hugging Face tokenizer of a folder; with `literal`, control strings in text are text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = literal
    return tokenizer


def ids_of(tokenizer, texts):
    """The ids of each text, as lists, with nothing added."""
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def load(model, **settings):
    """The vocabulary of a model, as a preparation loads it."""
    return load_vocabulary(TokenizerSettings(model=str(model), **settings))


def column(texts):
    return pa.array(texts, pa.large_string())


def encoded(encoder, texts):
    """The ids of each text, as lists."""
    found = encoder.encode(column(texts))
    return [ids.tolist() for ids in np.split(found.ids, found.offsets[1:-1])] if texts else []


def _saved(tokenizer, folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


class Identity:
    """All that GPTDataset asks of a tokenizer."""

    def __init__(self, size, eos):
        self.vocab_size, self.eod, self.eos, self.pad = size, eos, eos, -1
        self.unique_identifiers = {"class": "Identity"}
