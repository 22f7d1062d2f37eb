"""Weights come true in what is published: which files of packs, how often, and of which only the leading packs.

Who reads a folder of packs reads each of them once per epoch, so the weights of a blend have to be realised by what
lies in it. A share is counted in tokens, because packs are full to differing degrees. `down` repeats nothing: the data
set that is shortest for its weight is used whole, of the others less. `up` leaves nothing out: the data set that is
longest for its weight is used once, the others more often. `none` publishes every file once and claims nothing.

A share is met by whole files and the leading packs of one more. What is missed is half a pack at most: 2 % of a draw of
25 packs, 0.002 % of a hundred million tokens in packs of 4096. All of this is arithmetic on two numbers per file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenmill.tasks.shards.publication import Weights
from xxhash import xxh3_64_intdigest

Sampling = Literal["none", "down", "up"]

TOLERANCE = 0.02
"""A realised share that misses the wanted one by more than this, relative to it, is worth a warning."""

DataSet = tuple[str, str]
"""The split of the plan, and the name."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """What planning knows of a file of packs: the key of its shard, and its tokens without padding."""

    key: str
    tokens: int


Held = Mapping[DataSet, Sequence[PackedFile]]
"""The files that one split has of each data set."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What is taken of one data set: so many copies of each file, and of file number `cut` the leading packs that
    come closest to `rest` tokens, fewer than it holds. `rest` is 0 where whole files are just enough.
    """

    copies: tuple[int, ...]
    cut: int = 0
    rest: int = 0


def order(key: str, copy: int, seed: int) -> int:
    """Where a copy of a file stands among others: by a hash, so that data sets mix, each seed in its own way."""
    return xxh3_64_intdigest(f"{key}/{copy}".encode(), seed)


def draw(held: Held, weights: Weights, sampling: Sampling, seed: int) -> dict[DataSet, Draw]:
    """What is taken of each data set of one split. Those of weight 0 and those without tokens are left out."""
    shares = wanted_shares(held, weights)
    if sampling == "none":
        return {dataset: Draw((1,) * len(held[dataset])) for dataset in shares}
    totals = [_tokens(held[dataset]) / share for dataset, share in shares.items()]
    total = (min if sampling == "down" else max)(totals, default=0)
    return {dataset: _take(held[dataset], round(share * total), seed) for dataset, share in shares.items()}


def wanted_shares(held: Held, weights: Weights) -> dict[DataSet, float]:
    """The share of tokens that each data set is to have among those that have any."""
    present = {dataset: weights[dataset] for dataset, files in held.items() if weights[dataset] and _tokens(files)}
    return {dataset: weight / sum(present.values()) for dataset, weight in present.items()}


def _tokens(files: Sequence[PackedFile]) -> int:
    return sum(file.tokens for file in files)


def _take(files: Sequence[PackedFile], tokens: int, seed: int) -> Draw:
    """Every file as often as all of them fit, then once more, in seeded order, until one is too much."""
    often, rest = divmod(tokens, _tokens(files))
    copies = [often] * len(files)
    for number in sorted(range(len(files)), key=lambda number: order(files[number].key, often, seed)):
        if not rest:
            break
        if files[number].tokens > rest:
            return Draw(tuple(copies), number, rest)
        copies[number] += 1
        rest -= files[number].tokens
    return Draw(tuple(copies))


def account(held: Held, weights: Weights, taken: Mapping[DataSet, int]) -> dict[str, dict[str, float]]:
    """What came of it in one split, by name of the data set: its wanted and realised share of the tokens taken, those
    tokens, and how many times over they are what it holds. `taken` are the tokens taken of each data set.
    """
    total = sum(taken.values())
    return {
        dataset[1]: {
            "wanted": share,
            "realised": taken[dataset] / total,
            "tokens": taken[dataset],
            "copies": taken[dataset] / _tokens(held[dataset]),
        }
        for dataset, share in wanted_shares(held, weights).items()
    }


def warnings(split: str, books: Mapping[str, Mapping[str, float]], asked: Sequence[str]) -> list[str]:
    """A sentence for each data set that has nothing in the split and for each whose share could not be realised.

    `books` are what `account` says, `asked` the names of all data sets that have a weight there.
    """
    absent = [
        f"{split}: data set {name!r} has no packs; the others share its weight" for name in asked if name not in books
    ]
    return absent + [
        f"{split}: data set {name!r} has {book['realised']:.2%} of the tokens instead of {book['wanted']:.2%}; a pack is "
        "too large a step for so few of them: give it more data, or use smaller packs"
        for name, book in books.items()
        if abs(book["realised"] / book["wanted"] - 1) > TOLERANCE
    ]
