"""NLL under a causal language model of `transformers`.

Sequences are sorted by length and padded at the end. In a causal model no token sees later ones, so padding needs no attention
mask (which would disable the fast path of attention), and a sequence is read only up to its last scored token. Only the hidden
states that predict a scored token go through the output layer, one chunk at a time: with a vocabulary of 200,000, a row of
logits takes 800 kB in float32, the logits of a batch of 16,384 tokens 13 GB, and a chunk with all intermediate results 0.7 GB.

Both shortcuts are checked on 32 tokens when the model is loaded. A model whose logits depend on later tokens is not causal and
is rejected. If the output layer applied to hidden states differs from what the model returns (some models scale or cap their
logits), the whole model is run, with smaller batches.

Weights and hidden states are bfloat16 on CUDA and float32 on a CPU; log-probabilities are always float32. In float32, NLL
depends on batches by less than 1e-5, but its last bits do, so the token budget is part of a shard's identity.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
import pyarrow as pa
import torch
from tokenmill.tasks.errors import InputError, RunError
from transformers import AutoModelForCausalLM, PreTrainedModel

from . import TOKEN_BUDGET
from .batches import batches, padded, ranges
from .loading import load
from .nll import Completions, Targets, require_known, score_table, targets_of
from .settings import Precision
from .tables import ROW, Place, require_finite
from .weights import ModelFiles

LOGITS = 1 << 26
"""Logits in memory at once: a quarter of a gigabyte in float32."""

PROBE = 32
"""The number of tokens used to check a model."""

Head = Callable[[torch.Tensor], torch.Tensor]


def load_scorer(
    files: ModelFiles,
    max_length: int | None = None,
    token_budget: int = TOKEN_BUDGET,
    device: str | None = None,
    precision: Precision | None = None,
) -> "CausalScorer":
    """Load the model in `files` for scoring. Errors as in `load` and `CausalScorer`."""
    model = load(AutoModelForCausalLM, files, device, precision)
    return CausalScorer(model, max_length=max_length, token_budget=token_budget)


class CausalScorer:
    """Scores sequences with a loaded causal model.

    `limit` is the maximum number of tokens read per sequence: the smaller of `max_length` and the model's limit. Raises
    InputError for a model that is not causal.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_length: int | None = None, token_budget: int = TOKEN_BUDGET
    ) -> None:
        self._model = model
        text = model.config.get_text_config()
        limits = [each for each in (max_length, getattr(text, "max_position_embeddings", None)) if each is not None]
        self.limit: int | None = min(limits, default=None)
        self._vocabulary_size = int(cast("torch.nn.Embedding", model.get_input_embeddings()).weight.shape[0])
        self._head = _checked_head(model, self._vocabulary_size)
        self._budget = token_budget if self._head else min(token_budget, max(1, LOGITS // self._vocabulary_size))

    @property
    def applies_head_itself(self) -> bool:
        """Whether logits are computed only for scored tokens."""
        return self._head is not None

    def score(self, sequences: Completions, place: Place = ROW) -> pa.Table:
        """See Scorer."""
        require_known(sequences, self._vocabulary_size)
        targets = targets_of(sequences, self.limit)
        nll = np.empty(len(targets.places), np.float32)
        for rows in batches(targets.reach, self._budget):
            chosen = ranges(targets.bounds[rows], np.diff(targets.bounds)[rows])
            nll[chosen] = self._scored(sequences, targets, rows, chosen)
            require_finite(nll[chosen], targets.rows[chosen], "NLL of a token", place)
        return score_table(sequences, targets, nll, self.limit, place)

    def _scored(self, sequences: Completions, targets: Targets, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """The NLL of the targets `chosen`, which are in the sequences `rows`, float32."""
        lengths = targets.reach[rows]
        ids = padded(sequences.ids, sequences.offsets[rows], lengths)
        line = np.repeat(np.arange(len(rows)), np.diff(targets.bounds)[rows])
        before = line * ids.shape[1] + targets.positions[chosen] - 1
        wanted = sequences.ids[targets.places[chosen]].astype(np.int64)
        try:
            return self._nll(*(torch.from_numpy(each).to(self._model.device) for each in (ids, before, wanted)))
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"memory ran out on {ids.shape[0]} sequences of up to {ids.shape[1]} tokens; lower token_budget "
                f"({self._budget}) or max_length, or use a GPU with more memory"
            ) from error

    @torch.inference_mode()
    def _nll(self, ids: torch.Tensor, before: torch.Tensor, wanted: torch.Tensor) -> np.ndarray:
        """The NLL of the tokens `wanted`, each predicted at the index `before` in the flattened `ids`."""
        if self._head:
            states = self._model.base_model(ids, use_cache=False).last_hidden_state
        else:
            states = self._model(ids, use_cache=False).logits
        states, head = states.flatten(0, 1), self._head or torch.nn.Identity()
        size = max(1, LOGITS // self._vocabulary_size)
        found = [
            torch.nn.functional.cross_entropy(head(states[places]).float(), targets, reduction="none")
            for places, targets in zip(before.split(size), wanted.split(size), strict=True)
        ]
        return torch.cat(found).cpu().numpy()


@torch.inference_mode()
def _checked_head(model: PreTrainedModel, vocabulary_size: int) -> Head | None:
    """The output layer of `model`, or None if it does not return the model's logits when applied to hidden states.

    Raises InputError for a model that is not causal.
    """
    ids = torch.arange(1, PROBE + 1, device=model.device)[None] * 7919 % vocabulary_size
    other = ids.clone()
    other[:, PROBE // 2 :] = (other[:, PROBE // 2 :] + 1) % vocabulary_size
    logits, given = _logits(model, ids)
    if not _close(_logits(model, other)[0][:, : PROBE // 2], logits[:, : PROBE // 2], model.dtype):
        raise InputError(
            f"model: {type(model).__name__} is not causal: its predictions depend on later tokens; use a causal language model"
        )
    head, states = cast("Head | None", model.get_output_embeddings()), _hidden(model, ids)
    if head is None or given is None or states is None or not _close(states, given, model.dtype):
        return None
    return head if torch.equal(head(given).float(), logits.float()) else None


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits of `ids`, and the input of the output layer, or None if it was not called."""
    given: list[torch.Tensor] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0])) if head else None
    logits = model(ids, use_cache=False).logits
    if hook:
        hook.remove()
    return logits, given[0] if given else None


def _hidden(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor | None:
    """The hidden states of `ids`, or None if the model does not return them."""
    if model.base_model is model:
        return None
    return getattr(model.base_model(ids, use_cache=False), "last_hidden_state", None)


def _close(some: torch.Tensor, others: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether both are equal up to rounding in `dtype`. NaN passes; the check of scores finds it."""
    if some.shape != others.shape:
        return False
    some, others = some.float().nan_to_num(), others.float().nan_to_num()
    return bool((some - others).abs().max() <= 4 * torch.finfo(dtype).eps * others.abs().max())
