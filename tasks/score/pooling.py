"""Embeddings by any model of `transformers` that returns hidden states.

`last` takes the hidden state of the last token, the only one that sees the whole text in a causal model. Such models are
trained with an end token there, so one is appended unless the tokenizer adds it. `mean` averages the hidden states of all
tokens, as encoders are trained. The model card says which one applies.

Texts are tokenized together, sorted by length, and padded at the end under an attention mask. Weights and hidden states are
bfloat16 on CUDA and float32 on a CPU; pooling is always float32.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from tokenmill.tasks.errors import InputError, RunError
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from . import TOKEN_BUDGET
from .batches import batches, padded
from .embed import unit_vectors, wanted_dimensions
from .loading import load
from .settings import MAX_TOKENS, Pooling, Precision
from .weights import ModelFiles


def load_embedder(
    files: ModelFiles,
    pooling: Pooling,
    dimensions: int | None = None,
    max_tokens: int = MAX_TOKENS,
    token_budget: int = TOKEN_BUDGET,
    device: str | None = None,
    precision: Precision | None = None,
) -> "PoolingEmbedder":
    """Load the model in `files` and its tokenizer. Errors as in `load` and `PoolingEmbedder`."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(files.folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"model: the tokenizer of {files.name!r} cannot be loaded: {' '.join(str(error).split())}"
        ) from error
    model = load(AutoModel, files, device, precision)
    return PoolingEmbedder(model, tokenizer, pooling, dimensions, max_tokens, token_budget)


class PoolingEmbedder:
    """Embeds with a loaded model and tokenizer.

    Raises InputError for more dimensions than the model has, and for `last` with a tokenizer that has no end token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,  # noqa: ANN401 - transformers' tokenizers share no useful type
        pooling: Pooling,
        dimensions: int | None = None,
        max_tokens: int = MAX_TOKENS,
        token_budget: int = TOKEN_BUDGET,
    ) -> None:
        text = model.config.get_text_config()
        self._model, self._tokenizer, self._pooling, self._budget = model, tokenizer, pooling, token_budget
        self.dimensions = wanted_dimensions(dimensions, int(text.hidden_size))
        self._end = _missing_end(tokenizer) if pooling == "last" else []
        self.max_tokens: int = min([max_tokens, *_limits(model, tokenizer)])

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """See Embedder. Raises InputError for a text without tokens."""
        ids, offsets = self._tokens(texts, self.max_tokens)
        lengths = np.diff(offsets)
        if not lengths.all():
            raise InputError(f"text {int(np.argmin(lengths))} has no tokens; leave out empty texts")
        vectors = np.empty((len(texts), self.dimensions), np.float32)
        for rows in batches(lengths, self._budget):
            vectors[rows] = self._pooled(padded(ids, offsets[rows], lengths[rows]), lengths[rows])
        return vectors

    def token_counts(self, texts: Sequence[str]) -> np.ndarray:
        """See Embedder; special tokens included."""
        return np.diff(self._tokens(texts, None)[1]).astype(np.int32)

    def _tokens(self, texts: Sequence[str], limit: int | None) -> tuple[np.ndarray, np.ndarray]:
        """The ids of texts back to back, int64, and their offsets, int64 [texts + 1]."""
        if not texts:
            return np.empty(0, np.int64), np.zeros(1, np.int64)
        length = None if limit is None else limit - len(self._end)
        found = self._tokenizer(
            list(texts), truncation=limit is not None, max_length=length, return_attention_mask=False
        )
        rows = [np.asarray([*ids, *self._end], np.int64) for ids in found["input_ids"]]
        return np.concatenate(rows), np.cumsum([0, *map(len, rows)])

    @torch.inference_mode()
    def _pooled(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The vectors of the texts of a batch, float32 [texts, dimensions]."""
        device = self._model.device
        ends = torch.from_numpy(lengths).to(device)[:, None]
        mask = torch.arange(ids.shape[1], device=device) < ends
        try:
            states = self._model(torch.from_numpy(ids).to(device), attention_mask=mask.long()).last_hidden_state
            if self._pooling == "last":
                pooled = states[torch.arange(len(ids), device=device), ends[:, 0] - 1].float()
            else:
                pooled = torch.where(mask[:, :, None], states.float(), 0).sum(dim=1) / ends
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"memory ran out on {ids.shape[0]} texts of up to {ids.shape[1]} tokens; lower token_budget "
                f"({self._budget}) or max_tokens, or use a GPU with more memory"
            ) from error
        return unit_vectors(pooled.cpu().numpy(), self.dimensions)


def _limits(model: PreTrainedModel, tokenizer: Any) -> list[int]:  # noqa: ANN401 - see PoolingEmbedder
    """The limits on the length of a text: the model's positions, and the tokenizer's maximum length."""
    positions = _counted_from_padding(model) or getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return [int(each) for each in (positions, getattr(tokenizer, "model_max_length", None)) if each]


def _counted_from_padding(model: PreTrainedModel) -> int | None:
    """The longest text of a model whose positions start after the padding id, as RoBERTa's do; None for other models.

    The configuration of such a model states the size of its position table, which is larger.
    """
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    counts = [
        table.num_embeddings - table.padding_idx - 1
        for table in tables
        if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None
    ]
    return min(counts, default=None)


def _missing_end(tokenizer: Any) -> list[int]:  # noqa: ANN401 - see PoolingEmbedder
    """The end token; none if the tokenizer appends one itself."""
    ids, bare = (cast("list[int]", tokenizer("a", add_special_tokens=each)["input_ids"]) for each in (True, False))
    if ids[len(ids) - len(bare) :] != bare:
        return []
    if tokenizer.eos_token_id is None:
        raise InputError(
            "pooling=last needs an end token, and the model's tokenizer has no eos_token; use pooling=mean if the "
            "model was trained with it, or set eos_token in tokenizer_config.json"
        )
    return [int(tokenizer.eos_token_id)]
