"""Token ids against the references, on random documents that are rich in characters which libraries disagree about.

Documents are encoded with each of five vocabularies by the exact encoder and by the reference. They know nothing of the
sweep's contexts: they are pieces in random order, of words in every block of Unicode, letters and marks that are newer
than Python's own tables, contractions, white space, digits and punctuation of all kinds, 20 to 60 characters long. Every
batch has its own seed, so that a difference can be repeated.
"""

import itertools
import random
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import regex
from tokenmill.tasks.tokenize.encoders import ENGINES, Tokens
from tokenmill.tasks.tokenize.exact import ExactEncoder, exact_encoder
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import Engine, TokenizerSettings

from bench.torture import layouts
from bench.torture.processes import each
from tests.peers import vocabularies

VOCABULARIES = ("gpt2", "qwen", "cl100k_base", "o200k_harmony", "deepseek")

COUNT = 5_000_000

BATCH = 50_000
"""Documents per batch: some 5 MB."""

SHORTEST, LONGEST = 20, 60
"""Characters of a document."""

PIECES = 4_000
"""Pieces of each kind that the documents of a batch are made from."""

Kind = Callable[[random.Random], str]
"""Makes a piece of text."""

QUOTES = "''''\u2019\u2018\u02bc\uff07"
ENDINGS = ("s", "t", "re", "ve", "m", "ll", "d", "S", "LL", "Re", "vE", "D", "\u017f", "l", "x", "n't")
SPACES = [
    *"     \t\n\n\r\x0b\x0c\x1c\x1f\x85\u00a0\u1680\u2000\u2007\u2009\u2028\u2029\u202f\u205f\u3000",
    "\r\n",
    "\n\n",
    "  ",
]
PUNCTUATION = [
    *"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "...",
    "//",
    "!\n",
    ");\n\n",
    "«",
    "»",
    "—",
    "…",
    "。",
    "、",
    "·",
    "₹",
    "©",
    "↗",
]
JOINERS = "\u200d\u200c\u200b\ufe0f\u00ad\u2060\U000e0061\U0001f3fd"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|", "|>", "<\uff5cend▁of▁sentence\uff5c>")


@dataclass(frozen=True)
class Outcome:
    """What was seen in some documents: how many there were, went to the reference, and differ by the fast encoder alone."""

    documents: int
    by_reference: int
    provoking: int

    def __str__(self) -> str:
        return f"({self.provoking:,} only by the {self.by_reference:,} that went to it)"

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.documents + other.documents, self.by_reference + other.by_reference, self.provoking + other.provoking
        )


def run(count: int, seed: int) -> str:
    """Compare `count` documents for each vocabulary, then layouts of added tokens. Raises AssertionError with the first that differs."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = itertools.product(VOCABULARIES, ENGINES)
        seen = [f"{name} by {engine} {_run(model(name, Path(folder)), engine, count, seed)}" for name, engine in pairs]
    added = layouts.run(seed, min(count, layouts.TEXTS))
    return f"{count:,} documents have the reference's ids with each of {', '.join(seen)}; {added}"


def _run(path: str, engine: Engine, count: int, seed: int) -> Outcome:
    batches = [f"{seed}-{number}" for number in range(-(-count // BATCH))]
    return sum(each(partial(compare, path, engine, count=min(count, BATCH)), batches), start=Outcome(0, 0, 0))


def model(name: str, folder: Path) -> str:
    """What `tokenizer.model` calls a vocabulary; those that are no encodings of tiktoken's are made in `folder`."""
    make: Callable[[Path], Path] | None = {
        "gpt2": vocabularies.gpt2, "qwen": vocabularies.qwen, "deepseek": vocabularies.deepseek
    }.get(name)  # fmt: skip
    return str(make(folder)) if make else name


def compare(model: str, engine: Engine, seed: str, count: int = BATCH) -> Outcome:
    """Compare the documents of a seed. Raises AssertionError with the first that differs."""
    encoder = _encoder(model, engine)
    texts = pa.array(documents(seed, count), pa.large_string())
    found, fast, expected = encoder.encode(texts), encoder.fast.encode(texts), encoder.reference().encode(texts)
    wrong = differing(found, expected)
    if wrong.size:
        number = int(wrong[0])
        raise AssertionError(f"{model} by {engine}, seed {seed!r}, document {number}: {texts[number].as_py()!r}")
    return Outcome(len(texts), found.by_reference, len(differing(fast, expected)))


@cache
def _encoder(model: str, engine: Engine) -> ExactEncoder:
    return exact_encoder(load_vocabulary(TokenizerSettings(model=model, add_eos=False)), engine, literal=True)


