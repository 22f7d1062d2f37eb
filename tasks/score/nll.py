"""Negative log-likelihood of completions: how much a model is surprised by what the assistant says.

Token t of a sequence is scored from all tokens before it: its NLL is -ln p(t | tokens before t), in nats. Which tokens
count is not decided here: the mask is the one that training uses, so that a score speaks of the tokens that a model
would learn. A row has the sum, the mean per token, and the perplexity, which is e to the mean (to 30 at most, so that it
stays a number people can read), of all that is scored and of its parts: analysis, tool calls, answers.

The first token of a sequence has nothing before it and is never scored. A sequence longer than the model reads is cut
behind, and says so: its row is flagged, and counts the tokens that were to be scored and were cut.

Engines give the NLL of single tokens (float32); everything after that is this module's, in float64, so that all
engines count alike. It costs 0.15 microseconds a token.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from tokenmill.tasks.errors import InputError

from .finite import ROW, Place, require_finite

PARTS = ("analysis", "tool_call", "final")
"""What a token can be part of, numbered from 1; 0 is none of these."""

MOST_PERPLEXING = 30.0
"""Means above this count as this in the perplexity: e**30 is 10**13."""

SCHEMA = pa.schema(
    [
        pa.field("nll_sum", pa.float64()),
        pa.field("nll_mean", pa.float64()),
        pa.field("ppl", pa.float64()),
        *(pa.field(f"nll_{part}", pa.float64()) for part in PARTS),
        pa.field("completion_token_count", pa.int32()),
        *(pa.field(f"{part}_token_count", pa.int32()) for part in PARTS),
        pa.field("total_token_count", pa.int32()),
        pa.field("cut_token_count", pa.int32()),
        pa.field("truncated", pa.bool_()),
    ]
)
"""One row per sequence, in their order. `nll_sum` is a sum, the others are means per token, null where nothing was
scored. `completion_token_count` counts the tokens scored, `cut_token_count` those that would have been had the sequence
not been cut, `total_token_count` all tokens that the sequence has, scored or not, read or cut.
"""


@dataclass(frozen=True, slots=True)
class Completions:
    """Token sequences back to back, and what of them is scored; sequence i is `[offsets[i], offsets[i + 1])`.

    `ids` int32 [tokens]; `offsets` int64 [sequences + 1]; `loss` int8 [tokens], 1 where the token itself is scored (not
    shifted); `parts` int8 [tokens], 0 or the number of one of PARTS.
    """

    ids: np.ndarray
    offsets: np.ndarray
    loss: np.ndarray
    parts: np.ndarray

    def __post_init__(self) -> None:
        """Raises ValueError unless all arrays speak of the same tokens."""
        sizes = (len(self.ids), len(self.loss), len(self.parts), int(self.offsets[-1]))
        if len({*sizes}) > 1:
            raise ValueError(f"ids, loss, parts and the last offset speak of {sizes} tokens; they must be as many")

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sequence, int64."""
        return np.diff(self.offsets)


class Scorer(Protocol):
    """An engine: a model, ready to score."""

    def score(self, sequences: Completions, place: Place = ROW) -> pa.Table:
        """A row of SCHEMA for every sequence, in their order; `place` says in errors where a sequence is from.

        Raises NonFiniteError for an NLL that is no number, InputError for tokens that the model does not know, RunError
        when memory runs out.
        """
        ...


@dataclass(frozen=True, slots=True)
class Targets:
    """The tokens to be scored, in order: `places` in the ids, `rows` their sequences, and `positions` in their sequences,
    all int64 [targets]; `bounds` int64 [sequences + 1], where the targets of each sequence begin.
    """

    places: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    bounds: np.ndarray

    @property
    def reach(self) -> np.ndarray:
        """How many tokens of each sequence a model must read to score all its targets, int64: 0 where there are none."""
        last = np.append(self.positions, 0)[np.maximum(self.bounds[1:] - 1, 0)]
        return np.where(np.diff(self.bounds) > 0, last, 0)


def targets_of(sequences: Completions, limit: int | None) -> Targets:
    """What a model that reads at most `limit` tokens of a sequence (None: any number) can score of what is wanted."""
    places = np.flatnonzero(sequences.loss)
    rows = np.searchsorted(sequences.offsets, places, side="right") - 1
    positions = places - sequences.offsets[rows]
    possible = positions > 0 if limit is None else (positions > 0) & (positions < limit)
    places, rows, positions = places[possible], rows[possible], positions[possible]
    return Targets(places, rows, positions, np.searchsorted(places, sequences.offsets))


def require_known(sequences: Completions, vocabulary_size: int) -> None:
    """Raises InputError unless the model has an embedding for every token."""
    low, high = int(sequences.ids.min(initial=0)), int(sequences.ids.max(initial=0))
    if low < 0 or high >= vocabulary_size:
        raise InputError(
            f"token {low if low < 0 else high} is not among the {vocabulary_size} of the model; score with the tokenizer "
            "that the model was trained with"
        )


def score_table(
    sequences: Completions, targets: Targets, nll: np.ndarray, limit: int | None, place: Place = ROW
) -> pa.Table:
    """The rows of SCHEMA, given the NLL of each target (float32 [targets]). Raises NonFiniteError, naming the row."""
    require_finite(nll, targets.rows, "NLL of a token", place)
    rows = len(sequences.lengths)
    cells = targets.rows * (len(PARTS) + 1) + sequences.parts[targets.places]
    shape = (rows, len(PARTS) + 1)
    counts = np.bincount(cells, minlength=rows * shape[1]).reshape(shape)
    sums = np.bincount(cells, weights=nll, minlength=rows * shape[1]).reshape(shape)
    scored, total = counts.sum(axis=1), sums.sum(axis=1)
    mean = _means(total, scored)
    cut = np.zeros(rows, np.bool_) if limit is None else sequences.lengths > limit
    columns = [
        _null_without(scored, total), _null_without(scored, mean),
        _null_without(scored, np.exp(np.minimum(mean, MOST_PERPLEXING))),
        *(_null_without(counts[:, part], _means(sums[:, part], counts[:, part])) for part in range(1, shape[1])),
        scored, *(counts[:, part] for part in range(1, shape[1])), sequences.lengths,
        _wanted(sequences) - scored, cut,
    ]  # fmt: skip
    return pa.table([pa.array(each).cast(field.type) for each, field in zip(columns, SCHEMA, strict=True)], SCHEMA)


def _wanted(sequences: Completions) -> np.ndarray:
    """How many tokens of each sequence are to be scored, without a limit, int64 [sequences]."""
    places = targets_of(sequences, None).bounds
    return np.diff(places)


def _means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return sums / np.maximum(counts, 1)


def _null_without(counts: np.ndarray, values: np.ndarray) -> pa.Array:
    return pa.array(values, mask=counts == 0)
