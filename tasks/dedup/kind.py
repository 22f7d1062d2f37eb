"""Deduplicate a blend of text: remove duplicates and documents that overlap evaluations; keep other rows unchanged.

    sign slices ─► find duplicates, in rounds by partition ─► write kept rows ─► publish

The plan covers only the signing of slices. The shards to publish are planned once duplicates are found: each is a signed slice
and the decisions about it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.input_checks import require_separate
from tokenmill.tasks.shards.kind import BuildShards, Kind, Planned, Release, Stage, run_stage
from tokenmill.tasks.shards.plan import WHOLE, Finished
from tokenmill.tasks.shards.planning import places, plan_shards, require_no
from tokenmill.tasks.shards.publication import Published
from tokenmill.tasks.shards.publish import Output, place_files
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.discovery import name_within
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.json_lines import split_lines
from tokenmill.tasks.sources.opening import BLOCK_BYTES
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.storage import join, open_binary

from .apply import (
    Deduplicated,
    apply_decisions,
    document_slices,
    file_of,
    mark_shard,
    plan_marked,
    require_text_in_first,
)
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


@dataclass(frozen=True, slots=True)
class _TextRecipe:
    """Identifies slices before the number of partitions is known."""

    text_field: str


def _documents(source: DataSource, split: str, part: Slice, settings: DedupSettings) -> DocumentSlice:
    options: dict[str, Any] = {
        "text_field": source.text_field,
        "id_field": settings.id_field,
        "cap_by": settings.cap_by,
    }
    name = f"{split}/{source.name}" if split in SPLITS else source.name
    return DocumentSlice("text", part, options, f"{name}/{name_within(source.path, part.file.uri)}@{part.start}")


def worker_arguments(planned: DedupPlan) -> dict[str, Any]:
    """The arguments for workers that write kept rows."""
    decisions = planned.found.decisions
    return {"outcomes": decisions.uri if decisions else "", "on_bad_row": planned.settings.on_bad_row}


def decided_plan(planned: DedupPlan, decisions: Decisions) -> DedupPlan:
    """The plan of the published shards, given the decisions."""
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
    slices = document_slices(with_rows, store)
    decisions = decide(slices, choices, store.place, build_shards, rebuild=rebuild)
    plan = plan_marked(with_rows, decisions.digests, choices.mode, store, rebuild=rebuild)
    marked = run_stage(MARK, plan, build_shards, {"decisions": decisions.uri}, rebuild=rebuild)
    of_place = {item.shard.place: item for item in marked.finished}
    final = [of_place.get(item.shard.place, item) for item in normalized]
    return Deduplicated(final, decisions.files, decisions.facts, marked)


MARK = Stage("mark-shards", mark_shard)


def _require_all_decided(finished: Sequence[Finished], decisions: Decisions) -> None:
    """Raises RunError unless the shards dropped or marked exactly the decided rows."""
    found = sum((Counter(item.receipt.facts["outcomes"]) for item in finished), Counter[str]())
    wanted = {reason: count for reason, count in decisions.tally.items() if reason != KEPT}
    if found != Counter(wanted):
        raise RunError(
            f"the shards account for {dict(found)}, but {wanted} was decided; run the same command with force=true"
        )


FOLDER = "data"
KEPT_FIELDS = {
    *("weight", "text_field", "share", "tokens", "min_epochs", "max_epochs", "group"),
    *("fim", "license", "languages", "domain"),
}
"""The keys of a dataset that the output's blend copies from the input's."""

PART = re.compile(r"part-\d{5,}-[0-9a-f]{8}\.(jsonl|parquet)")


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """Row folders, and other files: the location of each in the store, and its path in the output folder."""

    blend: Blend
    files: Sequence[tuple[str, Output]] = ()

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        """The files of each dataset."""
        folders = [_folder(split, source.name) for split, listed in self.blend.parts().items() for source in listed]
        return dict.fromkeys(folders, PART)

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        """Link every file on a local disk; on an object store the store copies it."""
        names: dict[str, dict[str, list[str]]] = {}
        numbers: Counter[str] = Counter()
        pairs = [(stored, join(output_dir, output.path)) for stored, output in self.files]
        for item in finished:
            if WHOLE not in item.receipt.parts:
                continue
            file, folder = file_of(item.shard.part), _folder(item.shard.split, item.shard.dataset)
            name = join(output_dir, folder, f"part-{numbers[folder]:05d}-{item.key[:8]}.{file.partition('.')[2]}")
            pairs.append((store.path(item.key, file), name))
            numbers[folder] += 1
            names.setdefault(item.shard.place, {}).setdefault(WHOLE, []).append(name)
        place_files(pairs)
        return Published(names, self._blend(output_dir, numbers), [output for _, output in self.files])

    def _blend(self, output_dir: str, numbers: Mapping[str, int]) -> bytes:
        """The output as a blend, without empty datasets."""
        parts = {
            split: [_source(output_dir, split, source) for source in listed if numbers[_folder(split, source.name)]]
            for split, listed in self.blend.parts().items()
        }
        budget = self.blend.model_dump(mode="json", exclude={"datasets", *SPLITS}, exclude_none=True)
        return orjson.dumps({**budget, **parts}, option=orjson.OPT_INDENT_2)


def _folder(split: str, name: str) -> str:
    return join(FOLDER, split, name) if split in SPLITS else join(FOLDER, name)


def _source(output_dir: str, split: str, source: DataSource) -> dict[str, Any]:
    kept = source.model_dump(mode="json", include=KEPT_FIELDS, exclude_none=True)
    return {"name": source.name, "path": join(output_dir, _folder(split, source.name)), **kept}


BATCH_ROWS = 8192


def inspect_rows(store: Store, receipt: Receipt) -> list[str]:
    """Problems of a shard's file: unreadable rows, and their number against the receipt."""
    for output in receipt.outputs:
        stem, _, ending = output.path.partition(".")
        if stem == WHOLE:
            place = store.path(receipt.key, output.path)
            count = _parquet_rows if ending == "parquet" else _json_rows
            try:
                problem = _miscounted(count(place), receipt.documents)
            except (pa.ArrowException, OSError, orjson.JSONDecodeError) as error:
                problem = f"cannot be read: {error}"
            return [f"{place}: {problem}"] if problem else []
    return []