def differing(one: Tokens, other: Tokens) -> np.ndarray:
    """The numbers of the documents whose ids differ."""
    if np.array_equal(one.ids, other.ids) and np.array_equal(one.offsets, other.offsets):
        return np.empty(0, np.int64)
    pairs = zip(np.split(one.ids, one.offsets[1:-1]), np.split(other.ids, other.offsets[1:-1]), strict=True)
    return np.flatnonzero([not np.array_equal(left, right) for left, right in pairs])


def documents(seed: str, count: int) -> list[str]:
    """Random documents, always the same for a seed; every other one has none of the youngest characters."""
    source = random.Random(seed)
    old = [piece for piece in (_piece(source) for _ in range(PIECES)) if all(map(_known_to_python, piece))]
    pools = (old, old + [_piece(source, YOUNG) for _ in range(PIECES)])
    return [_document(source, pools[number % 2]) for number in range(count)]


def _piece(source: random.Random, kinds: Sequence[Kind] | None = None) -> str:
    return source.choice(kinds or KINDS)(source)


def _document(source: random.Random, pieces: Sequence[str]) -> str:
    text = "".join(source.choices(pieces, k=LONGEST // 2))
    return text[: source.randint(SHORTEST, LONGEST)]


def _choose(source: random.Random, pool: Sequence[str], most: int) -> str:
    return "".join(source.choices(pool, k=source.randint(1, most)))


def _word(source: random.Random) -> str:
    """Letters, marks and what else stands beside each other in Unicode."""
    return _choose(source, source.choice(_blocks()), 6)


def _young(source: random.Random) -> str:
    return _choose(source, source.choice(_young_blocks()), 3)


def _latin(source: random.Random) -> str:
    word = _choose(source, "aeiorstnlĺéßñ\u0131İ\u017f", 6)
    return source.choice([word, word.upper(), word.title(), word.swapcase()])


def _contraction(source: random.Random) -> str:
    stem = source.choice([_word, _young, _latin, _marks])(source)
    return stem + source.choice(QUOTES) + source.choice(ENDINGS)


def _young_contraction(source: random.Random) -> str:
    return source.choice(["", " ", "!", "a", "1"]) + _young(source)[:1] + source.choice(QUOTES) + source.choice(ENDINGS)


def _space(source: random.Random) -> str:
    return _choose(source, SPACES, 3)


def _digits(source: random.Random) -> str:
    return _choose(source, source.choice([list("0123456789"), _known(r"\p{N}")]), 4)


def _punctuation(source: random.Random) -> str:
    return _choose(source, PUNCTUATION, 3)


def _marks(source: random.Random) -> str:
    return _choose(source, _known(r"\p{M}"), 4)


def _joined(source: random.Random) -> str:
    return source.choice([_young, _word, _marks])(source) + source.choice(JOINERS)


def _control(source: random.Random) -> str:
    return source.choice(CONTROL)


def _short(source: random.Random) -> str:
    return source.choice("aA1! \n'中")


KINDS: tuple[Kind, ...] = (
    *(_word, _word, _word, _latin, _latin, _contraction, _contraction, _space, _space, _space),
    *(_digits, _punctuation, _marks, _joined, _short, _short, _short, _control),
)
YOUNG: tuple[Kind, ...] = (_young, _young_contraction, _young_contraction)


@cache
def _known(pattern: str) -> list[str]:
    """The characters beyond ASCII that a regular expression matches, ascending."""
    return regex.findall(
        pattern, "".join(chr(number) for number in range(0x80, 0x110000) if not 0xD800 <= number < 0xE000)
    )


def _by_block(characters: Iterable[str]) -> list[list[str]]:
    """The characters by the 128 code points that they stand among, so that no script is rare."""
    blocks: dict[int, list[str]] = {}
    for character in characters:
        blocks.setdefault(ord(character) // 128, []).append(character)
    return list(blocks.values())


@cache
def _blocks() -> list[list[str]]:
    return _few_ideographs(_known(r"[\p{L}\p{M}\p{N}\p{S}\p{P}]"))


@cache
def _young_blocks() -> list[list[str]]:
    """What a newer table than Python's knows, and Python's does not."""
    return _few_ideographs(character for character in _known(r"\P{Cn}") if not _known_to_python(character))


def _known_to_python(character: str) -> bool:
    return unicodedata.category(character) != "Cn"


def _few_ideographs(characters: Iterable[str]) -> list[list[str]]:
    """The characters by block, with one block of ideographs in twenty."""
    blocks = _by_block(characters)
    ideographs = [block for block in blocks if regex.match(r"\p{Han}|\p{Hangul}|\p{Tangut}", block[0])]
    return [block for block in blocks if block not in ideographs] + ideographs[::20]
