"""Deduplicate a blend of text: remove duplicates and documents that overlap evaluations; keep other rows unchanged.

    sign slices ─► find duplicates, in rounds by partition ─► write kept rows ─► publish

The plan covers only the signing of slices. The shards to publish are planned once duplicates are found: each is a signed slice
and the decisions about it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.input_checks import require_separate
from tokenmill.tasks.shards.manifest import Finished
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.planning import places, plan_shards, require_no
from tokenmill.tasks.shards.preparation import BuildShards, Planned, Preparation, Release, Step
from tokenmill.tasks.shards.publication import collect
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.discovery import name_within
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.parquet import require_any

from .apply import apply_decisions, require_text_in_first
from .contamination import evaluation_sources, evaluations_from, find_evaluations
from .decisions import KEPT, Decisions
from .harmony_shard import Deduplicated, document_slices, mark_shard, plan_marked
from .inspect import inspect_dedup_shard
from .publication import RowsLayout
from .rounds import FORMAT_VERSION, KIND, DocumentSlice, decide, planned_rounds
from .settings import DedupChoices, DedupSettings
from .steps import build_shard

EVERY_FIELD: Sequence[str] = ()


@dataclass(frozen=True)
class DedupFound:
    """The documents of each planned slice, and later the decisions about them."""

    slices: Sequence[DocumentSlice]
    decisions: Decisions | None = None


DedupPlan = Planned[DedupSettings, DedupFound]


@dataclass(frozen=True, slots=True)
class _TextRecipe:
    """Identifies slices before the number of partitions is known."""

    text_field: str


def plan_dedup(blend: Blend, settings: DedupSettings, output_dir: str | None) -> DedupPlan:
    """Plan `blend` for `output_dir`; without one, no shard counts as built, and hashes are cached per user.

    Raises InputError for anything that must be fixed first.
    """
    output_dir, store = places(blend, settings, output_dir, KIND)
    require_separate(evaluation_sources(settings.evaluations), store.place, output_dir)

    def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[_TextRecipe]:  # noqa: ARG001 - any plan's
        require_no(source, ["converter", "transforms", "template_variables"], "deduplication")
        require_text_in_first(source, slices)
        return [_TextRecipe(source.text_field)] * len(slices)

    unsigned = settings.model_copy(update={"force": True})  # these identities have no shards to reuse
    # The names of documents have the file and the row in it.
    found = plan_shards(
        blend,
        unsigned,
        store,
        FORMAT_VERSION,
        lambda _: EVERY_FIELD,
        require_any,
        recipes,
        bundles=False,
        form="documents",
    )
    sources = {(split, source.name): source for split, listed in blend.parts().items() for source in listed}
    slices = [
        _documents(sources[shard.split, shard.dataset], shard.split, shard.part, settings) for shard in found.shards
    ]
    signed, _, _ = planned_rounds(slices, settings.choices, store)
    shards = [replace(one, identity=other.identity) for one, other in zip(found.shards, signed, strict=True)]
    return Planned(blend, settings, output_dir, found.of_other(shards, rebuild=settings.force), DedupFound(slices))


def _documents(source: DataSource, split: str, part: Slice, settings: DedupSettings) -> DocumentSlice:
    options: dict[str, Any] = {
        "text_field": source.text_field,
        "id_field": settings.id_field,
        "cap_by": settings.cap_by,
    }
    name = f"{split}/{source.name}" if split in SPLITS else source.name
    return DocumentSlice("text", part, options, f"{name}/{name_within(source.path, part.file.uri)}@{part.start}")


def require_evaluations(_blend: Blend, settings: DedupSettings, _output_dir: str) -> None:
    """Raises InputError for missing evaluations."""
    find_evaluations(settings.evaluations)


def worker_arguments(planned: DedupPlan) -> dict[str, Any]:
    """The arguments for workers that write kept rows."""
    decisions = planned.found.decisions
    return {"outcomes": decisions.uri if decisions else "", "on_bad_row": planned.settings.on_bad_row}


def deduplicate_rows(planned: DedupPlan, build_shards: BuildShards) -> DedupPlan:
    """Decide on every row, and build the shards of kept rows; returns the plan of the published shards."""
    settings, store = planned.settings, planned.plan.store
    decisions = deduplicate(planned.found.slices, settings.choices, store.place, build_shards, rebuild=settings.force)
    decided = decided_plan(planned, decisions)
    DEDUP.build_pending(decided, build_shards)
    return decided


def decided_plan(planned: DedupPlan, decisions: Decisions) -> DedupPlan:
    """The plan of the published shards, given the decisions."""
    shards = [
        replace(shard, identity={**shard.identity, "decided": {"mode": planned.settings.mode, "outcomes": digest}})
        for shard, digest in zip(planned.plan.shards, decisions.digests, strict=True)
    ]
    plan = planned.plan.of_other(shards, rebuild=planned.settings.force)
    return replace(planned, plan=plan, found=replace(planned.found, decisions=decisions))


def deduplicate(
    slices: Sequence[DocumentSlice],
    choices: DedupChoices,
    store_place: str,
    build_shards: BuildShards,
    *,
    rebuild: bool,
) -> Decisions:
    """Decide on every document of the slices, reusing valid results in the store at `store_place`.

    Raises InputError for unreadable evaluations, RunError for a failed round.
    """

    def run(name: str, pending: Sequence[PlannedShard], common: Mapping[str, Any]) -> None:
        arguments = {"evaluations": common["evaluations"]}
        build_shards(Step(f"dedup-{name}", build_round), pending, Store(store_place, KIND), arguments, rebuild=rebuild)

    return decide(slices, choices, store_place, run, rebuild=rebuild)


def build_round(shard: PlannedShard, store: Store, evaluations: Sequence[Mapping[str, Any]]) -> Receipt:
    """Build one shard of a round in this process; `evaluations` are records."""
    return build_shard(shard, store, evaluations_from(evaluations))


def without_duplicates(
    normalized: Sequence[Finished], choices: DedupChoices, store: Store, build_shards: BuildShards, *, rebuild: bool
) -> Deduplicated:
    """Normalized Harmony shards after deduplication. Shards without rows are unchanged; with mode=off, all are."""
    with_rows = [item for item in normalized if item.receipt.documents]
    if choices.mode == "off" or not with_rows:
        return Deduplicated(normalized)
    slices = document_slices(with_rows, store)
    decisions = deduplicate(slices, choices, store.place, build_shards, rebuild=rebuild)
    plan = plan_marked(with_rows, decisions.digests, choices.mode, store, rebuild=rebuild)
    build_shards(MARK, plan.pending, store, {"decisions": decisions.uri}, rebuild=rebuild)
    marked, _ = collect(plan, allow_partial=False)
    of_place = {item.shard.place: item for item in marked}
    final = [of_place.get(item.shard.place, item) for item in normalized]
    return Deduplicated(final, decisions.files, decisions.facts)


MARK = Step("mark-shards", mark_shard)


def release_dedup(planned: DedupPlan, finished: Sequence[Finished]) -> Release:
    """Folders of rows, and the manifest's facts about duplicates. Raises RunError unless shards and decisions agree."""
    decisions = planned.found.decisions
    if decisions is None:
        raise RunError("no decisions about duplicates yet; build the preparation before publishing it")
    if len(finished) == len(planned.plan.shards):
        _require_all_decided(finished, decisions)
    return Release(RowsLayout(planned.blend, decisions.files), {"duplicates": dict(decisions.facts)})


def _require_all_decided(finished: Sequence[Finished], decisions: Decisions) -> None:
    """Raises RunError unless the shards dropped or marked exactly the decided rows."""
    found = sum((Counter(item.receipt.facts["outcomes"]) for item in finished), Counter[str]())
    wanted = {reason: count for reason, count in decisions.tally.items() if reason != KEPT}
    if found != Counter(wanted):
        raise RunError(
            f"the shards account for {dict(found)}, but {wanted} was decided; run the same command with force=true"
        )


DEDUP = Preparation(
    name=KIND,
    settings=DedupSettings,
    libraries=("tokenmill", "orjson", "pyarrow"),
    plan=plan_dedup,
    check=require_evaluations,
    step=Step("apply-decisions", apply_decisions),
    arguments=worker_arguments,
    rounds=deduplicate_rows,
    release=release_dedup,
    inspect=inspect_dedup_shard,
    formats={KIND: range(3, FORMAT_VERSION + 1)},
    next_steps="use:   tokenmill pretrain {0}/blend.json --output-dir DIR",
    training_advice="prepare its output: tokenmill pretrain or tokenmill sft with {path}/blend.json",
    hidden=frozenset({"holdout"}),
)
