"""Planning the deduplication of a blend of text: blend and settings in, every slice with its identity out. No Prefect,
no Dask.

What is planned is the signing of slices. What becomes of their rows is known when duplicates are found, and so are the
shards that are published: each is a signed slice and what was decided about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from sys import maxsize
from typing import Any

from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.shards.plan import Plan
from tokenmill.tasks.shards.planning import places, plan_shards, require_no
from tokenmill.tasks.shards.usable import require_separate
from tokenmill.tasks.sources.discovery import name_within
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import format_of
from tokenmill.tasks.sources.parquet import require_any, require_text
from tokenmill.tasks.sources.slices import cut
from tokenmill.tasks.tokenize.gate import Verdict

from .decisions import Decisions
from .deduplication import DocumentSlice, planned_rounds
from .evaluations import evaluation_sources
from .rounds import FORMAT_VERSION, KIND
from .settings import DedupSettings

EVERY_FIELD: Sequence[str] = ()


@dataclass(frozen=True)
class DedupPlan:
    """The plan, the settings it was made with, and the documents of each shard. There are no tokens for a gate to judge."""

    blend: Blend
    settings: DedupSettings
    output_dir: str
    plan: Plan
    slices: Sequence[DocumentSlice]
    verdicts: Mapping[str, Verdict]

    def decided(self, decisions: Decisions) -> "DedupPlan":
        """The plan of what is published once it is decided what becomes of each row."""
        shards = [
            replace(shard, identity={**shard.identity, "decided": {"mode": self.settings.mode, "outcomes": digest}})
            for shard, digest in zip(self.plan.shards, decisions.digests, strict=True)
        ]
        plan = Plan.of(self.plan.store, shards, rebuild=self.settings.force)
        return replace(self, plan=replace(plan, skipped=self.plan.skipped))


@dataclass(frozen=True, slots=True)
class _TextRecipe:
    """What tells slices apart before it is known how many partitions there are."""

    text_field: str


def plan_dedup(blend: Blend, settings: DedupSettings, output_dir: str | None) -> DedupPlan:
    """Plan `blend` for `output_dir`; without one, nothing counts as built and hashes are remembered per user.

    Raises InputError for anything that a person must mend first.
    """
    output_dir, store = places(blend, settings, output_dir, KIND)
    require_separate(evaluation_sources(settings.evaluations), store.place, output_dir)

    def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[_TextRecipe]:  # noqa: ARG001 - of any plan
        require_no(source, ["used_in", "filters", "converter", "transforms"], "deduplication")
        _require_text_in_first(source, slices)
        return [_TextRecipe(source.text_field)] * len(slices)

    unsigned = settings.model_copy(update={"force": True})  # these identities are of no shards that could be proven
    found = plan_shards(blend, unsigned, store, FORMAT_VERSION, lambda _: EVERY_FIELD, require_any, recipes)
    sources = {(split, source.name): source for split, listed in blend.parts().items() for source in listed}
    slices = [
        _documents(sources[shard.split, shard.dataset], shard.split, shard.part, settings) for shard in found.shards
    ]
    signed, _, _ = planned_rounds(slices, settings.choices, store)
    shards = [replace(one, identity=other.identity) for one, other in zip(found.shards, signed, strict=True)]
    plan = replace(Plan.of(store, shards, rebuild=settings.force), skipped=found.skipped)
    return DedupPlan(blend, settings, output_dir, plan, slices, {})


def _require_text_in_first(source: DataSource, slices: Sequence[Slice]) -> None:
    """Raises InputError unless the first columnar file has the text field; reading checks the others."""
    part = next((part for part in slices if format_of(part.file).columnar), None)
    if part is not None:
        cut(part.file, maxsize, [source.text_field], require_text)


def _documents(source: DataSource, split: str, part: Slice, settings: DedupSettings) -> DocumentSlice:
    options: dict[str, Any] = {
        "text_field": source.text_field,
        "id_field": settings.id_field,
        "cap_by": settings.cap_by,
    }
    name = f"{split}/{source.name}" if split in SPLITS else source.name
    return DocumentSlice("text", part, options, f"{name}/{name_within(source.path, part.file.uri)}@{part.start}")
