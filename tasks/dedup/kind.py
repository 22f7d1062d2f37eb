"""Deduplicate a blend of text: remove duplicates and documents that overlap evaluations; keep other rows unchanged.

    sign slices ─► find duplicates, in rounds by partition ─► write kept rows ─► publish

The plan covers only the signing of slices. The shards to publish are planned once duplicates are found: each is a signed slice
and the decisions about it.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.shard import FILE
from tokenmill.tasks.shards.kind import BuildShards, Kind, Planned, Release, Stage, run_stage
from tokenmill.tasks.shards.plan import WHOLE, Finished, Plan
from tokenmill.tasks.shards.planning import places, plan_shards, require_no, require_separate
from tokenmill.tasks.shards.publication import FolderLayout
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.shards.receipt import Receipt, TextRecipe
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.discovery import name_within
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.sources.json_lines import split_lines
from tokenmill.tasks.sources.opening import BLOCK_BYTES
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.storage import join, open_binary

from .apply import Deduplicated, apply_decisions, mark_shard, require_text_in_first
from .contamination import evaluation_sources, find_evaluations
from .decisions import KEPT, Decisions
from .rounds import FORMAT_VERSION, KIND, VALUES_VERSION, DocumentSlice, decide, planned_rounds
from .settings import DedupChoices, DedupSettings

EVERY_FIELD: Sequence[str] = ()


@dataclass(frozen=True)
class DedupFound:
    """The documents of each planned slice, and later the decisions about them."""

    slices: Sequence[DocumentSlice]
    decisions: Decisions | None = None


DedupPlan = Planned[DedupSettings, DedupFound]


def worker_arguments(planned: DedupPlan) -> dict[str, Any]:
    """Return the arguments for workers that write kept rows."""
    decisions = planned.found.decisions
    return {"outcomes": decisions.uri if decisions else "", "on_bad_row": planned.settings.on_bad_row}


def decided_plan(planned: DedupPlan, decisions: Decisions) -> DedupPlan:
    """Return the plan of the published shards, given the decisions."""
    shards = [
        replace(shard, identity={**shard.identity, "decided": {"mode": planned.settings.mode, "outcomes": digest}})
        for shard, digest in zip(planned.plan.shards, decisions.digests, strict=True)
    ]
    plan = planned.plan.of_other(shards, rebuild=planned.settings.force)
    return replace(planned, plan=plan, found=replace(planned.found, decisions=decisions))


def without_duplicates(
    normalized: Sequence[Finished], choices: DedupChoices, store: Store, build_shards: BuildShards, *, rebuild: bool
) -> Deduplicated:
    """Normalized Harmony shards after deduplication. Shards without rows are unchanged; with mode=off, all are."""
    with_rows = [item for item in normalized if item.receipt.documents]
    if choices.mode == "off" or not with_rows:
        return Deduplicated(normalized)
    slices: list[DocumentSlice] = []
    for item in with_rows:
        (rows,) = (output for output in item.receipt.outputs if output.path == FILE)
        file = SourceFile(store.path(item.key, FILE), rows.size, "parquet")
        slices.append(DocumentSlice("harmony", Slice(file, 0, rows.size, item.key, size=rows.size)))
    decisions = decide(slices, choices, store.place, build_shards, rebuild=rebuild)
    # A shard whose rows are decided as before isn't rebuilt, even if other datasets have changed.
    shards = [
        item.decided({"mode": choices.mode, "outcomes": digest})
        for item, digest in zip(with_rows, decisions.digests, strict=True)
    ]
    plan = Plan.of(store, shards, rebuild=rebuild)
    marked = run_stage(MARK, plan, build_shards, {"decisions": decisions.uri}, rebuild=rebuild)
    of_place = {item.shard.place: item for item in marked.finished}
    final = [of_place.get(item.shard.place, item) for item in normalized]
    return Deduplicated(final, decisions.files, decisions.facts, marked)


MARK = Stage("mark-shards", mark_shard)


FOLDER = "data"
KEPT_FIELDS = {
    *("weight", "text_field", "share", "tokens", "min_epochs", "max_epochs", "group"),
    *("fim", "license", "languages", "domain"),
}
"""The keys of a dataset that the output's blend copies from the input's."""


def rows_layout(blend: Blend, files: Sequence[tuple[str, Output]] = ()) -> FolderLayout:
    """Row folders by dataset, and other files; blend.json lists the datasets with rows."""
    sources = {(split, source.name): source for split, listed in blend.parts().items() for source in listed}
    folders = {
        (split, name): join(FOLDER, split, name) if split in SPLITS else join(FOLDER, name) for split, name in sources
    }

    def written(output_dir: str, filled: Collection[str]) -> bytes:
        parts: dict[str, list[dict[str, Any]]] = {split: [] for split in blend.parts()}
        for (split, name), source in sources.items():
            if folders[split, name] in filled:
                kept = source.model_dump(mode="json", include=KEPT_FIELDS, exclude_none=True)
                parts[split].append({"name": name, "path": join(output_dir, folders[split, name]), **kept})
        budget = blend.model_dump(mode="json", exclude={"datasets", *SPLITS}, exclude_none=True)
        return orjson.dumps({**budget, **parts}, option=orjson.OPT_INDENT_2)

    return FolderLayout(folders, written, files)


BATCH_ROWS = 8192


def inspect_rows(store: Store, receipt: Receipt) -> list[str]:
    """Problems of a shard's file: unreadable rows, and their number against the receipt."""
    for output in receipt.outputs:
        stem, _, ending = output.path.partition(".")
        if stem != WHOLE:
            continue
        place = store.path(receipt.key, output.path)
        try:
            with open_binary(place) as stream:
                if ending == "parquet":
                    read = pq.ParquetFile(stream).iter_batches(BATCH_ROWS, use_threads=False)
                    rows = sum(map(len, read))
                else:
                    lines = chain.from_iterable(split_lines(iter(lambda: stream.read(BLOCK_BYTES), b"")))
                    rows = sum(isinstance(line, bytes) and isinstance(orjson.loads(line), dict) for line in lines)
        except (pa.ArrowException, OSError, orjson.JSONDecodeError) as error:
            return [f"{place}: cannot be read: {error}"]
        if rows != receipt.documents:
            return [f"{place}: holds {rows:,} rows, its receipt records {receipt.documents:,}"]
    return []


