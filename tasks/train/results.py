"""The artifact `results`: how well a model predicts held-out data, and what it was made from.

    OUT/results.json   sealed: whoever compares two models reads this
    OUT/results.md     the same for people

Perplexity is e to the mean NLL per token that was scored, so that of all sources together is weighted by their tokens.
Perplexities compare only under one vocabulary: one with longer tokens has fewer of them, each harder to predict. NLL is
in nats.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.score.nll import MOST_PERPLEXING
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import join
from tokenmill.tasks.strict import Strict, parse

from .evaluation_settings import EvaluateSettings

RESULTS = "results.json"


class Loss(Strict, frozen=True):
    """What a model says of some documents.

    `tokens` are those scored and `nll` their sum in nats; `perplexity` is None where nothing was scored. Of `truncated`
    documents, which are longer than the model reads, `cut_tokens` were to be scored and were not.
    """

    documents: int
    tokens: int
    nll: float
    perplexity: float | None
    truncated: int
    cut_tokens: int


class SourceResult(Loss, frozen=True):
    """What a model says of the held-out documents of a data set."""

    dataset: str


class Generation(Strict, frozen=True):
    """A greedy continuation.

    `dataset` is that of the document whose beginning the prompt is, None for a prompt that was given. `ended`: EOS was
    produced, None where the data has no EOS. `repeated` is the share of its 4-grams that it had before, None below four
    tokens; `matched` the share of tokens that are the document's own at the same places, None for a given prompt.
    """

    dataset: str | None
    prompt: str
    text: str
    tokens: int
    ended: bool | None
    repeated: float | None
    matched: float | None


class MadeFrom(Strict, frozen=True):
    """What results were made from: a digest of the model's files, and one of what the preparation lists."""

    model: str
    data: str


class Results(Strict, frozen=True):
    """What an evaluation found. `precision` is that of weights and hidden states, `limit` the tokens that the model
    reads of a document.
    """

    model: str
    data: str
    made_from: MadeFrom
    settings: EvaluateSettings
    precision: str
    limit: int | None
    overall: Loss
    sources: list[SourceResult]
    generations: list[Generation]


def perplexity(nll: float, tokens: int) -> float | None:
    """What comes of a sum of NLL: e to the mean (to 30 at most, so that people can read it), None of no tokens."""
    return math.exp(min(nll / tokens, MOST_PERPLEXING)) if tokens else None


def overall(sources: Sequence[Loss]) -> Loss:
    """All sources as one."""
    nll, tokens = math.fsum(each.nll for each in sources), sum(each.tokens for each in sources)
    return Loss(
        documents=sum(each.documents for each in sources), tokens=tokens, nll=nll, perplexity=perplexity(nll, tokens),
        truncated=sum(each.truncated for each in sources), cut_tokens=sum(each.cut_tokens for each in sources),
    )  # fmt: skip


def publish_results(results: Results, output_dir: str, volatile: Mapping[str, Any]) -> str:
    """Write results.md and, last, results.json, and return the path of this one.

    `volatile` is what may differ between two evaluations that are equal in everything else: seconds, versions.
    """
    publish_bytes(join(output_dir, "results.md"), markdown(results).encode())
    document = {"type": "results", **results.model_dump(), "volatile": dict(volatile)}
    return publish_bytes(join(output_dir, RESULTS), sealed(document)).path


def read_results(path: str) -> Results:
    """The results in a file, or in the folder that it lies in. Raises InputError when it is missing or was changed."""
    place = path if path.endswith(".json") else join(path, RESULTS)
    content = read_bytes(place)
    if content is None:
        raise InputError(f"{place}: there are no results; evaluate a model first: tokenmill evaluate")
    try:
        document = unsealed(content)
    except ValueError as error:
        raise InputError(f"{place}: {error}; evaluate again") from error
    if document.pop("type", None) != "results":
        raise InputError(f"{place}: these are no results of an evaluation; give the file that tokenmill evaluate wrote")
    document.pop("volatile")
    return parse(Results, document, place)


def artifact_record(results: Results, output_dir: str) -> dict[str, Any]:
    """The one line that the next program reads."""
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
    """The results for people."""
    rows = [(source.dataset, source) for source in results.sources] + [("**all**", results.overall)]
    lines = [
        f"# Perplexity {_number(results.overall.perplexity)} on split {results.settings.split}",
        "",
        f"Model `{results.model}` ({results.made_from.model}), data `{results.data}`, in {results.precision}.",
        "",
        "| data set | documents | tokens scored | NLL per token | perplexity |",
        "|---|---:|---:|---:|---:|",
        *(_row(name, loss) for name, loss in rows),
        "",
        *(f"* {line}" for line in notes(results)),
        "",
        *(line for generation in results.generations for line in _generated(generation)),
    ]
    return "\n".join(lines)


def notes(results: Results) -> list[str]:
    """What a person should know to read the figures."""
    found: list[str] = []
    whole, most = results.overall, results.settings.max_tokens
    if most is not None:
        found.append(f"of each data set the first documents were read, up to {most:,} tokens")
    if whole.truncated:
        found.append(
            f"{whole.truncated:,} documents are longer than the {results.limit:,} tokens that the model reads: "
            f"{whole.cut_tokens:,} tokens were not scored"
        )
    found += [f"{source.dataset}: no token was scored" for source in results.sources if not source.tokens]
    return found


def _row(name: str, loss: Loss) -> str:
    mean = _number(loss.nll / loss.tokens if loss.tokens else None)
    return f"| {name} | {loss.documents:,} | {loss.tokens:,} | {mean} | {_number(loss.perplexity)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _generated(generation: Generation) -> list[str]:
    """A continuation: both texts on a line of their own, with line breaks spelled out."""
    facts = [f"{generation.tokens} tokens"]
    if generation.ended is not None:
        facts.append("ended by EOS" if generation.ended else "no EOS")
    if generation.repeated is not None:
        facts.append(f"{generation.repeated:.0%} of 4-grams repeated")
    if generation.matched is not None:
        facts.append(f"{generation.matched:.0%} as in the document")
    texts = [json.dumps(text, ensure_ascii=False) for text in (generation.prompt, generation.text)]
    return [f"### {generation.dataset or 'a given prompt'}: {', '.join(facts)}", "", "```", *texts, "```", ""]
