"""Scores: NLL of completions, or embeddings of texts, in tables beside the rows, joined by `row_id`.

    OUT/nll/part-00000-1a2b3c4d.parquet          a score per row
    OUT/embeddings/part-00000-1a2b3c4d.parquet   or a vector per row
    OUT/blend.json                               the folder as a blend

The manifest records the scored file of each part (`file`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import orjson
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.chat.check import text_encoder
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.shapes import given_of
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.pack.formats import Format, format_of
from tokenmill.tasks.shards.executor import worker_number
from tokenmill.tasks.shards.kind import Kind, Needs, Release, Stage
from tokenmill.tasks.shards.plan import Finished, PlannedShard
from tokenmill.tasks.shards.publication import FolderLayout
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.threads import cores
from tokenmill.tasks.tokenize.encoders import Encoder
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .conversations import Conversations, HarmonyTexts, TemplatedChats
from .embed import HASH_DIMENSIONS, HashEmbedder
from .engines import device_for_worker, embedder, gpus, required, scorer
from .planning import (
    EMBEDDINGS_KIND,
    FORMAT_VERSIONS,
    NLL_KIND,
    AnyScore,
    ScorePlan,
    device_of_plan,
    plan_scores,
    require_model,
    scored_blend,
)
from .ranking import ranked, require_unique
from .settings import EmbedRecipe, EmbedSettings, ModelLocation, NllRecipe, NllSettings
from .shard import EmbedScoring, NllScoring, inspect_score_shard, read_shard, score_shard

GPU_LIMIT = "gpu"
"""The Prefect concurrency limit by which runs share GPUs."""


def worker_arguments(planned: ScorePlan) -> dict[str, Any]:
    """The arguments of workers besides a shard. `threads` is the number of threads per worker of a local CPU cluster."""
    settings, workers = planned.settings, NLL.needs(planned).workers or 1
    shares_cores = device_of_plan(planned) != "cuda" and settings.cluster == "local"
    return {
        "where": asdict(planned.found),
        "on_bad_row": settings.on_bad_row,
        "threads": max(1, cores() // workers) if shares_cores else None,
    }


def build_score_shard(
    shard: PlannedShard,
    store: Store,
    where: Mapping[str, Any],
    on_bad_row: OnBadRow,
    threads: int | None = None,
) -> Receipt:
    """Build one planned shard in this process, on the device of this worker, with `threads` threads.

    Raises RunError if the model or tokenizer found here differs from the planned one.
    """
    found = ModelLocation(**where)
    given: dict[str, Any] = shard.identity["recipe"]
    recipe = NllRecipe(**given) if store.kind == NLL_KIND else EmbedRecipe(**given)
    device = device_for_worker(recipe.device, worker_number())
    if threads is not None and device == "cpu" and recipe.engine == "transformers":
        required("torch").set_num_threads(threads)
    if isinstance(recipe, EmbedRecipe):
        scoring = EmbedScoring(recipe, embedder(recipe, found, device))
    else:
        conversations = _conversations(recipe, found)
        scoring = NllScoring(recipe, conversations, scorer(recipe, found, device, conversations.encode))
    return score_shard(shard, recipe, scoring, store, on_bad_row)


def _conversations(recipe: NllRecipe, where: ModelLocation) -> Conversations:
    """The reader of rows. Raises RunError if the tokenizer or template differs from the planned one."""
    if where.tokenizer is None or where.template is None:
        return HarmonyTexts(recipe.text_field, recipe.policy)
    found, encoder = _format(orjson.dumps([where.tokenizer, where.template]), recipe.policy)
    planned = (recipe.tokenizer, recipe.template)
    here = (find_vocabulary(TokenizerSource.model_validate(where.tokenizer)).fingerprint, found.template.digest)
    if here != planned:
        raise RunError(
            f"tokenizer and chat_template are {here} on this worker but {planned} in the plan; give all workers the same "
            "files"
        )
    rows = found.rows(recipe.messages_field, recipe.tools_field or "tools", given_of(recipe.fields or {}))
    return TemplatedChats(recipe.text_field, rows, encoder)


@lru_cache(maxsize=4)
def _format(where: bytes, policy: LossPolicy) -> tuple[Format, Encoder]:
    """A tokenizer and a template (both as JSON), cached because probing a template takes some 30 ms."""
    tokenizer, template = orjson.loads(where)
    vocabulary = find_vocabulary(TokenizerSource.model_validate(tokenizer))
    found = format_of(template["source"], template["variables"], vocabulary, policy, "auto", "literal")
    return found, text_encoder(vocabulary, found.controls, "reference", "literal")


def _lines(name: str, found: Counter[str]) -> list[str]:
    lines: list[str] = []
    if tokens := found["completion_token_count"]:
        mean = found["nll_sum"] / tokens
        perplexity = f"{math.exp(mean):,.2f}" if mean < math.log(1e9) else "a billion and more"
        lines.append(f"{name}: NLL {mean:.4f} per token over {tokens:,} tokens, a perplexity of {perplexity}")
    if found["truncated"]:
        lines.append(f"{name}: truncated: {counted(found['truncated'], 'row')}")
    return lines


def read_score_shard(
    shard: PlannedShard,
    store: Store,
    where: Mapping[str, Any],
    on_bad_row: OnBadRow,
    threads: int | None = None,  # noqa: ARG001 - for engines
) -> Receipt:
    """Build a shard that counts the rows to score, without a model. Raises as `build_score_shard` does."""
    given: dict[str, Any] = shard.identity["recipe"]
    inputs = (
        _conversations(NllRecipe(**given), ModelLocation(**where))
        if store.kind == NLL_KIND
        else EmbedScoring(EmbedRecipe(**given), HashEmbedder(HASH_DIMENSIONS))
    )
    return read_shard(shard, inputs, store, on_bad_row)


class Score(Kind[AnyScore, ModelLocation]):
    """NLL and embeddings: see the module."""

    libraries = ("tokenmill", "numpy", "pyarrow")
    stages = (Stage("score-slices", build_score_shard, arguments=worker_arguments, read=read_score_shard),)
    hidden = frozenset({"holdout"})
    records_failure = True

    def plan(self, blend: Blend, settings: AnyScore, output_dir: str | None) -> ScorePlan:
        return plan_scores(blend, settings, output_dir)

    def read_blend(self, blend: Blend | Mapping[str, Any] | str) -> Blend:
        return scored_blend(blend, "nll" if self.name == NLL_KIND else "embed")

    def check(self, blend: Blend, settings: AnyScore, output_dir: str) -> None:
        require_model(settings)

    def needs(self, planned: ScorePlan) -> Needs:
        # Runs share GPUs by the concurrency limit `gpu`, if it exists (`prefect gcl create gpu --limit 8`).
        settings = planned.settings
        if device_of_plan(planned) == "cuda":
            return Needs(settings.workers or (gpus() if settings.cluster == "local" else 1), {"GPU": 1}, GPU_LIMIT)
        return Needs(settings.workers or (1 if settings.model else cores()))

    def release(self, planned: ScorePlan, finished: Sequence[Finished]) -> Release:
        store = planned.plan.store
        require_unique(finished, store)
        final = ranked(finished, store, rebuild=planned.settings.force) if store.kind == NLL_KIND else finished
        times = [item.receipt.volatile["built_at"] for item in final]
        volatile = {"scored_at": [min(times, default=0.0), max(times, default=0.0)]}
        return Release(FolderLayout(store.kind), {}, shards=final, volatile=volatile)

    def inspect(self, store: Store, receipt: Receipt) -> list[str]:
        return inspect_score_shard(store, receipt)

    def summary(self, manifest: Mapping[str, Any]) -> list[str]:
        sums: dict[str, Counter[str]] = {}
        for entry in manifest["shards"]:
            counts = {"truncated": entry["truncated"], **entry.get("facts", {})}
            sums.setdefault(entry["dataset"], Counter()).update(counts)
        return [line for name, found in sums.items() for line in _lines(name, found)]


class NllScore(Score):
    """The NLL of completions."""

    name = NLL_KIND
    settings = NllSettings
    formats = {NLL_KIND: range(1, FORMAT_VERSIONS[NLL_KIND] + 1)}


class EmbeddingScore(Score):
    """Embeddings of texts."""

    name = EMBEDDINGS_KIND
    settings = EmbedSettings
    formats = {EMBEDDINGS_KIND: range(3, FORMAT_VERSIONS[EMBEDDINGS_KIND] + 1)}
    next_steps = "tokenmill choose {0} --output-dir chosen"


NLL, EMBEDDINGS = NllScore(), EmbeddingScore()
