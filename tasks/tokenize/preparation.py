"""A pretraining preparation from its plan to its published folder, in plain functions: `stage.py` wraps them for Prefect.

What is published are bin/idx pairs:

    OUT/train|valid|test/data_00000_1a2b3c4d.bin/.idx   names for the shards' files (hard links on a local disk)

Megatron caches its sample index by path: hence the digits of the key. On an object store nothing is renamed or copied:
blend.json points into the store.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.circumstances import circumstances
from tokenmill.tasks.shards.manifest import Finished
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publication import (
    Listed,
    Published,
    Weights,
    blend_json,
    blend_weights,
    check_bad_rows,
    collect,
    parts_with_tokens,
    publish_preparation,
)
from tokenmill.tasks.shards.publish import place_files
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import WHERE_NOT_WHAT, OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import is_local, join

from .binidx import token_dtype
from .exact import exact_encoder
from .load import load_vocabulary
from .planning import KIND, PretrainPlan
from .settings import PretrainRecipe, TokenizerSettings
from .shard import tokenize_shard

LIBRARIES = ("tokenmill", "gigatoken", "tokenizers", "tiktoken", "pyarrow", "numpy")

PAIR = re.compile(r"data_\d{5,}_[0-9a-f]{8}\.\w+")


@dataclass(frozen=True)
class PairLayout:
    """bin/idx pairs, numbered in plan order. Data sets of weight 0 get names too; blend.json leaves them out."""

    weights: Weights

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        """The pairs in the folders of the splits."""
        return dict.fromkeys(SPLITS, PAIR)

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        """Link every pair on a local disk; elsewhere its name is its place in the store."""
        linked = is_local(output_dir) and is_local(store.place)
        names: dict[str, dict[str, list[str]]] = {}
        listed: list[Listed] = []
        numbers: Counter[str] = Counter()
        pairs: list[tuple[str, str]] = []
        for item, part, split in parts_with_tokens(finished):
            prefix = store.path(item.key, part)
            if linked:
                prefix = join(output_dir, split, f"data_{numbers[split]:05d}_{item.key[:8]}")
                pairs += _named_files(store, item, part, prefix)
            numbers[split] += 1
            names.setdefault(item.shard.place, {})[split] = [prefix]
            listed.append(Listed(split, item.dataset, prefix, item.receipt.parts[part].tokens))
        place_files(pairs)
        return Published(names, blend_json(listed, self.weights))


def _named_files(store: Store, item: Finished, part: str, prefix: str) -> Iterator[tuple[str, str]]:
    """The files of a part in the store, each with the name that it is published under."""
    for output in item.receipt.outputs:
        stem, _, ending = output.path.rpartition(".")
        if stem == part:
            yield store.path(item.key, output.path), f"{prefix}.{ending}"


def build_pretrain_shard(
    shard: PlannedShard, store: Store, tokenizer: TokenizerSettings, on_bad_row: OnBadRow
) -> Receipt:
    """Build one planned shard in this process.

    Raises RunError when the tokenizer found here is not the one that was planned with.
    """
    recipe = PretrainRecipe(**shard.identity["recipe"])
    vocabulary = load_vocabulary(tokenizer)
    if vocabulary.fingerprint != recipe.tokenizer:
        raise RunError(
            f"tokenizer.model: {tokenizer.model!r} is {vocabulary.fingerprint} on this worker but {recipe.tokenizer} in "
            "the plan; give all workers the same files, or pin tokenizer.revision"
        )
    literal = recipe.special_tokens_in_text != "allow"
    fast = recipe.backend == "gigatoken"
    encoder = exact_encoder(vocabulary, literal=literal) if fast else vocabulary.reference(literal)
    return tokenize_shard(shard, recipe, encoder, vocabulary.special_tokens, store, on_bad_row)


def publish_pretrain(plan: PretrainPlan, started: float) -> dict[str, Any]:
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
            "dtype": token_dtype(plan.vocabulary.size).name,
            "gate": {name: asdict(verdict) for name, verdict in plan.verdicts.items()},
        },
        "missing": missing,
    }
    layout = PairLayout(blend_weights(plan.blend))
    volatile = circumstances(plan.plan, settings, started, LIBRARIES)
    return publish_preparation(plan.output_dir, plan.plan.store, finished, layout, settings, header, volatile)
