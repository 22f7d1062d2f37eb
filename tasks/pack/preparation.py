"""An SFT preparation from its plan to its published folder, in plain functions: `stage.py` wraps them for Prefect."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import orjson
from tokenmill.tasks.chat.check import text_encoder
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.sequences import SplitTurns
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.circumstances import circumstances
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publication import blend_weights, check_bad_rows, collect, publish_preparation
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import WHERE_NOT_WHAT, OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import SpecialTokens, TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .formats import Format, format_of
from .planning import KIND, SftPlan
from .publication import PackedLayout
from .settings import SftRecipe
from .shard import PackedShard

LIBRARIES = ("tokenmill", "gigatoken", "tokenizers", "tiktoken", "jinja2", "pyarrow", "numpy")


def build_sft_shard(
    shard: PlannedShard, store: Store, tokenizer: TokenizerSource, template: Mapping[str, Any], on_bad_row: OnBadRow
) -> Receipt:
    """Build one planned shard in this process; `template` is a record of it (`planning.template_record`).

    Raises RunError when tokenizer or template found here are not those that were planned with.
    """
    recipe = SftRecipe(**shard.identity["recipe"])
    vocabulary = find_vocabulary(tokenizer)
    if vocabulary.fingerprint != recipe.tokenizer:
        raise RunError(
            f"tokenizer.model: {tokenizer.model!r} is {vocabulary.fingerprint} on this worker but {recipe.tokenizer} in "
            "the plan; give all workers the same files, or pin tokenizer.revision"
        )
    variables = orjson.dumps(template["variables"], option=orjson.OPT_SORT_KEYS)
    chat = _format(
        template["source"], variables, vocabulary, recipe.policy, recipe.split_turns, recipe.special_tokens_in_text
    )
    if chat.template.digest != recipe.template:
        raise RunError(f"chat_template: {chat.template.digest} on this worker but {recipe.template} in the plan")
    encoder = text_encoder(vocabulary, chat.controls, recipe.backend, recipe.special_tokens_in_text)
    rows = chat.rows(recipe.messages_field, recipe.tools_field)
    return PackedShard(shard, recipe, rows, encoder, store).build(on_bad_row)


@lru_cache(maxsize=8)
def _format(
    source: str, variables: bytes, vocabulary: Vocabulary, policy: LossPolicy, split_turns: SplitTurns,
    special: SpecialTokens,
) -> Format:  # fmt: skip
    """Probing a template takes some 30 ms, so a worker does it once."""
    return format_of(source, orjson.loads(variables), vocabulary, policy, split_turns, special)


def publish_sft(plan: SftPlan, started: float) -> dict[str, Any]:
    """Check that every planned shard is proven, publish, and return the manifest. `started` is a Unix time."""
    settings = plan.settings
    finished, missing = collect(plan.plan, allow_partial=settings.allow_partial)
    check_bad_rows(finished, plan.plan.store, settings.bad_row_ceiling, tolerate=settings.on_bad_row == "quarantine")
    header = {
        "type": KIND,
        "blend": plan.blend.model_dump(exclude_none=True),
        "settings": settings.model_dump(exclude=WHERE_NOT_WHAT),
        "skipped_files": plan.plan.skipped,
        "tokenizer": {
            "fingerprint": plan.vocabulary.fingerprint,
            "vocabulary_size": plan.vocabulary.size,
            "gate": {name: asdict(verdict) for name, verdict in plan.verdicts.items()},
        },
        "template": {
            "digest": plan.template.digest,
            "controls": dict(plan.checked.format.controls.ids),
            "refused": plan.checked.refused,
            "warnings": plan.checked.warnings,
        },
        "missing": missing,
    }
    layout = PackedLayout(
        blend_weights(plan.blend), settings.sampling, settings.seed, settings.pack_size, settings.pad_seq_to_mult
    )
    volatile = circumstances(plan.plan, settings, started, LIBRARIES)
    return publish_preparation(plan.output_dir, plan.plan.store, finished, layout, settings, header, volatile)
