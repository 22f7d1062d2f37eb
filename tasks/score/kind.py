"""Scores: NLL of completions, or embeddings of texts, in tables beside the rows, joined by `row_id`.

    OUT/nll/part-00000-1a2b3c4d.parquet          a score per row
    OUT/embeddings/part-00000-1a2b3c4d.parquet   or a vector per row
    OUT/blend.json                               the folder as a blend

The manifest records the scored file of each part (`file`).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import orjson
import pyarrow.parquet as pq
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.chat.check import text_encoder
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.shapes import fields_read, given_of
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.harmony.planning import KIND as HARMONY_KIND
from tokenmill.tasks.harmony.training import HARMONY
from tokenmill.tasks.harmony.vocabulary import IDS as HARMONY_IDS
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.pack.formats import Format, checked_format, format_of
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.runtime import cores
from tokenmill.tasks.select.shard import PART as CANDIDATES
from tokenmill.tasks.shards.executor import worker_number
from tokenmill.tasks.shards.kind import Kind, Needs, Planned, Release, Stage
from tokenmill.tasks.shards.manifest import BLEND, read_manifest
from tokenmill.tasks.shards.plan import Finished, PlannedShard
from tokenmill.tasks.shards.planning import places, plan_shards, require_no
from tokenmill.tasks.shards.publication import FolderLayout
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.sources.row_filter import row_filter
from tokenmill.tasks.storage import absolute, join
from tokenmill.tasks.tokenize.encoders import Encoder
from tokenmill.tasks.tokenize.load import find_vocabulary, pinned
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .conversations import Conversations, HarmonyTexts, PlainTexts, TemplatedChats
from .embed import HASH_DIMENSIONS
from .engines import (
    EMBEDDING_FILES,
    device_for_worker,
    device_of,
    embedder,
    gpus,
    precision_of,
    require_torch,
    required,
    scorer,
)
from .ranking import ranked, require_unique
from .server import Server
from .settings import Device, EmbedRecipe, EmbedSettings, ModelLocation, NllRecipe, NllSettings
from .shard import IDS, NAMED, EmbedScoring, NllScoring, inspect_score_shard, read_shard, score_shard
from .weights import WEIGHTS, ModelFiles, find_model

NLL_KIND, EMBEDDINGS_KIND = "nll", "embeddings"
# Increment it when the same recipe and source give different bytes.
FORMAT_VERSIONS = {NLL_KIND: 2, EMBEDDINGS_KIND: 3}


AnyScore = NllSettings | EmbedSettings
ScorePlan = Planned[AnyScore, ModelLocation]

# The recipe of a dataset, given the split of rows that do not name one.
RecipeOf = Callable[[DataSource, str | None], NllRecipe | EmbedRecipe]


def device_of_plan(planned: ScorePlan) -> Device:
    """Return the device that computes the shards."""
    return planned.plan.shards[0].identity["recipe"]["device"]


def _nll(
    settings: NllSettings, model: ModelFiles | None, where: ModelLocation, store: Store
) -> tuple[ModelLocation, RecipeOf]:
    """The chat format for workers, and the recipes. Raises InputError for a format that does not fit the model."""
    device = device_of(settings, settings.engine)
    name, revision, weights = _identity(settings, model, WEIGHTS)
    fingerprint, template = None, HARMONY
    if settings.chat_template == HARMONY:
        if model:
            _require_harmony(model)
    else:
        own = {"model": settings.model, "revision": settings.model_revision}
        if model:
            own = {"model": model.name if model.revision else str(model.folder), "revision": model.revision}
        source = settings.tokenizer or TokenizerSource.model_validate(own)
        vocabulary = find_vocabulary(source)
        chosen = SftSettings(tokenizer=source, chat_template=settings.chat_template, allow_text_markers=True)
        found = checked_format(chosen, vocabulary, settings.policy, store.place)
        written = {"source": found.format.template.source, "variables": dict(found.format.template.variables)}
        where = replace(where, tokenizer=pinned(source, vocabulary.commit).model_dump(), template=written)
        fingerprint, template = vocabulary.fingerprint, found.format.template.digest

    def recipe_of(source: DataSource, split: str | None) -> NllRecipe:
        chats = settings.chat_template != HARMONY
        return NllRecipe(
            dataset=source.name, split=split, filters=row_filter(source).wanted, text_field=source.text_field,
            messages_field=source.messages_field if chats else None,
            tools_field=source.tools_field if chats else None, fields=source.named_fields if chats else None,
            template=template, tokenizer=fingerprint, loss=asdict(settings.policy), max_length=settings.max_length,
            engine=settings.engine, model=name or settings.model, model_revision=revision, weights=weights,
            token_budget=settings.token_budget if model else None,
            precision=precision_of(settings, settings.engine, device), device=device,
        )  # fmt: skip

    return where, recipe_of


def _identity(
    settings: NllSettings | EmbedSettings, model: ModelFiles | None, files: Sequence[str]
) -> tuple[str | None, str | None, str | None]:
    """Name, revision and weights of the model; a server does not reveal its weights, so the revision is the user's."""
    if model is None:
        return settings.model, settings.model_revision if settings.server else None, None
    weights = model.digest(files)
    return model.public_name, model.revision or weights, weights


