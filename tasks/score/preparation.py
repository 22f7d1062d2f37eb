"""Scores from their plan to their published folder, in plain functions: `stage.py` wraps them for Prefect."""

from functools import lru_cache
from typing import Any

import orjson
from tokenmill.tasks.chat.check import text_encoder
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.pack.formats import Format, format_of
from tokenmill.tasks.shards.books import OnBadRow
from tokenmill.tasks.shards.circumstances import circumstances
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publication import check_bad_rows, collect, publish_preparation
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import WHERE_NOT_WHAT
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.tokenize.encoders import Encoder
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .conversations import Conversations, HarmonyTexts, TemplatedChats, policy_of
from .engines import device_for_worker, embedder, required, scorer
from .planning import NLL_KIND, ScorePlan
from .publication import ScoresLayout
from .ranking import ranked, require_unique
from .settings import EmbedRecipe, LossMode, NllRecipe, Where
from .shard import EmbedScoring, NllScoring, Scoring, score_shard

LIBRARIES = ("tokenmill", "numpy", "pyarrow")


def build_score_shard(
    shard: PlannedShard,
    store: Store,
    where: Where,
    on_bad_row: OnBadRow,
    worker: int | None = 0,
    threads: int | None = None,
) -> Receipt:
    """Build one planned shard in this process, on the device of the worker of that number, with so many `threads`.

    Raises RunError when model or tokenizer found here are not those that were planned with.
    """
    given: dict[str, Any] = shard.identity["recipe"]
    recipe = NllRecipe(**given) if store.kind == NLL_KIND else EmbedRecipe(**given)
    device = device_for_worker(recipe.device, worker)
    if threads is not None and device == "cpu" and recipe.engine == "transformers":
        required("torch").set_num_threads(threads)
    scoring = _scoring(recipe, where, device)
    return score_shard(shard, recipe, scoring, store, on_bad_row)


def _scoring(recipe: NllRecipe | EmbedRecipe, where: Where, device: str) -> Scoring:
    if isinstance(recipe, EmbedRecipe):
        return EmbedScoring(recipe, embedder(recipe, where, device))
    conversations = _conversations(recipe, where)
    return NllScoring(recipe, conversations, scorer(recipe, where, device, conversations.encode))


def _conversations(recipe: NllRecipe, where: Where) -> Conversations:
    """How rows are read. Raises RunError when tokenizer or template are not those that were planned with."""
    if where.tokenizer is None or where.template is None:
        return HarmonyTexts(recipe.text_field, policy_of(recipe.loss_mode, harmony=True))
    found, encoder = _format(orjson.dumps([where.tokenizer, where.template]), recipe.loss_mode)
    planned = (recipe.tokenizer, recipe.template)
    here = (find_vocabulary(TokenizerSource.model_validate(where.tokenizer)).fingerprint, found.template.digest)
    if here != planned:
        raise RunError(
            f"tokenizer and chat_template are {here} on this worker but {planned} in the plan; give all workers the same "
            "files"
        )
    rows = found.rows(recipe.messages_field, recipe.tools_field or "tools")
    return TemplatedChats(recipe.text_field, rows, encoder)


@lru_cache(maxsize=4)
def _format(where: bytes, mode: LossMode) -> tuple[Format, Encoder]:
    """A tokenizer and a template (both as JSON); probing a template takes some 30 ms, so a worker does it once."""
    tokenizer, template = orjson.loads(where)
    vocabulary = find_vocabulary(TokenizerSource.model_validate(tokenizer))
    policy = policy_of(mode, harmony=False)
    found = format_of(template["source"], template["variables"], vocabulary, policy, "auto", "literal")
    return found, text_encoder(vocabulary, found.controls, "reference", "literal")


def score_header(plan: ScorePlan) -> dict[str, Any]:
    """What the manifest says of the preparation as a whole."""
    settings = plan.settings
    return {
        "type": plan.plan.store.kind,
        "blend": plan.blend.model_dump(exclude_none=True),
        "settings": settings.model_dump(exclude=WHERE_NOT_WHAT),
        "skipped_files": plan.plan.skipped,
    }


def publish_scores(plan: ScorePlan, started: float) -> dict[str, Any]:
    """Check that every planned shard is proven, rank NLL, publish, and return the manifest. `started` is a Unix time.

    Raises RunError for gaps, too many bad rows, and a row that is scored twice.
    """
    settings, store = plan.settings, plan.plan.store
    finished, missing = collect(plan.plan, allow_partial=settings.allow_partial)
    check_bad_rows(finished, store, settings.bad_row_ceiling, tolerate=settings.on_bad_row == "quarantine")
    require_unique(finished, store)
    final = ranked(finished, store, rebuild=settings.force) if store.kind == NLL_KIND else finished
    times = [item.receipt.volatile["built_at"] for item in final]
    volatile = {
        **circumstances(plan.plan, settings, started, LIBRARIES),
        "scored_at": [min(times, default=0.0), max(times, default=0.0)],
    }
    header = {**score_header(plan), "missing": missing}
    return publish_preparation(plan.output_dir, store, final, ScoresLayout(store.kind), settings, header, volatile)
