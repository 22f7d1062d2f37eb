"""From encoded text to the arrays that are written: empty documents out, long ones cut, BOS and EOS in, ids checked.

Everything is done on whole batches with NumPy. Putting one EOS after each document is a boolean mask over the output
(about 1 ns per token, against some 7 ns for encoding): false where an added id goes, true where the text's ids go, so
that one assignment places, spaces and casts them.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.holdout import parts_of

from .binidx import token_dtype
from .encoders import Tokens
from .settings import PretrainRecipe

WHOLE = "all"
"""The one part of a shard of which nothing is held out."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Finished documents: `tokens` in the vocabulary's dtype [total], `lengths` int64 [documents], none of them 0.

    `kept` holds the number, among the texts that were encoded, of each document; `truncated` counts those cut.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    kept: np.ndarray
    truncated: int


def assemble(encoded: Tokens, recipe: PretrainRecipe) -> Documents:
    """Turn encoded texts into documents as the recipe says.

    Raises RunError for an id outside the vocabulary, which would wrap silently in a narrow dtype.
    """
    check_ids(encoded, recipe.vocabulary_size)
    lengths = encoded.lengths
    kept = np.flatnonzero(lengths)
    ids, lengths, truncated = _truncate(encoded.ids, lengths[kept], recipe)
    return Documents(_with_ends(ids, lengths, recipe), lengths + _added(recipe), kept, truncated)


def check_ids(encoded: Tokens, vocabulary_size: int) -> None:
    """Raises RunError, naming the id and the text, unless every id is below `vocabulary_size`."""
    if not encoded.ids.size or int(encoded.ids.max()) < vocabulary_size:
        return
    worst = int(encoded.ids.argmax())
    text = int(np.searchsorted(encoded.offsets, worst, side="right")) - 1
    raise RunError(
        f"id {int(encoded.ids[worst])} in text {text} of the batch is outside the vocabulary of {vocabulary_size} ids; "
        "the tokenizer's files do not fit together"
    )


def _added(recipe: PretrainRecipe) -> int:
    return (recipe.bos is not None) + (recipe.eos is not None)


def _truncate(ids: np.ndarray, lengths: np.ndarray, recipe: PretrainRecipe) -> tuple[np.ndarray, np.ndarray, int]:
    """Cut the tails of documents that would exceed `max_doc_tokens` with BOS and EOS counted."""
    if recipe.max_doc_tokens is None:
        return ids, lengths, 0
    room = recipe.max_doc_tokens - _added(recipe)
    long = np.flatnonzero(lengths > room)
    ends = np.cumsum(lengths)
    keep = np.ones(len(ids), np.bool_)
    for start, end in zip((ends - lengths)[long].tolist(), ends[long].tolist(), strict=True):
        keep[start + room : end] = False
    return ids[keep], np.minimum(lengths, room), len(long)


def _with_ends(ids: np.ndarray, lengths: np.ndarray, recipe: PretrainRecipe) -> np.ndarray:
    """The ids in their final dtype, with BOS before and EOS after each document where the recipe has them."""
    added = _added(recipe)
    tokens = np.empty(len(ids) + added * len(lengths), token_dtype(recipe.vocabulary_size))
    ends = np.cumsum(lengths + added)
    is_text = np.ones(len(tokens), np.bool_)
    places = {"bos": ends - lengths - added, "eos": ends - 1}
    for name, identifier in (("bos", recipe.bos), ("eos", recipe.eos)):
        if identifier is not None:
            is_text[places[name]] = False
            tokens[places[name]] = identifier
    tokens[is_text] = ids
    return tokens


def assign_parts(texts: pa.LargeStringArray, recipe: PretrainRecipe) -> np.ndarray:
    """The part of each document, as an index into PARTS (uint8): by a hash of its text, never by its position.

    The hash is xxh3_64 with the holdout's seed.
    """
    _, offsets, characters = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1].tolist()
    view = memoryview(characters or b"")
    seed = recipe.holdout_seed or 0
    digests = np.array(
        [xxhash.xxh3_64_intdigest(view[start:stop], seed) for start, stop in itertools.pairwise(bounds)],
        np.uint64,
    )
    return parts_of(digests, recipe.holdout_valid, recipe.holdout_test)


def runs(parts: np.ndarray) -> list[tuple[int, int, int]]:
    """Maximal runs of equal parts as `(part, first, last + 1)`: what one write can take without a copy."""
    if not parts.size:
        return []
    borders = np.flatnonzero(np.diff(parts)) + 1
    starts = [0, *borders.tolist()]
    return [(int(parts[start]), start, stop) for start, stop in zip(starts, [*starts[1:], len(parts)], strict=True)]