def _require_harmony(model: ModelFiles) -> None:
    """Raises InputError for a model without Harmony's tokens."""
    config, last = orjson.loads((model.folder / "config.json").read_bytes()), max(HARMONY_IDS.values())
    # Models of several modalities keep the size in the configuration of their text model.
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if size is not None and size <= last:
        raise InputError(
            f"model: {model.public_name!r} has a vocabulary of {size:,} tokens, but Harmony's ids go up to {last:,}; set "
            "chat_template=tokenizer to use the model's own template"
        )


def _embeddings(settings: EmbedSettings, model: ModelFiles | None) -> RecipeOf:
    device, hashing = device_of(settings, settings.engine), settings.engine == "hash"
    name, revision, weights = _identity(settings, model, EMBEDDING_FILES)

    def recipe_of(source: DataSource, split: str | None) -> EmbedRecipe:
        return EmbedRecipe(
            dataset=source.name, split=split, filters=row_filter(source).wanted,
            fields=list(_scored_fields(source, settings)), engine=settings.engine, model=name,
            model_revision=revision, weights=weights, pooling=settings.pooling,
            dimensions=settings.dimensions or (HASH_DIMENSIONS if hashing else None),
            max_tokens=None if hashing else settings.max_tokens,
            token_budget=settings.token_budget if settings.engine == "transformers" else None,
            precision=precision_of(settings, settings.engine, device), device=device,
        )  # fmt: skip

    return recipe_of


def _scored_fields(source: DataSource, settings: NllSettings | EmbedSettings) -> Sequence[str]:
    if isinstance(settings, EmbedSettings):
        return list(dict.fromkeys([settings.field, source.text_field]))
    if settings.chat_template == HARMONY:
        return [source.text_field]
    return [source.text_field, *fields_read(source.messages_field, source.tools_field, given_of(source.named_fields))]


GPU_LIMIT = "gpu"  # the Prefect concurrency limit by which runs share GPUs


