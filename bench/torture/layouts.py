"""Token ids with generated layouts of added tokens: markers that strip, take whole words or overlap, beside whitespace that is a token.

A layout is a small tokenizer with random added tokens and flags. Its texts are random runs of its own tokens, parts of these,
whitespace and words. Each is encoded as a preparation would, with control strings as text and as tokens: by every engine
that passes the gate, and by Hugging Face `tokenizers`.
"""

import json
import random
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenmill.tasks.tokenize.encoders import ENGINES, Tokens
from tokenmill.tasks.tokenize.exact import exact_encoder, forget_encoders
from tokenmill.tasks.tokenize.gate import NASTY, by_reference, compare, nasty_strings
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

LAYOUTS = 60

TEXTS = 50_000
"""Texts of each layout in each mode."""

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKERS = [
    *(
        "<mask>",
        "[MASK]",
        "</s>",
        "<|turn|>",
        "<tool call>",
        "foo",
        "é",
        "\uff21",
        "e\u0301x",
        "<|end",
        "end|>",
        "|>foo",
        "foo bar",
    ),
    *(" lead", "trail ", "\n<p>", "a", "##", "<a><b>", "<b>"),
]
SPACES = [
    " ",
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x1c",
    "\x85",
    "\u200b",
    "▁",
    "▁▁",
]
WORDS = [
    "word",
    "if",
    "x:",
    "return",
    "1.",
    "don't",
    "É",
    "中",
    "。",
    "Ünïcode",
    "a",
    "b",
    "-",
    "<",
    ">",
    "|",
    "[",
    "_",
    "0",
    "fo",
]
MARKS = ["\u0301", "\u0338", "\u0327\u0301", "\u0308", "\u212a", "\u1161", "e\u0301"]


def run(seed: int, texts: int = TEXTS, layouts: int = LAYOUTS) -> str:
    """Compare the texts of each layout. Raises AssertionError with the first that differs."""
    seen: Counter[str] = Counter()
    for number in range(layouts):
        with tempfile.TemporaryDirectory() as folder:
            seen += _compared(f"{seed}-{number}", Path(folder), texts)
    return (
        f"{layouts} layouts of added tokens: {texts:,} texts in each of 2 modes have the reference's ids by the "
        f"{seen['engines']} engines of {layouts * 2 * len(ENGINES)} that pass the gate; "
        f"{seen['routed'] / max(seen['encoded'], 1):.0%} of the texts went to the reference"
    )


def _compared(seed: str, folder: Path, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    source = random.Random(seed)
    tokenizer = layout(source)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = find_vocabulary(TokenizerSource(model=str(folder)))
    texts = pa.array(documents(source, list(vocabulary.controls), count), pa.large_string())
    for literal in (True, False):
        expected = vocabulary.reference(literal).encode(texts)
        tried = by_reference(vocabulary, nasty_strings(vocabulary), literal=literal)
        for engine in ENGINES:
            if compare(vocabulary, engine, tried, literal=literal).difference is None:
                found = exact_encoder(vocabulary, engine, literal=literal).encode(texts)
                _require_equal(found, expected, texts, f"layout {seed!r} by {engine}, literal={literal}")
                seen += Counter(engines=1, routed=found.by_reference, encoded=count)
    forget_encoders()
    return seen


def _require_equal(found: Tokens, expected: Tokens, texts: pa.LargeStringArray, which: str) -> None:
    if np.array_equal(found.ids, expected.ids) and np.array_equal(found.offsets, expected.offsets):
        return
    pairs = zip(*(np.split(each.ids, each.offsets[1:-1]) for each in (found, expected)), texts, strict=True)
    for one, other, text in pairs:
        if not np.array_equal(one, other):
            raise AssertionError(f"{which}: {text.as_py()!r} gives {one.tolist()}, the reference {other.tolist()}")


def layout(source: random.Random) -> Tokenizer:
    """A tokenizer with random added tokens."""
    tokenizer = Tokenizer.from_str(_base(source.choice(["gpt2", "cl100k", "nfc", "spaces"])))
    markers = source.sample(MARKERS, source.randint(1, 6))
    added = [_flagged(source, marker, (0.35, 0.35, 0.15, 0.3, 0.5)) for marker in markers]
    longest = source.choice([0, 2, 4, 24])
    same = (0.0, 0.0, 0.0, float(source.random() < 0.5), float(source.random() < 0.2))
    added += [
        _flagged(source, space * size, same)
        for space in source.choice([" ", " \t", " \n\t", "\n"])
        for size in range(2, longest + 1)
    ]
    if source.random() < 0.3:
        added += [_flagged(source, space, same) for space in ("\t  ", " \n", "\r\n", "▁▁")]
    source.shuffle(added)
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    return tokenizer


def _flagged(source: random.Random, content: str, chances: tuple[float, ...]) -> AddedToken:
    lstrip, rstrip, single_word, normalized, special = (source.random() < chance for chance in chances)
    return AddedToken(
        content, lstrip=lstrip, rstrip=rstrip, single_word=single_word, normalized=normalized, special=special
    )


def documents(source: random.Random, tokens: list[str], count: int) -> list[str]:
    """Random texts of added tokens, whitespace and words."""
    kinds = [
        lambda: source.choice(tokens),
        lambda: source.choice(tokens)[: source.randint(1, 6)],
        lambda: source.choice(tokens)[-source.randint(1, 6) :],
        lambda: source.choice(SPACES) * source.choice([1, 1, 1, 2, 3, 5, 11, 32]),
        lambda: source.choice(SPACES),
        lambda: source.choice(WORDS),
        lambda: source.choice(WORDS),
        lambda: source.choice(MARKS),
    ]
    pieces = [source.choice(kinds)() for _ in range(4_000)]
    return ["".join(source.choices(pieces, k=source.randint(1, 12))) for _ in range(count)]


@cache
def _base(kind: str) -> str:
    """A trained byte-level BPE, or one that writes blanks as ▁ and falls back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "spaces", fuse_unk=True))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    split = pre_tokenizers.Split(Regex(CL100K), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
    tokenizer.pre_tokenizer = byte_level if kind == "gpt2" else pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    first: list[AddedToken] = []
    if kind == "nfc":
        tokenizer.normalizer = normalizers.NFC()
    if kind == "spaces":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet, first = [], [AddedToken(f"<0x{byte:02X}>") for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator([*NASTY, *WORDS, Path(__file__).read_text("utf-8")], trainer)
    return json.dumps(json.loads(tokenizer.to_str()) | {"added_tokens": []})
