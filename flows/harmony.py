"""Harmony normalization: chat data of many shapes becomes one strict format.

plan ─► normalize shards (mapped over Dask) ─► publish ─► report
"""

import time
from typing import Any

from prefect import flow

from tasks.blend.load import load_blend
from tasks.blend.models import Blend
from tasks.harmony.converters import ProofTask
from tasks.harmony.settings import HarmonySettings
from tasks.harmony.stage import normalize_shards, plan, publish
from tasks.harmony.turns import Effort, ParallelCalls, SpecialStrings, Thoughts, Trailing
from tasks.report.stage import report
from tasks.shards.books import OnBadRow
from tasks.shards.settings import Scale
from tasks.shards.stage import shard_workers
from tasks.storage import SourceIdentity
from tasks.strict import Size, parse

DEFAULT = HarmonySettings()


@flow(name="harmony-normalize", persist_result=False)
def harmony_normalize(
    blend: Blend | str,
    output_dir: str,
    effort: Effort = DEFAULT.effort,
    thoughts: Thoughts = DEFAULT.thoughts,
    parallel_calls: ParallelCalls = DEFAULT.parallel_calls,
    special_strings: SpecialStrings = DEFAULT.special_strings,
    trailing: Trailing = DEFAULT.trailing,
    proofs: ProofTask = DEFAULT.proofs,
    rules_off: list[str] = DEFAULT.rules_off,
    min_completion_chars: int = DEFAULT.min_completion_chars,
    cross_check: float = DEFAULT.cross_check,
    messages_json: bool = DEFAULT.messages_json,
    shard_size: Size = DEFAULT.shard_size,
    store: str | None = DEFAULT.store,
    source_identity: SourceIdentity = DEFAULT.source_identity,
    on_bad_row: OnBadRow = DEFAULT.on_bad_row,
    bad_row_ceiling: float = DEFAULT.bad_row_ceiling,
    scale: Scale = DEFAULT.scale,
    sample: int | None = DEFAULT.sample,
    force: bool = DEFAULT.force,
    allow_partial: bool = DEFAULT.allow_partial,
    cluster: str = DEFAULT.cluster,
    workers: int | None = DEFAULT.workers,
) -> dict[str, Any]:
    """Bring a blend of chat data into Harmony.

    Args:
        blend: The blend, or the path or URI of its JSON file.
        output_dir: Where the folders of rows, blend.json and the manifest go.
    """
    chosen = {name: value for name, value in locals().items() if name in HarmonySettings.model_fields}
    settings = parse(HarmonySettings, chosen, "settings")
    started = time.time()

    prepared = plan(load_blend(blend), settings, output_dir)
    common = {
        "store": prepared.plan.store.place,
        "on_bad_row": settings.on_bad_row,
        "rebuild": settings.force,
    }
    with shard_workers(settings.cluster, settings.workers) as build_shards:
        build_shards(normalize_shards, prepared.plan.pending, common)
    manifest = publish(prepared, started)
    return report(manifest, prepared.output_dir)
