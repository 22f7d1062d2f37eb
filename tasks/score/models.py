"""Models of `transformers`: NLL under a causal language model, and embeddings by any model that returns hidden states.

Sequences are sorted by length, longest first, so that padding is below 1 % of the computation and a model that doesn't fit fails
at once. A batch holds at most a budget of tokens, padding included. When memory runs out, the batch is tried again at half the
budget, which then holds for the rest of the process.

Weights and hidden states are bfloat16 on CUDA and float32 on a CPU; log-probabilities and pooling are always float32. In
float32, NLL depends on batches by less than 1e-5, but its last bits do, so the token budget is part of a shard's identity.

**NLL.** In a causal model tokens don't see later ones, so padding doesn't need an attention mask (which would disable the fast path of
attention), and a sequence is read only up to its last scored token. Only the hidden states that predict a scored token go
through the output layer, one chunk at a time: with a vocabulary of 200,000, a row of logits takes 800 kB in float32, the logits
of a batch of 16,384 tokens 13 GB, and a chunk with all intermediate results 0.7 GB. Both shortcuts are checked on 32 tokens when
the model is loaded. A model whose logits depend on later tokens isn't causal and is rejected. If the output layer applied to
hidden states differs from the model's output (some models scale or cap their logits), the whole model is run, with smaller
batches.

**Embeddings.** `last` takes the hidden state of the last token, the only one that sees the whole text in a causal model. Such
models are trained with an end token there, so one is appended unless the tokenizer adds it. `mean` averages the hidden states of
all tokens, as encoders are trained. The model card states which one applies.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from tokenmill.tasks.errors import InputError, RunError, pip_install
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from . import TOKEN_BUDGET
from .embed import unit_vectors, wanted_dimensions
from .nll import Completions, ranges, require_known, score_table, targets_of
from .settings import MAX_TOKENS, Pooling, Precision
from .tables import ROW, Place, require_finite
from .weights import ModelFiles


class TokenBatches:
    """Batches of at most `tokens` padded tokens, which are halved when memory runs out."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def run(self, lengths: np.ndarray, compute: Callable[[np.ndarray], None]) -> None:
        """Compute all sequences but empty ones; `compute` gets the indices (int64) of a batch, longest first.

        A sequence longer than the budget is a separate batch. Raises RunError if memory runs out on one sequence.
        """
        left = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
        while len(left):
            longest = int(lengths[left[0]])
            batch = left[: max(1, self.tokens // longest)]
            try:
                compute(batch)
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    raise RunError(
                        f"memory ran out on one sequence of {longest} tokens; lower max_length or max_tokens, or use a GPU with "
                        "more memory"
                    ) from error
                self.tokens = len(batch) // 2 * longest
                continue
            left = left[len(batch) :]


def padded(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the sequences at `starts` in `ids` as rows, int64 [sequences, longest], padded at the end with id 0."""
    rows = np.zeros((len(lengths), int(lengths.max())), np.int64)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = ids[ranges(starts, lengths)]
    return rows


UNUSED = ("pooler.",)  # weights that may be missing, because their output is unused


def load(auto: Any, files: ModelFiles, device: str | None, precision: Precision | None) -> PreTrainedModel:  # noqa: ANN401 - transformers' Auto classes share no type
    """Load the model in `files` with one of the Auto classes, ready for inference.

    By default it runs on a GPU in bfloat16 if there is one, otherwise in float32. Weights pass through main memory on their way
    to a GPU. Raises InputError if the files are not such a model, lack weights, or need a package that is not installed.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted = precision or ("bfloat16" if chosen.type == "cuda" else "float32")
    try:
        model, notes = auto.from_pretrained(
            files.folder, dtype=getattr(torch, wanted), trust_remote_code=False, local_files_only=True,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    except ImportError as error:
        raise InputError(
            f"model: {files.name!r} needs a package that is not installed here: {' '.join(str(error).split())}; install "
            f"it, or all that models are known to need: {pip_install('score')}"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"model: {files.name!r} cannot be loaded: {' '.join(str(error).split())}") from error
    missing = sorted(name for name in cast("Mapping[str, Any]", notes)["missing_keys"] if not name.startswith(UNUSED))
    if missing:
        raise InputError(
            f"model: {files.name!r} lacks {len(missing)} of the weights of a {type(model).__name__}, {missing[0]} among "
            "them; give a checkpoint of the whole model"
        )
    cast("torch.nn.Module", model).to(chosen)
    return cast("PreTrainedModel", model).eval()


LOGITS = 1 << 26  # logits in memory at once: a quarter of a gigabyte in float32
PROBE = 32  # the number of tokens used to check a model

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
        without_head = min(token_budget, max(1, LOGITS // self._vocabulary_size))
        self._batches = TokenBatches(token_budget if self._head else without_head)

    @property
    def applies_head_itself(self) -> bool:
        """Whether logits are computed only for scored tokens."""
        return self._head is not None

    def score(self, sequences: Completions, place: Place = ROW) -> pa.Table:
        require_known(sequences, self._vocabulary_size)
        targets = targets_of(sequences, self.limit)
        nll = np.empty(len(targets.places), np.float32)

        @torch.inference_mode()
        def fill(rows: np.ndarray) -> None:
            chosen = ranges(targets.bounds[rows], np.diff(targets.bounds)[rows])
            padded_ids = padded(sequences.ids, sequences.offsets[rows], targets.reach[rows])
            line = np.repeat(np.arange(len(rows)), np.diff(targets.bounds)[rows])
            # A token is predicted by the state of the token before it; places count in the flattened batch.
            before = line * padded_ids.shape[1] + targets.positions[chosen] - 1
            wanted = sequences.ids[targets.places[chosen]].astype(np.int64)
            ids, before, wanted = (
                torch.from_numpy(each).to(self._model.device) for each in (padded_ids, before, wanted)
            )
            if self._head:
                states = self._model.base_model(ids, use_cache=False).last_hidden_state
            else:
                states = self._model(ids, use_cache=False).logits
            states, head = states.flatten(0, 1), self._head or torch.nn.Identity()
            size = max(1, LOGITS // self._vocabulary_size)  # a chunk of tokens at a time, as logits are large
            found = [
                torch.nn.functional.cross_entropy(head(states[places]).float(), labels, reduction="none")
                for places, labels in zip(before.split(size), wanted.split(size), strict=True)
            ]
            nll[chosen] = torch.cat(found).cpu().numpy()
            require_finite(nll[chosen], targets.rows[chosen], "NLL of a token", place)

        self._batches.run(targets.reach, fill)
        return score_table(sequences, targets, nll, self.limit, place)


@torch.inference_mode()
def _checked_head(model: PreTrainedModel, vocabulary_size: int) -> Head | None:
    """The output layer of `model`, or None if it does not return the model's logits when applied to hidden states.

    Raises InputError for a model that is not causal.
    """
    ids = torch.arange(1, PROBE + 1, device=model.device)[None] * 7919 % vocabulary_size
    other = ids.clone()
    other[:, PROBE // 2 :] = (other[:, PROBE // 2 :] + 1) % vocabulary_size
    layer, given = model.get_output_embeddings(), list[torch.Tensor]()
    hook = layer.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0])) if layer else None
    logits, changed = (model(each, use_cache=False).logits for each in (ids, other))
    if hook:
        hook.remove()
    if not _close(changed[:, : PROBE // 2], logits[:, : PROBE // 2], model.dtype):
        raise InputError(
            f"model: {type(model).__name__} is not causal: its predictions depend on later tokens; use a causal language model"
        )
    head, body = cast("Head | None", layer), model.base_model
    states = None if body is model else getattr(body(ids, use_cache=False), "last_hidden_state", None)
    # The model may change states before its output layer, or logits after it: then the layer alone gives something else.
    if head is None or not given or states is None or not _close(states, given[0], model.dtype):
        return None
    return head if torch.equal(head(given[0]).float(), logits.float()) else None


def _close(some: torch.Tensor, others: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether both are equal up to rounding in `dtype`. NaN passes; the check of scores finds it."""
    if some.shape != others.shape:
        return False
    some, others = some.float().nan_to_num(), others.float().nan_to_num()
    return bool((some - others).abs().max() <= 4 * torch.finfo(dtype).eps * others.abs().max())


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

    Raises InputError for more dimensions than the model has, and for `last` with a tokenizer that lacks an end token.
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
        self._model, self._tokenizer, self._pooling = model, tokenizer, pooling
        self._batches = TokenBatches(token_budget)
        self.dimensions = wanted_dimensions(dimensions, int(text.hidden_size))
        whole, bare = (list[int](tokenizer("a", add_special_tokens=each)["input_ids"]) for each in (True, False))
        self._end: list[int] = []
        if pooling == "last" and whole[len(whole) - len(bare) :] == bare:  # the tokenizer doesn't append an end itself
            if tokenizer.eos_token_id is None:
                raise InputError(
                    "pooling=last needs an end token, and the model's tokenizer lacks an eos_token; use pooling=mean if the "
                    "model was trained with it, or set eos_token in tokenizer_config.json"
                )
            self._end = [int(tokenizer.eos_token_id)]
        # The positions of RoBERTa-like models start after the padding id, so the configuration's number, the size of their
        # position table, is larger than the longest text.
        counted_from_padding = [
            table.num_embeddings - table.padding_idx - 1
            for name, table in model.named_modules()
            if name.endswith("position_embeddings")
            and isinstance(table, torch.nn.Embedding)
            and table.padding_idx is not None
        ]
        positions = min(counted_from_padding, default=None) or getattr(text, "max_position_embeddings", None)
        limits = [int(each) for each in (positions, getattr(tokenizer, "model_max_length", None)) if each]
        self.max_tokens: int = min([max_tokens, *limits])

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """See Embedder. Raises InputError for a text without tokens."""
        ids, offsets = self._tokens(texts, self.max_tokens)
        lengths = np.diff(offsets)
        if not lengths.all():
            raise InputError(f"text {int(np.argmin(lengths))} doesn't have tokens; remove empty texts")
        vectors = np.empty((len(texts), self.dimensions), np.float32)

        @torch.inference_mode()
        def fill(rows: np.ndarray) -> None:
            device = self._model.device
            batch = torch.from_numpy(padded(ids, offsets[rows], lengths[rows])).to(device)
            ends = torch.from_numpy(lengths[rows]).to(device)[:, None]
            mask = torch.arange(batch.shape[1], device=device) < ends
            states = self._model(batch, attention_mask=mask.long()).last_hidden_state
            if self._pooling == "last":
                pooled = states[torch.arange(len(rows), device=device), ends[:, 0] - 1].float()
            else:
                pooled = torch.where(mask[:, :, None], states.float(), 0).sum(dim=1) / ends
            vectors[rows] = unit_vectors(pooled.cpu().numpy(), self.dimensions)

        self._batches.run(lengths, fill)
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
