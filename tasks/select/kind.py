"""Harmony normalization: chat data of many shapes becomes one strict format, without duplicates, in pools.

    normalize shards ─► find duplicates ─► mark shards ─► select pools and candidates ─► publish

All steps run on one cluster: normalized shards are the sources of marked shards, and these of selections.

A selection publishes these files next to its rows:

    OUT/pools/<pool>/part-00000-1a2b3c4d.parquet    the list of each pool's rows, or copies of them; no folder for an empty pool
    OUT/pools.json                                  predicate, rows and tokens of each pool, and the rows that any two share
    OUT/candidates/part-00000-1a2b3c4d.parquet      a text per row to embed
    OUT/behaviours.md, behaviours.json              the behaviors of the candidates, and whether they have collapsed
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import orjson
from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.chat.shapes import given_of, shape_name
from tokenmill.tasks.dedup.apply import Deduplicated
from tokenmill.tasks.dedup.contamination import find_evaluations
from tokenmill.tasks.dedup.kind import without_duplicates
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.inventory import merged
from tokenmill.tasks.harmony.message import TEMPLATE_VERSION
from tokenmill.tasks.harmony.planning import FORMAT_VERSION as ROWS_VERSION
from tokenmill.tasks.harmony.planning import KIND as ROWS
from tokenmill.tasks.harmony.planning import plan_harmony, require_choices
from tokenmill.tasks.harmony.publication import Beside, DataLayout, published_split
from tokenmill.tasks.harmony.settings import HarmonyRecipe
from tokenmill.tasks.harmony.shard import FILE, normalize_shard
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.shards.kind import BuildShards, Kind, Planned, Release, Stage, bad_row_policy, run_stage
from tokenmill.tasks.shards.manifest import MANIFEST
from tokenmill.tasks.shards.plan import Finished, Plan, PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store, read_bytes
from tokenmill.tasks.sources.files import Record
from tokenmill.tasks.storage import absolute, join
from xxhash import xxh3_128_hexdigest

from .collapse import Survey, collapse
from .pools import added
from .pools import manifest as pools_manifest
from .scores import find_scores
from .settings import NormalizationSettings, SelectionChoices
from .shard import (
    FORMAT_VERSION,
    KIND,
    PART,
    SURVEY,
    inspect_normalization_shard,
    plan_selection,
    pool_part,
    pools_of,
    require_fitting,
    require_selectable,
    select_shard,
)

POOLS, BEHAVIOURS = "pools", "behaviours"


def beside(selected: Sequence[Finished], deduplicated: Deduplicated, choices: SelectionChoices, store: Store) -> Beside:
    """Return a selection's shards, with their folders, reports, and the duplicate record."""
    final = deduplicated.final
    pools = pools_of(choices)
    tallies = [item.receipt.facts["tally"] for item in selected if "tally" in item.receipt.facts]
    # What the pools were made from: readers of pools.json can tell whether it still fits the rows.
    inputs = {item.key: output.xxh3_128 for item in final for output in item.receipt.outputs if output.path == FILE}
    surveys = (orjson.loads(store.read(item.receipt, SURVEY)) for item in selected)
    found = collapse(reduce(merged, surveys, Survey().record()), choices.limits)
    listed = pools_manifest(pools, added(tallies, len(pools.pools)), inputs)
    documents = {
        f"{BEHAVIOURS}.json": _json({**found.facts, "problems": list(found.problems)}),
        f"{BEHAVIOURS}.md": found.markdown.encode(),
    }
    if pools.pools:  # without pools, an earlier list of them goes
        documents[f"{POOLS}.json"] = _json(listed)
    folders = {pool_part(number): f"{POOLS}/{name}" for number, name in enumerate(pools.names)}
    header = {
        "dedup": dict(deduplicated.facts),
        "selection": {
            "pools": {name: {"rows": pool["rows"], "tokens": pool["tokens"]} for name, pool in listed["pools"].items()},
            "candidates": sum(item.receipt.documents for item in selected),
            "without_score": {
                place: sum(item.receipt.facts["without_score"][number] for item in selected)
                for number, place in enumerate(choices.scores)
            },
            "collapsed": list(found.problems) if choices.limits.structures or choices.limits.calls else [],
        },
    }
    return Beside(selected, {PART: PART, **folders}, deduplicated.files, documents, header)


def _json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2)


MAX_POOLS = 8
"""The maximum number of pools in a summary."""


@dataclass(frozen=True)
class Normalized:
    """The shards after deduplication, and what to publish beside them."""

    final: Sequence[Finished]
    beside: Beside


NormalizationPlan = Planned[NormalizationSettings, Normalized | None]


