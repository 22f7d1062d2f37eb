"""Evaluation: the perplexity of a model on held-out documents, source by source, and a look at what it writes.

The model is a folder as Hugging Face's libraries read it, whoever trained it; it is scored by the engine of
`tasks/score`, so that a perplexity here and the NLL of candidates there are the same measure. Each held-out document is
read once, from its beginning. Cost: a forward pass; a million tokens under 8 billion weights take half a minute on an H100
at half of its peak.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.score.causal import CausalScorer
from tokenmill.tasks.score.loading import load
from tokenmill.tasks.score.weights import find_model
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary
from transformers import AutoModelForCausalLM

from .evaluation_settings import EvaluateSettings
from .generate import Openings, generations, given
from .held_out import held_out
from .job import TrainData
from .results import MadeFrom, Results, SourceResult, overall, perplexity


@dataclass(slots=True)
class _Tally:
    """What was found of a data set so far."""

    documents: int = 0
    tokens: int = 0
    nll: float = 0.0
    truncated: int = 0
    cut_tokens: int = 0

    def add(self, scores: pa.Table) -> None:
        """Count some more documents; `scores` is of `tasks.score.nll.SCHEMA`."""
        counts = {name: scores[name].to_numpy() for name in ("completion_token_count", "truncated", "cut_token_count")}
        self.documents += scores.num_rows
        self.tokens += int(counts["completion_token_count"].sum(dtype=np.int64))
        self.nll += float(scores["nll_sum"].fill_null(0.0).to_numpy().sum())
        self.truncated += int(np.count_nonzero(counts["truncated"]))
        self.cut_tokens += int(counts["cut_token_count"].sum(dtype=np.int64))

    def result(self, dataset: str) -> SourceResult:
        """What it comes to."""
        return SourceResult(
            dataset=dataset, documents=self.documents, tokens=self.tokens, nll=self.nll,
            perplexity=perplexity(self.nll, self.tokens), truncated=self.truncated, cut_tokens=self.cut_tokens,
        )  # fmt: skip


def evaluate(model: str, data: TrainData, settings: EvaluateSettings) -> Results:
    """What the model in the folder `model` says of the held-out documents of `data`.

    Raises InputError for a folder that holds no causal language model, for data without held-out documents or of another
    vocabulary, and RunError where the model's numbers are none or memory runs out.
    """
    vocabulary = _vocabulary(data)
    asked = given(settings.prompts, vocabulary) if settings.prompts else []
    files = find_model(model)
    digest = files.digest()
    loaded = load(AutoModelForCausalLM, files, settings.device, settings.precision)
    scorer = CausalScorer(loaded, token_budget=settings.token_budget)
    tallies, openings = _scored(scorer, data, settings)
    chosen = asked or [opening for each in openings for opening in each.chosen]
    sources = [tally.result(dataset) for dataset, tally in tallies.items()]
    return Results(
        model=model,
        data=data.path,
        made_from=MadeFrom(model=digest, data=data.made_from),
        settings=settings,
        precision=str(loaded.dtype).removeprefix("torch."),
        limit=scorer.limit,
        overall=overall(sources),
        sources=sources,
        generations=list(generations(loaded, chosen, vocabulary, data.eos, settings.new_tokens)),
    )


def _vocabulary(data: TrainData) -> Vocabulary:
    """The vocabulary that the data was prepared with."""
    vocabulary = find_vocabulary(parse(TokenizerSource, data.tokenizer, "tokenizer"))
    if vocabulary.fingerprint != data.fingerprint:
        raise InputError(
            f"tokenizer.model: {data.tokenizer.get('model')!r} is not what {data.path} was prepared with: its fingerprint "
            f"is {vocabulary.fingerprint}, that of the data {data.fingerprint}; put the old tokenizer back, or prepare again"
        )
    return vocabulary


def _scored(
    scorer: CausalScorer, data: TrainData, settings: EvaluateSettings
) -> tuple[dict[str, _Tally], list[Openings]]:
    """What was found by data set, and the beginnings that are to be continued."""
    tallies: dict[str, _Tally] = {}
    openings: dict[str, Openings] = {}
    prompt_tokens = settings.prompt_tokens if data.kind == "pretrain" else None
    for dataset, documents in held_out(data, settings.split, settings.max_tokens):
        tally = tallies.setdefault(dataset, _Tally())
        tally.add(scorer.score(documents, partial(_place, dataset, settings.split, tally.documents)))
        chooser = openings.setdefault(
            dataset, Openings(dataset, settings.documents, prompt_tokens, settings.new_tokens, settings.seed)
        )
        chooser.add(documents)
    return tallies, list(openings.values())


def _place(dataset: str, split: str, before: int, row: int) -> str:
    return f"{dataset}: document {before + row} of split {split}, counted from 0"
