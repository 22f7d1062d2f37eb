"""Negative log-likelihood (NLL) of completions under a causal language model.

Token t of a sequence is scored from all tokens before it: its NLL is -ln p(t | tokens before t), in nats. The loss mask of
training selects the tokens. Each row gets the sum, the mean per token, and the perplexity, which is e to the mean (a mean above
30 counts as 30), for all scored tokens and for the analysis, the tool calls and the answers.

The first token of a sequence lacks context and is never scored. A sequence longer than the model's limit is truncated at its
end and flagged, and its unscored tokens are counted.

Engines return the NLL of single tokens (float32); this module sums them in float64, so that all engines count alike. It costs
0.15 microseconds per token.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from tokenmill.tasks.errors import InputError

from .tables import PARTS, ROW, SCHEMA, Place, require_finite

MAX_MEAN_NLL = 30.0  # the maximum exponent: larger means get a perplexity of e**30, about 10**13


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`[starts[0], …, starts[0] + counts[0] - 1, starts[1], …]`, int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)


@dataclass(frozen=True, slots=True)
class Completions:
    """Token sequences back to back, and their scored tokens; sequence i is `[offsets[i], offsets[i + 1])`."""

    ids: np.ndarray  # int32 [tokens]
    offsets: np.ndarray  # int64 [sequences + 1]
    loss: np.ndarray  # int8 [tokens], 1 if the token itself is scored (not shifted)
    parts: np.ndarray  # int8 [tokens], 0 or the number of one of PARTS

    def __post_init__(self) -> None:
        """Raise ValueError unless all arrays have the same number of tokens."""
        sizes = (len(self.ids), len(self.loss), len(self.parts), int(self.offsets[-1]))
        if len({*sizes}) > 1:
            raise ValueError(
                f"ids, loss, parts and the last offset have {sizes} tokens; they must have the same number"
            )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sequence, int64."""
        return np.diff(self.offsets)


class Scorer(Protocol):
    """A loaded scoring model."""

    def score(self, sequences: Completions, place: Place = ROW) -> pa.Table:
        """One row of SCHEMA per sequence, in order; `place` names a sequence in errors.

        Raises NonFiniteError for a non-finite NLL, InputError for a token outside the model's vocabulary, and RunError if
        memory runs out or a server fails.
        """
        ...


@dataclass(frozen=True, slots=True)
class Targets:
    """The tokens to score, in order."""

    places: np.ndarray  # int64 [targets], in the ids
    rows: np.ndarray  # int64 [targets], their sequences
    positions: np.ndarray  # int64 [targets], in their sequences
    bounds: np.ndarray  # int64 [sequences + 1], where the targets of each sequence begin

    @property
    def reach(self) -> np.ndarray:
        """The tokens of each sequence that the model must read to score all its targets, int64; 0 without targets."""
        last = np.append(self.positions, 0)[np.maximum(self.bounds[1:] - 1, 0)]
        return np.where(np.diff(self.bounds) > 0, last, 0)


def targets_of(sequences: Completions, limit: int | None) -> Targets:
    """Return the tokens of the loss mask that a model can score if it reads at most `limit` tokens (None: no limit)."""
    places = np.flatnonzero(sequences.loss)
    rows = np.searchsorted(sequences.offsets, places, side="right") - 1
    positions = places - sequences.offsets[rows]
    possible = positions > 0 if limit is None else (positions > 0) & (positions < limit)
    places, rows, positions = places[possible], rows[possible], positions[possible]
    return Targets(places, rows, positions, np.searchsorted(places, sequences.offsets))


def require_known(sequences: Completions, vocabulary_size: int) -> None:
    """Raise InputError unless every token is in the model's vocabulary."""
    low, high = int(sequences.ids.min(initial=0)), int(sequences.ids.max(initial=0))
    if low < 0 or high >= vocabulary_size:
        raise InputError(
            f"token {low if low < 0 else high} is outside the model's vocabulary of {vocabulary_size}; score with the tokenizer "
            "that the model was trained with"
        )


def score_table(
    sequences: Completions, targets: Targets, nll: np.ndarray, limit: int | None, place: Place = ROW
) -> pa.Table:
    """Return SCHEMA's rows, given the NLL of each target (float32 [targets]). Raises NonFiniteError, naming the row."""
    require_finite(nll, targets.rows, "NLL of a token", place)
    rows = len(sequences.lengths)
    shape = (rows, len(PARTS) + 1)
    cells = targets.rows * shape[1] + sequences.parts[targets.places]
    counts = np.bincount(cells, minlength=rows * shape[1]).reshape(shape)
    sums = np.bincount(cells, weights=nll, minlength=rows * shape[1]).reshape(shape)
    wanted = np.diff(targets_of(sequences, None).bounds)
    cut = np.zeros(rows, np.bool_) if limit is None else sequences.lengths > limit
    return _table(sums.sum(axis=1), counts.sum(axis=1), sums[:, 1:], counts[:, 1:], sequences.lengths, wanted, cut)


def summed(scores: pa.Table, owners: np.ndarray, rows: int) -> pa.Table:
    """Aggregate scores of sequences (SCHEMA's rows) to rows: `owners` (int64, ascending) are indices into `rows`."""
    if np.array_equal(owners, np.arange(rows)):
        return scores

    def sums(name: str, weight: str | None = None) -> np.ndarray:
        values = scores[name].cast(pa.float64()).fill_null(0).to_numpy()
        return np.bincount(owners, values * scores[weight].to_numpy() if weight else values, rows)

    scored = sums("completion_token_count")
    counts = np.stack([sums(f"{part}_token_count") for part in PARTS], axis=1)
    parts = np.stack([sums(f"nll_{part}", f"{part}_token_count") for part in PARTS], axis=1)
    wanted = scored + sums("cut_token_count")
    return _table(sums("nll_sum"), scored, parts, counts, sums("total_token_count"), wanted, sums("truncated") > 0)


def _table(
    total: np.ndarray, scored: np.ndarray, part_sums: np.ndarray, part_counts: np.ndarray, lengths: np.ndarray,
    wanted: np.ndarray, truncated: np.ndarray,
) -> pa.Table:  # fmt: skip
    """Return SCHEMA's rows from sums and counts, in total [rows] and by part [rows, PARTS]."""

    def mean(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return sums / np.maximum(counts, 1)

    means, parts = mean(total, scored), mean(part_sums, part_counts)
    columns = [
        *(pa.array(each, mask=scored == 0) for each in (total, means, np.exp(np.minimum(means, MAX_MEAN_NLL)))),
        *(pa.array(sums, mask=counts == 0) for sums, counts in zip(parts.T, part_counts.T, strict=True)),
        *(pa.array(each) for each in (scored, *part_counts.T, lengths, wanted - scored, truncated)),
    ]
    return pa.table([each.cast(field.type) for each, field in zip(columns, SCHEMA, strict=True)], SCHEMA)
