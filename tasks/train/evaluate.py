"""Evaluate a model: perplexity on held-out documents by source, and greedy continuations.

The model is a folder in Hugging Face's format, scored by the engine of `tasks/score`, so perplexity here and NLL there agree.
Each held-out document is read once, from its beginning. Cost: a forward pass; a million tokens under 8 billion weights take
half a minute on an H100 at half of its peak.

Perplexity does not show how a model generates: it may loop, never end, or write nothing like its data. Greedy decoding repeats
exactly, but shows loops earlier than sampling would. Each new token reads all weights once: 32 tokens of a billion
bfloat16 weights move 64 GB, about 30 ms at 2 TB/s.

`python -m tokenmill.tasks.train.evaluate REQUEST.json` runs as a separate process, which frees the GPU when it ends.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.score.models import CausalScorer, load
from tokenmill.tasks.score.nll import Completions, targets_of
from tokenmill.tasks.score.weights import find_model
from tokenmill.tasks.tokenize.vocabulary import Vocabulary
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, PreTrainedModel

from .events import run_request
from .held_out import held_out
from .job import Evaluation, TrainData
from .orphans import die_with_parent
from .prepared import vocabulary_of
from .results import Continuation, HeldOutLoss, ResultInputs, Results, SourceResult, loss_of, publish_results, total
from .settings import EvaluateSettings

GRAM = 4  # tokens per n-gram when repetition is counted


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a document, or a given prompt, which has neither dataset nor continuation."""

    dataset: str | None
    prompt: np.ndarray  # int32 [tokens]
    continuation: np.ndarray | None  # the document's own, int32 [tokens]


