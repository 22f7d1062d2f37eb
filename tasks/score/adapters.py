"""Other programs that run models, behind the same interfaces, where they are installed.

They are adapters and nothing more: batching, precision and speed are theirs. The one for sentence-transformers is held
against version 6.2. Those for vLLM and SGLang are written to their documented interfaces and have never been run
with either: compare a hundred rows with the engine `transformers` before a large run.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa

from .batches import TOKEN_BUDGET, batches
from .embed import MAX_TOKENS, unit_vectors, wanted_dimensions
from .finite import ROW, Place
from .nll import Completions, Targets, require_known, score_table, targets_of
from .weights import ModelFiles


class VllmScorer:
    """NLL by vLLM: the log-probability of each token of a prompt, as it reports it.

    vLLM makes an object for every token, some microseconds each, and must generate one token behind every prompt, so that
    it reads one token less than the model.
    """

    def __init__(
        self, vllm: ModuleType, files: ModelFiles, *, max_length: int | None = None, token_budget: int = TOKEN_BUDGET
    ) -> None:
        self._engine: Any = vllm.LLM(
            model=str(files.folder), trust_remote_code=False, skip_tokenizer_init=True, enable_prefix_caching=False
        )
        self._parameters: Any = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        config = self._engine.llm_engine.model_config
        self._vocabulary_size, self._budget = int(config.get_vocab_size()), token_budget
        readable = int(config.max_model_len) - 1
        self.limit = readable if max_length is None else min(max_length, readable)

    def score(self, sequences: Completions, place: Place = ROW) -> pa.Table:
        """See Scorer."""
        require_known(sequences, self._vocabulary_size)
        targets = targets_of(sequences, self.limit)
        nll = np.empty(len(targets.places), np.float32)
        for rows in batches(targets.reach, self._budget):
            self._fill(nll, sequences, targets, rows)
        return score_table(sequences, targets, nll, self.limit, place)

    def _fill(self, nll: np.ndarray, sequences: Completions, targets: Targets, rows: np.ndarray) -> None:
        """Put the NLL of the targets of `rows` in place."""
        spans = zip(sequences.offsets[rows].tolist(), targets.reach[rows].tolist(), strict=True)
        prompts = [{"prompt_token_ids": sequences.ids[start : start + reach + 1].tolist()} for start, reach in spans]
        found = self._engine.generate(prompts, self._parameters, use_tqdm=False)
        for row, prompt, output in zip(rows.tolist(), prompts, found, strict=True):
            chosen = slice(*targets.bounds[row : row + 2].tolist())
            positions = targets.positions[chosen].tolist()
            nll[chosen] = [
                -output.prompt_logprobs[each][prompt["prompt_token_ids"][each]].logprob for each in positions
            ]


class SentenceTransformersEmbedder:
    """Embeddings by sentence-transformers, pooled as the model's own modules say."""

    def __init__(
        self,
        sentence_transformers: ModuleType,
        files: ModelFiles,
        *,
        dimensions: int | None = None,
        max_tokens: int = MAX_TOKENS,
        device: str | None = None,
    ) -> None:
        self._model: Any = sentence_transformers.SentenceTransformer(
            str(files.folder), trust_remote_code=False, local_files_only=True, device=device
        )
        readable = _readable(files, max_tokens)
        self.max_tokens: int = min(readable, self._model.max_seq_length or readable)
        self._model.max_seq_length = self.max_tokens
        self._dimensions = wanted_dimensions(dimensions, self._encoded(["a"]).shape[1])

    @property
    def dimensions(self) -> int:
        """See Embedder."""
        return self._dimensions

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """See Embedder."""
        found = self._encoded(texts) if texts else np.empty((0, self._dimensions), np.float32)
        return unit_vectors(found, self._dimensions)

    def token_counts(self, texts: Sequence[str]) -> np.ndarray:
        """See Embedder."""
        return _token_counts(self._model.tokenizer, texts)

    def _encoded(self, texts: Sequence[str]) -> np.ndarray:
        return np.asarray(self._model.encode(list(texts), convert_to_numpy=True, show_progress_bar=False), np.float32)


class SglangEmbedder:
    """Embeddings by SGLang, pooled as it does for the model. A text too long is cut by it, and its end token with it."""

    def __init__(
        self, sglang: ModuleType, files: ModelFiles, *, dimensions: int | None = None, max_tokens: int = MAX_TOKENS
    ) -> None:
        self.max_tokens: int = _readable(files, max_tokens)
        self._engine: Any = sglang.Engine(
            model_path=str(files.folder), is_embedding=True, trust_remote_code=False, context_length=self.max_tokens,
            allow_auto_truncate=True,
        )  # fmt: skip
        self._dimensions = wanted_dimensions(dimensions, self._encoded(["a"]).shape[1])

    @property
    def dimensions(self) -> int:
        """See Embedder."""
        return self._dimensions

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """See Embedder."""
        found = self._encoded(texts) if texts else np.empty((0, self._dimensions), np.float32)
        return unit_vectors(found, self._dimensions)

    def token_counts(self, texts: Sequence[str]) -> np.ndarray:
        """See Embedder."""
        return _token_counts(self._engine.tokenizer_manager.tokenizer, texts)

    def _encoded(self, texts: Sequence[str]) -> np.ndarray:
        return np.asarray([each["embedding"] for each in self._engine.encode(list(texts))], np.float32)


def _readable(files: ModelFiles, max_tokens: int) -> int:
    """`max_tokens`, or as many as the model says it reads, whichever is less."""
    config = orjson.loads((files.folder / "config.json").read_bytes())
    text = config.get("text_config") or config
    return min(max_tokens, int(text.get("max_position_embeddings") or max_tokens))


def _token_counts(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:  # noqa: ANN401 - transformers' tokenizers share no useful type
    found = tokenizer(list(texts), truncation=False, return_attention_mask=False)["input_ids"]
    return np.asarray([len(ids) for ids in cast("list[list[int]]", found)], np.int32)
