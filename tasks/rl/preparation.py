"""An RL preparation from its plan to its published folder, in plain functions: `stage.py` wraps them for Prefect."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.circumstances import circumstances
from tokenmill.tasks.shards.manifest import Finished
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publication import blend_weights, check_bad_rows, collect, publish_preparation
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import WHERE_NOT_WHAT, OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.tokenize.exact import exact_encoder
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .planning import KIND, RlPlan
from .publication import JsonLinesLayout
from .settings import RlRecipe
from .shard import RowLengths, Work, write_shard
from .targets import TARGETS
from .transforms import TransformList

LIBRARIES = ("tokenmill", "orjson", "zstandard", "pyarrow", "gigatoken", "tokenizers")


def build_rl_shard(
    shard: PlannedShard,
    store: Store,
    chains: Mapping[str, Mapping[str, Any]],
    tokenizer: TokenizerSource,
    on_bad_row: OnBadRow,
) -> Receipt:
    """Build one planned shard in this process; `chains` has a record of the TransformList of each `split/name`.

    Raises RunError when tables or tokenizer found here are not those that were planned with.
    """
    recipe = RlRecipe(**shard.identity["recipe"])
    chain = TransformList.from_record(chains[f"{shard.split}/{shard.dataset}"])
    work = Work(chain.functions(), TARGETS[recipe.target], _lengths(recipe, tokenizer))
    return write_shard(shard, recipe, work, store, on_bad_row)


def _lengths(recipe: RlRecipe, tokenizer: TokenizerSource) -> RowLengths | None:
    if recipe.max_tokens is None:
        return None
    vocabulary = find_vocabulary(tokenizer)
    if vocabulary.fingerprint != recipe.tokenizer:
        raise RunError(
            f"tokenizer.model: {tokenizer.model!r} is {vocabulary.fingerprint} on this worker but {recipe.tokenizer} in "
            "the plan; give all workers the same files, or pin tokenizer.revision"
        )
    fast = recipe.backend == "gigatoken"
    encoder = exact_encoder(vocabulary, literal=True) if fast else vocabulary.reference(True)
    return RowLengths(TARGETS[recipe.target].texts, encoder, recipe.max_tokens)


def chain_records(plan: RlPlan) -> dict[str, Any]:
    """The transforms of every data set, as plain JSON, for workers."""
    return {name: chain.record() for name, chain in plan.chains.items()}


def publish_rl(plan: RlPlan, started: float) -> dict[str, Any]:
    """Check that every planned shard is proven, publish, and return the manifest. `started` is a Unix time."""
    settings = plan.settings
    finished, missing = collect(plan.plan, allow_partial=settings.allow_partial)
    check_bad_rows(finished, plan.plan.store, settings.bad_row_ceiling, tolerate=settings.on_bad_row == "quarantine")
    _require_one_form(finished)
    header: dict[str, Any] = {
        "type": KIND,
        "blend": plan.blend.model_dump(exclude_none=True),
        "settings": settings.model_dump(exclude=WHERE_NOT_WHAT),
        "skipped_files": plan.plan.skipped,
        "mode": _mode(plan),
        "source_splits": _source_splits(plan),
        "missing": missing,
    }
    if plan.vocabulary is not None:
        gate = {name: asdict(verdict) for name, verdict in plan.verdicts.items()}
        header["tokenizer"] = {"fingerprint": plan.vocabulary.fingerprint, "gate": gate}
    layout = JsonLinesLayout(blend_weights(plan.blend), settings.compression)
    volatile = circumstances(plan.plan, settings, started, LIBRARIES)
    return publish_preparation(plan.output_dir, plan.plan.store, finished, layout, settings, header, volatile)


def _require_one_form(finished: Sequence[Finished]) -> None:
    """Raises RunError when the file of a split would mix forms of rows: its reader knows two, but not in one table."""
    forms: dict[str, dict[str, str]] = {}
    for item in finished:
        for part, names in item.receipt.facts["forms"].items():
            forms.setdefault(item.split_of(part), {}).update(dict.fromkeys(names, item.shard.dataset))
    for split, found in forms.items():
        if len(found) > 1:
            where = ", ".join(f"{name} (data set {dataset!r})" for name, dataset in sorted(found.items()))
            raise RunError(
                f"rows of {split} have different forms, which one file must not mix: {where}; bring them into one with "
                "transforms, or prepare the data sets apart"
            )


def _mode(plan: RlPlan) -> str:
    """How rows came about, in the words of manifests that trainers' tools know: `resolve`, else `local_split` where
    the last rows are held out, else `transform` or `passthrough`.
    """
    if any(chain.tables for chain in plan.chains.values()):
        return "resolve"
    if plan.settings.val_holdout is not None:
        return "local_split"
    return "transform" if any(chain.specs for chain in plan.chains.values()) else "passthrough"


def _source_splits(plan: RlPlan) -> list[str]:
    """The splits of the sources that rows were taken from, by the sources' own names."""
    return sorted({source.split for sources in plan.blend.parts().values() for source in sources if source.split})