class OpeningSample:
    """A uniform random sample of `number` documents, of which it keeps the beginnings.

    A beginning is the first `prompt_tokens` tokens of a document, or half of a short one; with None, everything before the
    first scored token. The choice depends on `seed` and the order of documents, not on batches.
    """

    def __init__(self, dataset: str, number: int, prompt_tokens: int | None, new_tokens: int, seed: int) -> None:
        self._dataset, self._number, self._sizes = dataset, number, (prompt_tokens, new_tokens)
        self._generator = np.random.default_rng(seed)
        self._kept: list[tuple[float, Opening]] = []

    def add(self, documents: Completions) -> None:
        """Sample from more documents."""
        lots = self._generator.random(len(documents.lengths))
        targets = targets_of(documents, None)
        possible = np.flatnonzero(np.diff(targets.bounds))
        chosen = possible[np.argsort(lots[possible])][: self._number]
        first = targets.positions[targets.bounds[chosen]]
        prompt_tokens, new_tokens = self._sizes
        for row, answer in zip(chosen.tolist(), first.tolist(), strict=True):
            ids = documents.ids[documents.offsets[row] : documents.offsets[row + 1]]
            end = answer if prompt_tokens is None else max(1, min(prompt_tokens, len(ids) // 2))
            # Copies, because a slice would keep the whole batch in memory.
            opening = Opening(self._dataset, ids[:end].copy(), ids[end : end + new_tokens].copy())
            self._kept.append((float(lots[row]), opening))
        self._kept = sorted(self._kept, key=lambda each: each[0])[: self._number]

    @property
    def chosen(self) -> list[Opening]:
        return [opening for _, opening in self._kept]


def evaluate(model: str, data: TrainData, settings: EvaluateSettings) -> Results:
    """Evaluate the model in the folder `model` on the held-out documents of `data`.

    Raises InputError for a folder without a causal language model, and for data without held-out documents or from a different
    vocabulary; RunError when the model's outputs are not finite or memory runs out.
    """
    vocabulary = vocabulary_of(data)
    asked = given(settings.prompts, vocabulary) if settings.prompts else []
    files = find_model(model)
    digest = files.digest()
    loaded = load(AutoModelForCausalLM, files, settings.device, settings.precision)
    scorer = CausalScorer(loaded, token_budget=settings.token_budget)
    losses: defaultdict[str, list[HeldOutLoss]] = defaultdict(list)
    samples: dict[str, OpeningSample] = {}
    # A conversation's prompt is everything before its first answer; a document's is its first tokens.
    prompt_tokens = settings.prompt_tokens if data.kind == "pretrain" else None
    for dataset, documents in held_out(data, settings.split, settings.max_tokens):
        first = 1 + sum(loss.documents for loss in losses[dataset])
        scores = scorer.score(documents, partial(_place, dataset, settings.split, first))
        tokens, cut, truncated = (
            int(scores[name].to_numpy().sum(dtype=np.int64))
            for name in ("completion_token_count", "cut_token_count", "truncated")
        )
        nll = float(scores["nll_sum"].fill_null(0.0).to_numpy().sum())
        losses[dataset].append(
            loss_of(documents=scores.num_rows, tokens=tokens, nll=nll, truncated=truncated, cut_tokens=cut)
        )
        sample = OpeningSample(dataset, settings.documents, prompt_tokens, settings.new_tokens, settings.seed)
        samples.setdefault(dataset, sample).add(documents)
    sources = [SourceResult(dataset=dataset, **total(each).model_dump()) for dataset, each in losses.items()]
    openings = asked or [opening for sample in samples.values() for opening in sample.chosen]
    return Results(
        model=model, data=data.path, made_from=ResultInputs(model=digest, data=data.made_from), settings=settings,
        precision=str(loaded.dtype).removeprefix("torch."), limit=scorer.limit, overall=total(sources),
        sources=sources, generations=list(generations(loaded, openings, vocabulary, data.eos, settings.new_tokens)),
    )  # fmt: skip


def _place(dataset: str, split: str, first: int, row: int) -> str:
    return f"{dataset}: document {first + row} of split {split}"


def given(prompts: Sequence[str], vocabulary: Vocabulary) -> list[Opening]:
    """Texts as prompts, with control strings as ordinary text. Raises InputError for a text without tokens."""
    tokens = vocabulary.reference(True).encode(pa.array(prompts, pa.large_string()))
    for text, length in zip(prompts, tokens.lengths.tolist(), strict=True):
        if not length:
            raise InputError(f"prompts: {text!r} doesn't have tokens; give some text to continue")
    ids = np.split(tokens.ids.astype(np.int32), tokens.offsets[1:-1])
    return [Opening(None, each, None) for each in ids]


def generations(
    model: PreTrainedModel, openings: Sequence[Opening], vocabulary: Vocabulary, eos: int | None, new_tokens: int
) -> Iterator[Continuation]:
    """Continue beginnings greedily until `eos`, for at most `new_tokens`; a prompt too long for the model loses its start.

    Raises RunError for logits that are not finite.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = new_tokens if limit is None else max(1, min(new_tokens, limit - 1))
    # The folder's own defaults for sampling, penalties and length must not apply.
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=longest, eos_token_id=eos, pad_token_id=0 if eos is None else eos
    )
    for opening in openings:
        prompt = opening.prompt if limit is None else opening.prompt[-max(1, limit - longest) :]
        given_ids = torch.from_numpy(prompt.astype(np.int64)).to(model.device)[None]
        with torch.inference_mode():
            found = cast("Any", model).generate(  # a mixin's method without a useful type
                given_ids,
                attention_mask=torch.ones_like(given_ids),
                logits_processor=[_OnlyVocabulary(vocabulary.size)],
            )
        ids, own = found[0, len(prompt) :].cpu().numpy(), opening.continuation
        repeated = matched = None
        if len(ids) >= GRAM:
            grams = np.lib.stride_tricks.sliding_window_view(ids, GRAM)
            repeated = 1 - len(np.unique(grams, axis=0)) / len(grams)
        if own is not None:
            both = min(len(ids), len(own))
            matched = int(np.count_nonzero(ids[:both] == own[:both])) / len(own)
        yield Continuation(
            dataset=opening.dataset, prompt=_text(vocabulary, prompt), text=_text(vocabulary, ids), tokens=len(ids),
            ended=None if eos is None else bool(ids[-1] == eos), repeated=repeated, matched=matched,
        )  # fmt: skip


class _OnlyVocabulary(LogitsProcessor):
    """Excludes the output layer's rows beyond the vocabulary."""

    def __init__(self, vocabulary_size: int) -> None:
        self._size = vocabulary_size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not bool(torch.isfinite(scores).all()):
            raise RunError(
                f"the logits after {input_ids.shape[1]} tokens are not finite; the weights are damaged or overflow in "
                "this precision: check the model, or compute in float32"
            )
        scores[:, self._size :] = -torch.inf
        return scores


def _text(vocabulary: Vocabulary, ids: np.ndarray) -> str:
    """Return ids as text, or as numbers if an encoding lacks such an id."""
    try:
        return vocabulary.decode(ids.tolist())
    except KeyError:
        return f"token ids {ids.tolist()}"


def main() -> int:
    """Run the evaluation in the file that the command line names, publish the results, and return the exit code."""
    die_with_parent()

    def run(asked: Evaluation) -> None:
        began = time.perf_counter()
        results = evaluate(asked.model, asked.data, asked.settings)
        publish_results(results, asked.output_dir, {"seconds": time.perf_counter() - began})

    return run_request(Evaluation, run)


if __name__ == "__main__":
    sys.exit(main())
