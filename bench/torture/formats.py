"""Ids of every format of tokenizers against the library that defines the format, on the random documents of `ids`."""

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenmill.tasks.tokenize.encoders import ENGINES, Encoder, Tokens
from tokenmill.tasks.tokenize.exact import exact_encoder
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSettings

from bench.torture.ids import BATCH, differing, documents
from bench.torture.processes import each
from tests.tokenize import test_formats as made

COUNT = 1_000_000

Judge = Callable[[str, bool], list[int]]
"""The ids of a text by the library of a format."""

FORMATS = {
    "Kimi's tiktoken.model": made.kimi,
    "tiktoken's tokenizer.model": made.llama3,
    "ranks with pat_str": made.pattern_set,
    "qwen.tiktoken": made.qwen,
    "tekken.json": made.tekken,
    "vocab.json and merges.txt": made.gpt2,
    "Qwen2's vocab.json": made.qwen2,
    **{name: partial(made.mistral, name=name) for name in ("tokenizer.model", "tokenizer.model.v1", "tokenizer.model.v3")},
}  # fmt: skip


def run(count: int, seed: int) -> str:
    """Compare `count` documents in each format. Raises AssertionError with the first that differs."""
    batches = [f"{seed}-{number}" for number in range(-(-count // BATCH))]
    sizes = [sum(each(partial(compare, name, count=min(count, BATCH)), batches)) for name in FORMATS]
    seen = ", ".join(f"{name} ({size:,} ids)" for name, size in zip(FORMATS, sizes, strict=True))
    return f"{len(batches) * min(count, BATCH):,} documents have their library's ids in each of {seen}"


def compare(name: str, seed: str, count: int = BATCH) -> int:
    """Compare the documents of a seed by each engine that takes the format, and by the reference; how many ids were compared."""
    encoders, judge = _loaded(name)
    texts = documents(seed, count)
    column = pa.array(texts, pa.large_string())
    each_ids = [np.asarray(judge(text, True), np.uint32) for text in texts]
    expected = Tokens(np.concatenate(each_ids), np.cumsum([0, *map(len, each_ids)]))
    for engine, encoder in encoders.items():
        wrong = differing(encoder.encode(column), expected)
        if wrong.size:
            raise AssertionError(f"{name} by {engine}, seed {seed!r}, document {wrong[0]}: {texts[wrong[0]]!r}")
    return len(expected.ids) * len(encoders)


@cache
def _loaded(name: str) -> tuple[dict[str, Encoder], Judge]:
    with tempfile.TemporaryDirectory() as folder:
        model, judge, _ = FORMATS[name](Path(folder))
        vocabulary = load_vocabulary(TokenizerSettings(model=str(model), add_eos=False))
        encoders: dict[str, Encoder] = {"the reference": vocabulary.reference(True)}
    for engine in ENGINES:
        try:
            encoders[engine] = exact_encoder(vocabulary, engine, literal=True)
        except ValueError:
            continue
    return encoders, judge
