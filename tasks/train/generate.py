"""A small check of what a model writes: greedy continuations, and what can be counted of them.

Perplexity is measured on text that others wrote and hides what a model does on its own: loop, never end, or write
nothing that fits its data. Always taking the likeliest token makes the check repeat exactly, at the price that loops
show up earlier than they would with sampling. Nothing here is a benchmark of what a model can do.

Prompts are taken one at a time, and each new token reads all weights once: 32 of them, of a model of a billion
bfloat16 weights, move 64 GB, some 30 ms where memory gives 2 TB/s.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.score.nll import Completions, targets_of
from tokenmill.tasks.tokenize.vocabulary import Vocabulary
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from .results import Generation

GRAM = 4
"""Tokens of a run that counts as repeated when it comes again."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a text: `prompt` int32 [tokens], and what follows it in the document, int32 [tokens], None for
    a text that was given.
    """

    dataset: str | None
    prompt: np.ndarray
    continuation: np.ndarray | None


class Openings:
    """Chooses, of the documents that pass, `number` at random, every one as likely, and keeps their beginnings.

    The first `prompt_tokens` tokens of a document are its beginning (half of it where it is short); None takes all before
    the first token that is scored. The choice depends on `seed` and the order of documents, not on batches.
    """

    def __init__(self, dataset: str, number: int, prompt_tokens: int | None, new_tokens: int, seed: int) -> None:
        self._dataset, self._number, self._sizes = dataset, number, (prompt_tokens, new_tokens)
        self._generator = np.random.default_rng(seed)
        self._kept: list[tuple[float, Opening]] = []

    def add(self, documents: Completions) -> None:
        """Let some more documents pass."""
        lots = self._generator.random(len(documents.lengths))
        targets = targets_of(documents, None)
        possible = np.flatnonzero(np.diff(targets.bounds))
        chosen = possible[np.argsort(lots[possible])][: self._number]
        first = targets.positions[targets.bounds[chosen]]
        drawn = [
            (float(lots[row]), self._opening(documents, row, answer))
            for row, answer in zip(chosen.tolist(), first.tolist(), strict=True)
        ]
        self._kept = sorted([*self._kept, *drawn], key=lambda each: each[0])[: self._number]

    @property
    def chosen(self) -> list[Opening]:
        """The beginnings of the documents that were chosen so far."""
        return [opening for _, opening in self._kept]

    def _opening(self, documents: Completions, row: int, answer: int) -> Opening:
        ids = documents.ids[documents.offsets[row] : documents.offsets[row + 1]]
        prompt_tokens, new_tokens = self._sizes
        end = answer if prompt_tokens is None else max(1, min(prompt_tokens, len(ids) // 2))
        return Opening(self._dataset, ids[:end].copy(), ids[end : end + new_tokens].copy())


def given(prompts: Sequence[str], vocabulary: Vocabulary) -> list[Opening]:
    """Texts as prompts; control strings in them are ordinary text. Raises InputError for a text of no tokens."""
    tokens = vocabulary.reference(True).encode(pa.array(prompts, pa.large_string()))
    for text, length in zip(prompts, tokens.lengths.tolist(), strict=True):
        if not length:
            raise InputError(f"prompts: {text!r} has no tokens; give some text to be continued")
    ids = np.split(tokens.ids.astype(np.int32), tokens.offsets[1:-1])
    return [Opening(None, each, None) for each in ids]


def generations(
    model: PreTrainedModel, openings: Sequence[Opening], vocabulary: Vocabulary, eos: int | None, new_tokens: int
) -> Iterator[Generation]:
    """The greedy continuations of some beginnings, of `new_tokens` at most or until `eos`.

    Where a prompt and its continuation are more than the model reads, the prompt is cut before. Raises RunError for
    logits that are no numbers.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = new_tokens if limit is None else max(1, min(new_tokens, limit - 1))
    # What a model's folder says of sampling, penalties and length must not decide here.
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=room, eos_token_id=eos, pad_token_id=0 if eos is None else eos
    )
    for opening in openings:
        prompt = opening.prompt if limit is None else opening.prompt[-max(1, limit - room) :]
        yield _generation(opening, prompt, _continued(model, prompt, vocabulary.size), vocabulary, eos)


@torch.inference_mode()
def _continued(model: PreTrainedModel, prompt: np.ndarray, vocabulary_size: int) -> np.ndarray:
    """The ids that follow `prompt`, int64 [tokens]."""
    ids = torch.from_numpy(prompt.astype(np.int64)).to(model.device)[None]
    # A generic method of a mixin, whose types say nothing of what it gives.
    found = cast("Any", model).generate(
        ids, attention_mask=torch.ones_like(ids), logits_processor=[_Known(vocabulary_size)]
    )
    return found[0, len(prompt) :].cpu().numpy()


class _Known(LogitsProcessor):
    """Leaves the tokens of the vocabulary alone: the rows that a matrix has beyond them stand for none."""

    def __init__(self, vocabulary_size: int) -> None:
        self._size = vocabulary_size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See LogitsProcessor."""
        if not bool(torch.isfinite(scores).all()):
            raise RunError(
                f"the logits after {input_ids.shape[1]} tokens are no numbers; the weights are damaged or overflow in "
                "this precision: check the model, or compute in float32"
            )
        scores[:, self._size :] = -torch.inf
        return scores


def _generation(
    opening: Opening, prompt: np.ndarray, ids: np.ndarray, vocabulary: Vocabulary, eos: int | None
) -> Generation:
    return Generation(
        dataset=opening.dataset,
        prompt=_text(vocabulary, prompt),
        text=_text(vocabulary, ids),
        tokens=len(ids),
        ended=None if eos is None else bool(ids[-1] == eos),
        repeated=_repeated(ids),
        matched=None if opening.continuation is None else _matched(ids, opening.continuation),
    )


def _text(vocabulary: Vocabulary, ids: np.ndarray) -> str:
    """Ids as text; numbers that an encoding leaves out are spelled as such."""
    try:
        return vocabulary.decode(ids.tolist())
    except KeyError:
        return f"token ids {ids.tolist()}"


def _repeated(ids: np.ndarray) -> float | None:
    if len(ids) < GRAM:
        return None
    grams = np.lib.stride_tricks.sliding_window_view(ids, GRAM)
    return 1 - len(np.unique(grams, axis=0)) / len(grams)


def _matched(ids: np.ndarray, own: np.ndarray) -> float:
    """The share of the document's own tokens that the model wrote as well, at the same places."""
    both = min(len(ids), len(own))
    return int(np.count_nonzero(ids[:both] == own[:both])) / len(own)
