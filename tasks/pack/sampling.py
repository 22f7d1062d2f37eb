"""Sampling: the pack files to publish, how often, and which only in part.

A trainer reads every file in a folder once per epoch, so the weights of a blend are realized by the contents of the folder.
Shares are counted in tokens. `down` doesn't repeat packs: the dataset with the fewest tokens for its weight is used whole, the
others in part. `up` doesn't omit packs: the dataset with the most tokens for its weight is used once, the others more often. `none`
publishes every file once. A share is made of whole files and the leading packs in one more, so it is off by at most half a
pack: 2 % of 25 packs, 0.002 % of a hundred million tokens in packs of 4096.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenmill.tasks.shards.publication import Weights
from xxhash import xxh3_64_intdigest

Sampling = Literal["none", "down", "up"]

TOLERANCE = 0.02
"""Warn if the relative error of a share is larger."""

DataSet = tuple[str, str]
"""The split of the plan, and the name."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file of packs: the key of its shard, and its tokens without padding."""

    key: str
    tokens: int


Held = Mapping[DataSet, Sequence[PackedFile]]
"""The files of each dataset in one split."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw from one dataset: `copies` of each file, and the leading packs in file number `cut` that are closest to
    `rest` tokens, if `rest` is not 0.
    """

    copies: tuple[int, ...]
    cut: int = 0
    rest: int = 0


def order(key: str, copy: int, seed: int) -> int:
    """Return the sort key of a copy of a file: a hash, so that datasets mix."""
    return xxh3_64_intdigest(f"{key}/{copy}".encode(), seed)


def draw(held: Held, weights: Weights, sampling: Sampling, seed: int, wanted: int | None = None) -> dict[DataSet, Draw]:
    """Draw from each dataset of a split that has a weight and tokens; `wanted` tokens in all, if that is not None."""
    shares = wanted_shares(held, weights)
    if sampling == "none":
        return {dataset: Draw((1,) * len(held[dataset])) for dataset in shares}
    # The total at which each dataset would be used exactly once.
    totals = [_tokens(held[dataset]) / share for dataset, share in shares.items()]
    total = wanted or (min if sampling == "down" else max)(totals, default=0)
    return {dataset: _take(held[dataset], round(share * total), seed) for dataset, share in shares.items()}


def wanted_shares(held: Held, weights: Weights) -> dict[DataSet, float]:
    """Return the wanted share of tokens in each dataset that has any."""
    present = {dataset: weights[dataset] for dataset, files in held.items() if weights[dataset] and _tokens(files)}
    return {dataset: weight / sum(present.values()) for dataset, weight in present.items()}


def _tokens(files: Sequence[PackedFile]) -> int:
    return sum(file.tokens for file in files)


def _take(files: Sequence[PackedFile], tokens: int, seed: int) -> Draw:
    """Take all files as often as they fit, then files in seeded order until one is too large."""
    often, rest = divmod(tokens, _tokens(files))
    copies = [often] * len(files)
    # The order depends on how often files are used, or the same ones would always be left over.
    for number in sorted(range(len(files)), key=lambda number: order(files[number].key, often, seed)):
        if not rest:
            break
        if files[number].tokens > rest:
            return Draw(tuple(copies), number, rest)
        copies[number] += 1
        rest -= files[number].tokens
    return Draw(tuple(copies))


def account(held: Held, weights: Weights, taken: Mapping[DataSet, int]) -> dict[str, dict[str, float]]:
    """Target and realized share of each dataset in a split, its tokens, and how often it is repeated. `taken` are tokens."""
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


def warnings(split: str, shares: Mapping[str, Mapping[str, float]], asked: Sequence[str]) -> list[str]:
    """Yield a warning for each dataset without packs in the split, or whose share could not be realized.

    `shares` are the result of `account`, `asked` the names of all datasets with a weight in the split.
    """
    absent = [
        f"{split}: dataset {name!r} doesn't have packs; the others share its weight"
        for name in asked
        if name not in shares
    ]
    return absent + [
        f"{split}: dataset {name!r} has {share['realised']:.2%} of the tokens instead of {share['wanted']:.2%}; it has "
        "too few packs for its weight: give it more data, or use smaller packs"
        for name, share in shares.items()
        if abs(share["realised"] / share["wanted"] - 1) > TOLERANCE
    ]
