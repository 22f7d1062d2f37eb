"""The documents among which near-duplicates are looked for: the corpus' text in pieces of 30 to 80 words, and copies.

One document in ten is an exact copy of an earlier one but for its line breaks, and one in ten a copy with one to three
words replaced: a quarter of these are at a similarity of 0.8 or more, the others are there to be mistaken. Pieces begin
where a file begins, so licenses, imports and generated code give the text duplicates of its own, and chance candidates
that random words would not. How alike a copy and its original are is counted here, with sets of strings, for whoever
judges.

`BENCH_DOCUMENTS` asks for a number of documents (1,000,000, where the corpus has as much text). The same corpus gives the
same bytes, written anew every time in half a minute.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random

import orjson

from bench import corpus
from bench.bench import Bench

SHORTEST, LONGEST = 30, 80
MOST_CHARACTERS = 2_000
EXACT, NEAR = 0.1, 0.1
MOST_EDITS = 3
RECENT = 10_000
"""Originals that may still be copied, in memory; each new one takes the place of any of them."""

LONGEST_WORD = 40
"""In characters. We cut longer words, and scripts without blanks, into pieces, which the peer and the judge do not know."""

WORDS = 5
THRESHOLD = 0.8


@dataclass(frozen=True, slots=True)
class Planted:
    """A JSONL file of `{"text"}`, its size in bytes, its number of documents, and a JSON list of what was planted: the
    number of the original, that of the copy, and how alike they are.
    """

    path: str
    size: int
    documents: int
    pairs: str


def build(bench: Bench) -> Planted:
    """Write the documents."""
    asked = int(os.environ.get("BENCH_DOCUMENTS", "1000000"))
    path, pairs = bench.folder / "dedup_documents.jsonl", bench.folder / "dedup_pairs.json"
    planted: list[tuple[int, int, float]] = []
    size = documents = 0
    with Path(corpus.build(bench.folder).path).open("rb") as lines, path.open("wb") as out:
        for text in islice(_documents(_pieces(lines), planted), asked):
            size += out.write(orjson.dumps({"text": text}) + b"\n")
            documents += 1
    pairs.write_text(json.dumps(planted), encoding="utf-8")
    return Planted(str(path), size, documents, str(pairs))


def similarity(one: str, other: str) -> float:
    """The Jaccard similarity of two texts of five words or more, by their runs of five words."""
    first, second = _runs(one), _runs(other)
    return len(first & second) / len(first | second)


def _runs(text: str) -> set[str]:
    words = text.split()
    return {" ".join(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1)}


def _pieces(lines: Iterator[bytes]) -> Iterator[str]:
    random = Random(0)
    for line in lines:
        words, start = orjson.loads(line)["text"].split(), 0
        while len(words) - start >= SHORTEST:
            stop = start + random.randint(SHORTEST, LONGEST)
            piece = " ".join(words[start:stop])
            if len(piece) <= MOST_CHARACTERS and _of_short_words(piece):
                yield piece
            start = stop


def _of_short_words(piece: str) -> bool:
    """Whether all units of our shingles are the words between blanks, as for the peer and the judge."""
    return piece.isascii() and max(map(len, piece.split())) <= LONGEST_WORD


def _documents(pieces: Iterator[str], planted: list[tuple[int, int, float]]) -> Iterator[str]:
    """Texts until there are no more pieces; what is planted is noted on the way."""
    random, recent = Random(1), [(0, next(pieces))]
    yield recent[0][1]
    for number in count(1):
        chance = random.random()
        if chance < EXACT + NEAR:
            original, piece = random.choice(recent)
            text = piece.replace(" ", "\n", 3) if chance < EXACT else _edited(random, piece, random.choice(recent)[1])
            planted.append((original, number, similarity(piece, text)))
        else:
            text = next(pieces, "")
            if not text:
                return
            if len(recent) < RECENT:
                recent.append((number, text))
            else:
                recent[random.randrange(RECENT)] = (number, text)
        yield text


def _edited(random: Random, text: str, other: str) -> str:
    """The text with one to three of its words replaced by words of another."""
    words, strangers = text.split(), other.split()
    for place in random.sample(range(len(words)), random.randint(1, MOST_EDITS)):
        words[place] = random.choice(strangers)
    return " ".join(words)