class Deduplication(Kind[DedupSettings, DedupFound]):
    """Text without duplicates."""

    name = KIND
    settings = DedupSettings
    libraries = ("tokenmill", "orjson", "pyarrow")
    stages = (Stage("apply-decisions", apply_decisions, arguments=worker_arguments),)
    formats = {KIND: range(3, VALUES_VERSION + 1)}
    next_steps = "tokenmill pretrain {0}/blend.json --output-dir prepared"
    training_advice = "prepare its output: tokenmill pretrain or tokenmill sft with {path}/blend.json"
    hidden = frozenset({"holdout"})

    def plan(self, blend: Blend, settings: DedupSettings, output_dir: str | None) -> DedupPlan:
        output_dir, store = places(blend, settings, output_dir, KIND)
        require_separate(evaluation_sources(settings.evaluations), store.place, output_dir)

        def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[TextRecipe]:  # noqa: ARG001 - any plan's
            require_no(source, ["converter", "transforms", "template_variables"], "deduplication")
            require_text_in_first(source, slices)
            return [TextRecipe(source.text_field)] * len(slices)

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
        slices: list[DocumentSlice] = []
        for shard in found.shards:
            source = sources[shard.split, shard.dataset]
            options = {"text_field": source.text_field, "id_field": settings.id_field, "cap_by": settings.cap_by}
            name = f"{shard.split}/{source.name}" if shard.split in SPLITS else source.name
            file = name_within(source.path, shard.part.file.uri)
            slices.append(DocumentSlice("text", shard.part, options, f"{name}/{file}@{shard.part.start}"))
        signed, _, _ = planned_rounds(slices, settings.choices, store)
        shards = [replace(one, identity=other.identity) for one, other in zip(found.shards, signed, strict=True)]
        return Planned(blend, settings, output_dir, found.of_other(shards, rebuild=settings.force), DedupFound(slices))

    def check(self, blend: Blend, settings: DedupSettings, output_dir: str) -> None:
        find_evaluations(settings.evaluations)

    def build(self, planned: DedupPlan, build_shards: BuildShards) -> DedupPlan:
        settings, store = planned.settings, planned.plan.store
        decisions = decide(planned.found.slices, settings.choices, store.place, build_shards, rebuild=settings.force)
        return super().build(decided_plan(planned, decisions), build_shards)

    def release(self, planned: DedupPlan, finished: Sequence[Finished]) -> Release:
        decisions = planned.found.decisions
        if decisions is None:
            raise RunError("no decisions about duplicates yet; build the preparation before publishing it")
        if len(finished) == len(planned.plan.shards):  # a run that goes on without some shards publishes the others
            found = sum((Counter(item.receipt.facts["outcomes"]) for item in finished), Counter[str]())
            wanted = {reason: count for reason, count in decisions.tally.items() if reason != KEPT}
            if found != Counter(wanted):
                raise RunError(
                    f"the shards account for {dict(found)}, but {wanted} was decided; run the same command with force=true"
                )
        return Release(rows_layout(planned.blend, decisions.files), {"duplicates": dict(decisions.facts)})

    def inspect(self, store: Store, receipt: Receipt) -> list[str]:
        return inspect_rows(store, receipt)


DEDUP = Deduplication()
