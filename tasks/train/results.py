"""The artifact `results`: how well a model predicts held-out data, and the digests of model and data.

    OUT/results.json   sealed, to compare models
    OUT/results.md     the same, to read

Perplexity is e to the mean NLL per scored token, in nats, so the overall figure weights sources by their tokens. Perplexities
are comparable only for one vocabulary: longer tokens are fewer, and each is harder to predict.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.kit.parts import Cell, Table, table_lines
from tokenmill.tasks.score.nll import MAX_MEAN_NLL
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.storage import join
from tokenmill.tasks.strict import Strict, parse

from .job import read_sealed
from .settings import EvaluateSettings

RESULTS = "results.json"


class HeldOutLoss(Strict, frozen=True):
    """The loss of a model on documents."""

    documents: int
    tokens: int  # scored ones
    nll: float  # their sum, in nats
    perplexity: float | None  # None without tokens
    truncated: int  # documents longer than the model's limit
    cut_tokens: int  # their tokens that were not scored


class SourceResult(HeldOutLoss, frozen=True):
    """The loss on the held-out documents of a dataset."""

    dataset: str


class Continuation(Strict, frozen=True):
    """A greedy continuation."""

    dataset: str | None  # source of the prompt, None for a given prompt
    prompt: str
    text: str
    tokens: int
    ended: bool | None  # it produced EOS; None if the data has none
    repeated: float | None  # share of repeated 4-grams, None below four tokens
    matched: float | None  # share of tokens equal to the document's at the same positions, None for a given prompt


class ResultInputs(Strict, frozen=True):
    """The digests of the model's files and of the preparation's content."""

    model: str
    data: str


class Results(Strict, frozen=True):
    """The results of an evaluation."""

    model: str
    data: str
    made_from: ResultInputs
    settings: EvaluateSettings
    precision: str  # of the weights
    limit: int | None  # the model's longest input in tokens
    overall: HeldOutLoss
    sources: list[SourceResult]
    generations: list[Continuation]


def perplexity(nll: float, tokens: int) -> float | None:
    """Return the perplexity: e to the mean NLL (a mean above 30 counts as 30); None without tokens."""
    return math.exp(min(nll / tokens, MAX_MEAN_NLL)) if tokens else None


def loss_of(documents: int, tokens: int, nll: float, truncated: int, cut_tokens: int) -> HeldOutLoss:
    """Return a loss with its perplexity."""
    return HeldOutLoss(
        documents=documents, tokens=tokens, nll=nll, perplexity=perplexity(nll, tokens), truncated=truncated,
        cut_tokens=cut_tokens,
    )  # fmt: skip


def total(losses: Sequence[HeldOutLoss]) -> HeldOutLoss:
    """Return the loss over all documents."""
    counts = {
        name: sum(getattr(each, name) for each in losses) for name in ("documents", "tokens", "truncated", "cut_tokens")
    }
    return loss_of(**counts, nll=math.fsum(each.nll for each in losses))


def publish_results(results: Results, output_dir: str, volatile: Mapping[str, Any]) -> str:
    """Write results.md and, last, results.json, and return the path of the latter.

    `volatile` may differ between equal evaluations.
    """
    publish_bytes(join(output_dir, "results.md"), markdown(results).encode())
    document = {"type": "results", **results.model_dump(), "volatile": dict(volatile)}
    return publish_bytes(join(output_dir, RESULTS), sealed(document)).path


def read_results(path: str) -> Results:
    """Return the results in a file or its folder. Raises InputError when it is missing or changed."""
    place = path if path.endswith(".json") else join(path, RESULTS)
    document = read_sealed(place, "evaluate again")
    if document is None:
        raise InputError(f"{place}: no results here; evaluate a model first: tokenmill evaluate")
    if document.pop("type", None) != "results":
        raise InputError(f"{place}: not the results of an evaluation; name the file that tokenmill evaluate wrote")
    document.pop("volatile")
    return parse(Results, document, place)


def artifact_record(results: Results, output_dir: str) -> dict[str, Any]:
    """Return the artifact record of an evaluation, for the next program."""
    whole = results.overall
    record = {
        "path": join(output_dir, RESULTS),
        "type": "results",
        "split": results.settings.split,
        "documents": whole.documents,
        "tokens": whole.tokens,
        "nll": whole.nll,
        "perplexity": whole.perplexity,
        "truncated": whole.truncated,
        "sources": {source.dataset: source.perplexity for source in results.sources},
        "made_from": [
            {"type": "model", "path": results.model, "digest": results.made_from.model},
            {"type": "data", "path": results.data, "digest": results.made_from.data},
        ],
    }
    return {"evaluate": record}


def markdown(results: Results) -> str:
    """Return the results as Markdown."""
    rows = [_row(source.dataset, source) for source in results.sources] + [_row("all", results.overall)]
    columns = ("dataset", "documents", "tokens scored", "NLL per token", "perplexity")
    lines = [
        f"# Perplexity {_number(results.overall.perplexity)} on split {results.settings.split}",
        "",
        f"Model `{results.model}` ({results.made_from.model}), data `{results.data}`, in {results.precision}.",
        "",
        *table_lines(Table("Results", columns, rows)),
        *(f"* {line}" for line in notes(results)),
        "",
    ]
    for generation in results.generations:
        facts = [f"{generation.tokens} tokens"]
        if generation.ended is not None:
            facts.append("ended by EOS" if generation.ended else "no EOS")
        if generation.repeated is not None:
            facts.append(f"{generation.repeated:.0%} of 4-grams repeated")
        if generation.matched is not None:
            facts.append(f"{generation.matched:.0%} as in the document")
        # As JSON strings, so that line breaks and backticks in a text don't end the block.
        texts = [json.dumps(text, ensure_ascii=False) for text in (generation.prompt, generation.text)]
        lines += [f"### {generation.dataset or 'a given prompt'}: {', '.join(facts)}", "", "```", *texts, "```", ""]
    return "\n".join(lines)


def notes(results: Results) -> list[str]:
    """Return the limitations of the figures."""
    found: list[str] = []
    whole, most = results.overall, results.settings.max_tokens
    if most is not None:
        found.append(f"at most {most:,} tokens of each dataset were read")
    if whole.truncated:
        found.append(
            f"{whole.truncated:,} documents are longer than the {results.limit:,} tokens that the model reads: "
            f"{whole.cut_tokens:,} tokens were not scored"
        )
    found += [f"{source.dataset}: no token was scored" for source in results.sources if not source.tokens]
    return found


def _row(name: str, loss: HeldOutLoss) -> tuple[Cell, ...]:
    mean = _number(loss.nll / loss.tokens if loss.tokens else None)
    return name, loss.documents, loss.tokens, mean, _number(loss.perplexity)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"
