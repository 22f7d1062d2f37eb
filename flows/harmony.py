"""Harmony normalization: chat data of many shapes becomes one strict format, without duplicates, ready to be scored.

plan ─► normalize shards ─► find duplicates ─► mark shards ─► select pools and candidates ─► publish ─► report
        (all of these mapped over one Dask cluster)
"""

import time
from typing import Any

from prefect import flow

from tasks.blend.load import load_blend
from tasks.blend.models import Blend
from tasks.dedup.settings import DedupChoices
from tasks.dedup.stage import without_duplicates
from tasks.harmony.converters import ProofTask
from tasks.harmony.preparation import normalized_shards
from tasks.harmony.stage import normalize_shards, plan, publish
from tasks.harmony.turns import Effort, ParallelCalls, SpecialStrings, Thoughts, Trailing
from tasks.report.stage import report
from tasks.select.planning import require_fitting
from tasks.select.publication import beside, require_variety
from tasks.select.settings import NormalizationSettings, SelectionChoices
from tasks.select.stage import select
from tasks.shards.books import OnBadRow
from tasks.shards.settings import Scale
from tasks.shards.stage import publishing, shard_workers
from tasks.storage import SourceIdentity
from tasks.strict import Size, parse

DEFAULT = NormalizationSettings()


@flow(name="harmony-normalize", persist_result=False)
@publishing
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
    dedup: DedupChoices = DEFAULT.dedup,
    selection: SelectionChoices = DEFAULT.selection,
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
        output_dir: Where the folders of rows, pools and candidates, blend.json and the manifest go.
    """
    chosen = {name: value for name, value in locals().items() if name in NormalizationSettings.model_fields}
    settings = parse(NormalizationSettings, chosen, "settings")
    started = time.time()

    require_fitting(settings)
    prepared = plan(load_blend(blend), settings, output_dir)
    place = prepared.plan.store
    common = {"store": place.place, "on_bad_row": settings.on_bad_row, "rebuild": settings.force}
    with shard_workers(settings.cluster, settings.workers) as build_shards:
        build_shards(normalize_shards, prepared.plan.pending, common)
        normalized, missing = normalized_shards(prepared)
        rows = without_duplicates(normalized, settings.dedup, place, build_shards, rebuild=settings.force)
        selected = select(rows.final, settings.selection, place, build_shards, rebuild=settings.force)
    made = beside(selected, rows, settings.selection, place)
    manifest = publish(prepared, rows.final, missing, made, started)
    record = report(manifest, prepared.output_dir)
    require_variety(manifest, prepared.output_dir)
    return record