def build_harmony_shard(shard: PlannedShard, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build one planned shard in this process."""
    return normalize_shard(shard, HarmonyRecipe(**shard.identity["recipe"]), store, on_bad_row)


def select(
    final: Sequence[Finished], choices: SelectionChoices, store: Store, build_shards: BuildShards, *, rebuild: bool
) -> Plan:
    """Return the shards of pools and candidates, one for each final shard with rows, all with valid receipts.

    Raises InputError for settings that do not fit the columns, and for scores of other rows.
    """
    require_selectable(choices)
    with_rows = [item for item in final if item.receipt.documents]  # the others have no file to read
    scores = find_scores(choices.scores, with_rows, store)
    plan = plan_selection(with_rows, choices, scores, store, rebuild=rebuild)
    return run_stage(SELECT, plan, build_shards, {"scores": dict(scores.places)}, rebuild=rebuild)


SELECT = Stage("select-rows", select_shard)


def _digest(value: object) -> str:
    return xxh3_128_hexdigest(orjson.dumps(value))


class Normalization(Kind[NormalizationSettings, Normalized | None]):
    """Chat data in Harmony."""

    name = "harmony"
    settings = NormalizationSettings
    libraries = ("tokenmill", "openai-harmony", "orjson", "pyarrow")
    stages = (Stage("normalize-shards", build_harmony_shard, arguments=bad_row_policy),)
    formats = {ROWS: range(4, ROWS_VERSION + 1), KIND: range(2, FORMAT_VERSION + 1)}
    next_steps = "tokenmill sft {0}/blend.json --output-dir packs chat_template=harmony"
    training_advice = "pack it first: tokenmill sft {path}/blend.json --output-dir PACKS chat_template=harmony"
    hidden = frozenset({"holdout"})

    def plan(self, blend: Blend, settings: NormalizationSettings, output_dir: str | None) -> NormalizationPlan:
        if output_dir is not None:  # a plan without one is shown, and writes nothing
            require_fitting(settings, output_dir)
        planned = plan_harmony(blend, settings, output_dir)
        return Planned(planned.blend, settings, planned.output_dir, planned.plan, None)

    def check(self, blend: Blend, settings: NormalizationSettings, output_dir: str) -> None:
        require_fitting(settings, output_dir)
        require_choices(blend, settings)

    def shape(self, source: DataSource, record: Record) -> str | None:
        if source.converter != "openai_messages":
            return f"{source.converter} rows"
        return shape_name(record, source.messages_field, given_of(source.named_fields))

    def build(self, planned: NormalizationPlan, build_shards: BuildShards) -> NormalizationPlan:
        settings, store = planned.settings, planned.plan.store
        planned = super().build(planned, build_shards)
        rows = without_duplicates(planned.last, settings.dedup, store, build_shards, rebuild=settings.force)
        selected = select(rows.final, settings.selection, store, build_shards, rebuild=settings.force)
        found = Normalized(rows.final, beside(selected.finished, rows, settings.selection, store))
        return replace(planned, found=found, later=(*([rows.marked] if rows.marked else []), selected))

    def release(self, planned: NormalizationPlan, finished: Sequence[Finished]) -> Release:
        found = planned.found or Normalized(finished, Beside())
        splits = [published_split(shard.identity["recipe"]) for shard in planned.plan.shards]
        return Release(DataLayout(splits, found.beside), {"template_version": TEMPLATE_VERSION}, shards=found.final)

    def inspect(self, store: Store, receipt: Receipt) -> list[str]:
        return inspect_normalization_shard(store, receipt)

    def accept(self, manifest: Manifest, output_dir: str) -> None:
        if problems := manifest["selection"]["collapsed"]:  # published all the same, so that its report can be read
            raise RunError(f"{output_dir}: published, but behaviors have collapsed: {'; '.join(problems)}")

    def named_files(self, settings: NormalizationSettings) -> Mapping[str, str]:
        pools, scores = pools_of(settings.selection), settings.selection.scores
        evaluations = find_evaluations(settings.dedup.evaluations)
        return {
            "selection.pools": _digest(
                [
                    [predicate.text for predicate in pools.base],
                    [[pool.name, pool.predicate.text] for pool in pools.pools],
                ]
            ),
            # A manifest has the keys of its shards, and they have the hashes of the scored rows.
            "selection.scores": _digest(
                [xxh3_128_hexdigest(read_bytes(join(absolute(place), MANIFEST)) or b"") for place in scores]
            ),
            "dedup.evaluations": _digest([[file.name, file.text_field, file.part.content] for file in evaluations]),
        }

    def summary(self, manifest: Manifest) -> list[str]:
        selection, tally = manifest["selection"], manifest["dedup"].get("tally", {})
        lines = [
            f"{outcome.replace('_', ' ')}: {counted(count, 'row')}"
            for outcome, count in tally.items()
            if outcome != "kept"
        ]
        pools = sorted(selection["pools"].items(), key=lambda pool: -pool[1]["rows"])
        if filled := [f"{name} {pool['rows']:,}" for name, pool in pools if pool["rows"]]:
            more = f" and {len(filled) - MAX_POOLS} more" if len(filled) > MAX_POOLS else ""
            lines.append(f"pools: {', '.join(filled[:MAX_POOLS])}{more}")
        lines.append(f"candidates to embed: {selection['candidates']:,}")
        for place, count in selection["without_score"].items():
            lines.append(f"without a score of {place}: {counted(count, 'row')}")
        return lines


HARMONY = Normalization()
