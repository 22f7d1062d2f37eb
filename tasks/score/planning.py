"""Plan scores: from rows and settings to slices with identities, without Prefect and Dask.

A model is identified by the content of its files, which are hashed here; only workers load it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import orjson
import pyarrow.parquet as pq
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.chat.shapes import fields_read, given_of
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.planning import KIND as HARMONY_KIND
from tokenmill.tasks.harmony.training import HARMONY
from tokenmill.tasks.harmony.vocabulary import IDS as HARMONY_IDS
from tokenmill.tasks.pack.formats import checked_format
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.select.shard import PART as CANDIDATES
from tokenmill.tasks.shards.kind import Planned
from tokenmill.tasks.shards.manifest import BLEND, read_manifest
from tokenmill.tasks.shards.planning import places, plan_shards, require_no
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.sources.row_filter import row_filter
from tokenmill.tasks.storage import absolute, join
from tokenmill.tasks.tokenize.load import find_vocabulary, pinned
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .embed import HASH_DIMENSIONS
from .engines import EMBEDDING_FILES, device_of, precision_of, require_torch
from .server import Server
from .settings import Device, EmbedRecipe, EmbedSettings, ModelLocation, NllRecipe, NllSettings
from .shard import IDS, NAMED
from .weights import WEIGHTS, ModelFiles, find_model

NLL_KIND, EMBEDDINGS_KIND = "nll", "embeddings"
FORMAT_VERSIONS = {NLL_KIND: 2, EMBEDDINGS_KIND: 3}
"""Increment it when the same recipe and source give different bytes."""


AnyScore = NllSettings | EmbedSettings
ScorePlan = Planned[AnyScore, ModelLocation]


def device_of_plan(planned: ScorePlan) -> Device:
    """The device that computes the shards."""
    return planned.plan.shards[0].identity["recipe"]["device"]


RecipeOf = Callable[[DataSource, str | None], NllRecipe | EmbedRecipe]
"""The recipe of a dataset, given the split of rows that do not name one."""


def plan_scores(blend: Blend, settings: NllSettings | EmbedSettings, output_dir: str | None) -> ScorePlan:
    """Plan the scores of a blend for `output_dir`; if that is None, nothing counts as built and hashes are cached per user.

    Raises InputError for anything that must be fixed first, such as a missing model.
    """
    kind = NLL_KIND if isinstance(settings, NllSettings) else EMBEDDINGS_KIND
    output_dir, store = places(blend, settings, output_dir, kind)
    model = find_model(settings.model, settings.model_revision) if settings.model and not settings.server else None
    where = ModelLocation(server=settings.server, concurrency=settings.concurrency)
    where = replace(where, model=model.name, model_revision=model.revision) if model else where
    if isinstance(settings, NllSettings):
        where, recipe_of = _nll(settings, model, where, store)
    else:
        recipe_of = _embeddings(settings, model)

    def fields(source: DataSource) -> list[str]:
        return [*NAMED, *_scored_fields(source, settings)]

    def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[NllRecipe | EmbedRecipe]:
        require_no(source, ["converter", "transforms", "fim", "template_variables"], "scores")
        return [recipe_of(source, source.split or (split if split in SPLITS else None))] * len(slices)

    # A file of scores is matched with the file of rows that it scores.
    plan = plan_shards(blend, settings, store, FORMAT_VERSIONS[store.kind], fields, _require, recipes, bundles=False)
    return Planned(blend, settings, output_dir, plan, where)


def require_model(settings: AnyScore) -> None:
    """Raise InputError for an engine that is not installed, and for a missing or unusable model."""
    if settings.server and settings.model:
        Server(settings.server, settings.model, settings.concurrency)
    elif settings.model:
        require_torch()
        model = find_model(settings.model, settings.model_revision)
        if isinstance(settings, NllSettings) and settings.chat_template == HARMONY:
            _require_harmony(model)


def public_name(model: ModelFiles) -> str:
    """The public name of a model: its id on the hub, or the name of its folder without the path."""
    return model.name if model.revision else model.folder.name


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
        source = settings.tokenizer or _own_tokenizer(settings, model)
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
    return public_name(model), model.revision or weights, weights


def _own_tokenizer(settings: NllSettings, model: ModelFiles | None) -> TokenizerSource:
    if model is None:
        return TokenizerSource(model=settings.model, revision=settings.model_revision)
    if model.revision:
        return TokenizerSource(model=model.name, revision=model.revision)
    return TokenizerSource(model=str(model.folder))


def _require_harmony(model: ModelFiles) -> None:
    """Raises InputError for a model without Harmony's tokens."""
    config = orjson.loads((model.folder / "config.json").read_bytes())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if size is not None and size <= max(HARMONY_IDS.values()):
        raise InputError(
            f"model: {public_name(model)!r} has a vocabulary of {size:,} tokens, but Harmony's ids go up to "
            f"{max(HARMONY_IDS.values()):,}; set chat_template=tokenizer to use the model's own template"
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


def _require(metadata: pq.FileMetaData, fields: Sequence[str], uri: str) -> None:
    """Raises InputError unless rows have an id for joining and a field to score."""
    require_any(metadata, IDS, uri)
    require_any(metadata, [name for name in fields if name not in NAMED], uri)


What = Literal["nll", "embed"]


def scored_blend(place: Blend | Mapping[str, Any] | str, what: What) -> Blend:
    """The blend to score: the one at `place`, the rows (nll) or candidates (embed) of a published normalization, or the
    rows of a file, folder or glob.

    Raises InputError for an invalid blend, and for a normalization without candidates.
    """
    if not isinstance(place, str) or place.endswith(".json"):
        return load_blend(place)
    folder = absolute(place)
    manifest = read_manifest(folder)
    if manifest is None or manifest["type"] != HARMONY_KIND:
        return load_blend({"datasets": [{"name": "rows", "path": folder}]})
    if what == "nll":
        return load_blend(join(folder, BLEND))
    if not manifest.get("selection", {}).get("candidates"):
        raise InputError(
            f"{folder}: this normalization didn't select candidates to embed; run it again with selection.view=prompt, or name "
            "a row folder"
        )
    return load_blend({"datasets": [{"name": CANDIDATES, "path": join(folder, CANDIDATES)}]})