def _miscounted(rows: int, documents: int) -> str:
    return "" if rows == documents else f"holds {rows:,} rows, its receipt records {documents:,}"


def _parquet_rows(place: str) -> int:
    with open_binary(place) as stream:
        return sum(len(batch) for batch in pq.ParquetFile(stream).iter_batches(BATCH_ROWS, use_threads=False))


def _json_rows(place: str) -> int:
    """The number of lines, each a JSON object. Raises JSONDecodeError for invalid JSON."""
    with open_binary(place) as stream:
        lines = split_lines(iter(lambda: stream.read(BLOCK_BYTES), b""))
        return sum(isinstance(row, bytes) and isinstance(orjson.loads(row), dict) for rows in lines for row in rows)


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

    def check(self, blend: Blend, settings: DedupSettings, output_dir: str) -> None:
        """Raises InputError for missing evaluations."""
        find_evaluations(settings.evaluations)

    def build(self, planned: DedupPlan, build_shards: BuildShards) -> DedupPlan:
        """Decide on every row, and build the shards of kept rows; returns the plan of the published shards."""
        settings, store = planned.settings, planned.plan.store
        decisions = decide(planned.found.slices, settings.choices, store.place, build_shards, rebuild=settings.force)
        return super().build(decided_plan(planned, decisions), build_shards)

    def release(self, planned: DedupPlan, finished: Sequence[Finished]) -> Release:
        """Return the row folders, and the manifest's facts about duplicates. Raises RunError unless shards and decisions agree."""
        decisions = planned.found.decisions
        if decisions is None:
            raise RunError("no decisions about duplicates yet; build the preparation before publishing it")
        if len(finished) == len(planned.plan.shards):
            _require_all_decided(finished, decisions)
        return Release(RowsLayout(planned.blend, decisions.files), {"duplicates": dict(decisions.facts)})

    def inspect(self, store: Store, receipt: Receipt) -> list[str]:
        """See `inspect_rows`."""
        return inspect_rows(store, receipt)


DEDUP = Deduplication()
