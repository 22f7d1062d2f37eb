"""Filter a blend of text: keep the documents that pass quality rules, in requested languages, without personal data.

    plan ─► judge and write the rows of each slice ─► publish

Every drop is counted with the name of the rule that failed first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.dedup.apply import require_text_in_first
from tokenmill.tasks.dedup.kind import inspect_rows, rows_layout
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.shards.kind import Kind, Planned, Release, Stage
from tokenmill.tasks.shards.plan import Finished
from tokenmill.tasks.shards.planning import places, plan_shards, require_no
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.parquet import require_any

from .models import identified, require_labels
from .personal import total
from .settings import FilterSettings
from .shard import FilterRecipe, filter_shard

FORMAT_VERSION = 2
EVERY_FIELD: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class FilterFound:
    """Where the models are, by the hash of their content."""

    paths: Mapping[str, str]


FilterPlan = Planned[FilterSettings, FilterFound]


def worker_arguments(planned: FilterPlan) -> dict[str, Any]:
    """Return the arguments for workers."""
    return {"paths": dict(planned.found.paths), "on_bad_row": planned.settings.on_bad_row}


class Filter(Kind[FilterSettings, FilterFound]):
    """See the module."""

    name = "filter"
    settings = FilterSettings
    libraries = ("tokenmill", "orjson", "pyarrow")
    stages = (Stage("filter-documents", filter_shard, arguments=worker_arguments),)
    formats = {"filter": range(1, FORMAT_VERSION + 1)}
    next_steps = "tokenmill pretrain {0}/blend.json --output-dir prepared"
    training_advice = "prepare its output: tokenmill pretrain with {path}/blend.json"
    hidden = frozenset({"holdout"})

    def plan(self, blend: Blend, settings: FilterSettings, output_dir: str | None) -> FilterPlan:
        output_dir, store = places(blend, settings, output_dir, "filter")
        models, paths = identified(settings)
        rules = [{"family": name, **getattr(settings, name).model_dump()} for name in settings.rules]
        personal = settings.personal
        # Masks don't matter where nothing is looked for, so they aren't in the recipe then.
        treated = {"off"} != {personal.emails, personal.ips, personal.secrets}

        def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[FilterRecipe]:  # noqa: ARG001 - any plan's
            require_no(source, ["converter", "transforms", "template_variables"], "filtering")
            require_text_in_first(source, slices)
            recipe = FilterRecipe(source.text_field, rules, models, personal.model_dump() if treated else None)
            return [recipe] * len(slices)

        # Rows are published with all of their fields, file by file.
        plan = plan_shards(
            blend,
            settings,
            store,
            FORMAT_VERSION,
            lambda _: EVERY_FIELD,
            require_any,
            recipes,
            bundles=False,
            form="documents",
        )
        return Planned(blend, settings, output_dir, plan, FilterFound(paths))

    def check(self, blend: Blend, settings: FilterSettings, output_dir: str) -> None:
        require_labels(settings)

    def release(self, planned: FilterPlan, finished: Sequence[Finished]) -> Release:
        found = total([item.receipt.facts.get("personal", {}) for item in finished])
        return Release(rows_layout(planned.blend), {"personal": found} if found else {})

    def inspect(self, store: Store, receipt: Receipt) -> list[str]:
        return inspect_rows(store, receipt)

    def summary(self, manifest: Manifest) -> Sequence[str]:
        return [
            f"personal data, {name}: {found['found']:,} in {counted(found['documents'], 'document')}"
            for name, found in manifest.get("personal", {}).items()
        ]


FILTER = Filter()