def worker_arguments(planned: ScorePlan) -> dict[str, Any]:
    """Return the arguments of workers besides a shard. `threads` is the number of threads per worker of a local CPU cluster."""
    settings, workers = planned.settings, NLL.needs(planned).workers or 1
    # Each process would start a thread per core, and the workers of this machine would get in each other's way.
    shares_cores = device_of_plan(planned) != "cuda" and settings.cluster == "local"
    return {
        "where": asdict(planned.found),
        "on_bad_row": settings.on_bad_row,
        "threads": max(1, cores() // workers) if shares_cores else None,
    }


def build_score_shard(
    shard: PlannedShard, store: Store, where: Mapping[str, Any], on_bad_row: OnBadRow, threads: int | None = None
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
        scoring = EmbedScoring(recipe, PlainTexts(recipe.fields), embedder(recipe, found, device))
    else:
        conversations = _conversations(recipe, found)
        scoring = NllScoring(recipe, conversations, scorer(recipe, found, device, conversations.encode))
    return score_shard(shard, scoring, store, on_bad_row)


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
    """A tokenizer and a template (both as JSON), cached because probing a template takes about 30 ms."""
    tokenizer, template = orjson.loads(where)
    vocabulary = find_vocabulary(TokenizerSource.model_validate(tokenizer))
    found = format_of(template["source"], template["variables"], vocabulary, policy, "auto", "literal")
    return found, text_encoder(vocabulary, found.controls, "reference", "literal")


def read_score_shard(
    shard: PlannedShard,
    store: Store,
    where: Mapping[str, Any],
    on_bad_row: OnBadRow,
    threads: int | None = None,  # noqa: ARG001 - for engines
) -> Receipt:
    """Build a shard that counts the rows to score, without a model. Raises as `build_score_shard` does."""
    given: dict[str, Any] = shard.identity["recipe"]
    if store.kind == EMBEDDINGS_KIND:
        return read_shard(shard, PlainTexts(given["fields"]), store, on_bad_row)
    return read_shard(shard, _conversations(NllRecipe(**given), ModelLocation(**where)), store, on_bad_row)


class Score(Kind[AnyScore, ModelLocation]):
    """NLL and embeddings: see the module."""

    libraries = ("tokenmill", "numpy", "pyarrow")
    stages = (Stage("score-slices", build_score_shard, arguments=worker_arguments, read=read_score_shard),)
    hidden = frozenset({"holdout"})
    records_failure = True

    def plan(self, blend: Blend, settings: AnyScore, output_dir: str | None) -> ScorePlan:
        output_dir, store = places(blend, settings, output_dir, self.name)
        model = find_model(settings.model, settings.model_revision) if settings.model and not settings.server else None
        where = ModelLocation(server=settings.server, concurrency=settings.concurrency)
        where = replace(where, model=model.name, model_revision=model.revision) if model else where
        if isinstance(settings, NllSettings):
            where, recipe_of = _nll(settings, model, where, store)
        else:
            recipe_of = _embeddings(settings, model)

        def fields(source: DataSource) -> list[str]:
            return [*NAMED, *_scored_fields(source, settings)]

        def require_columns(metadata: pq.FileMetaData, fields: Sequence[str], uri: str) -> None:
            require_any(metadata, IDS, uri)
            require_any(metadata, [name for name in fields if name not in NAMED], uri)

        def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[NllRecipe | EmbedRecipe]:
            require_no(source, ["converter", "transforms", "fim", "template_variables"], "scores")
            return [recipe_of(source, source.split or (split if split in SPLITS else None))] * len(slices)

        # A file of scores is matched with the file of rows that it scores, so files aren't bundled.
        version = FORMAT_VERSIONS[store.kind]
        plan = plan_shards(blend, settings, store, version, fields, require_columns, recipes, bundles=False)
        return Planned(blend, settings, output_dir, plan, where)

    def read_blend(self, blend: Blend | Mapping[str, Any] | str) -> Blend:
        # A path names a blend, a published normalization (its rows for NLL, its candidates for embeddings), or rows.
        if not isinstance(blend, str) or blend.endswith(".json"):
            return load_blend(blend)
        folder = absolute(blend)
        manifest = read_manifest(folder)
        if manifest is None or manifest["type"] != HARMONY_KIND:
            return load_blend({"datasets": [{"name": "rows", "path": folder}]})
        if self.name == NLL_KIND:
            return load_blend(join(folder, BLEND))
        if not manifest.get("selection", {}).get("candidates"):
            raise InputError(
                f"{folder}: this normalization didn't select candidates to embed; run it again with selection.view=prompt, "
                "or name a row folder"
            )
        return load_blend({"datasets": [{"name": CANDIDATES, "path": join(folder, CANDIDATES)}]})

    def check(self, blend: Blend, settings: AnyScore, output_dir: str) -> None:
        if settings.server and settings.model:
            Server(settings.server, settings.model, settings.concurrency)  # asks it for its models
        elif settings.model:
            require_torch()
            model = find_model(settings.model, settings.model_revision)
            if isinstance(settings, NllSettings) and settings.chat_template == HARMONY:
                _require_harmony(model)

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

    def summary(self, manifest: Manifest) -> list[str]:
        sums: dict[str, Counter[str]] = {}
        for entry in manifest["shards"]:
            counts = {"truncated": entry["truncated"], **entry.get("facts", {})}
            sums.setdefault(entry["dataset"], Counter()).update(counts)
        lines: list[str] = []
        for name, found in sums.items():
            if tokens := found["completion_token_count"]:
                mean = found["nll_sum"] / tokens
                perplexity = f"{math.exp(mean):,.2f}" if mean < math.log(1e9) else "a billion and more"
                lines.append(f"{name}: NLL {mean:.4f} per token over {tokens:,} tokens, a perplexity of {perplexity}")
            if found["truncated"]:
                lines.append(f"{name}: truncated: {counted(found['truncated'], 'row')}")
        return lines


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
