"""SFT: conversations become packed Parquet with exact loss masks.

    tokenize conversations ─► pack sequences ─► publish

Sequences are stored once; packs are made from them in a second round (`packs`), so that packing settings don't change earlier shards.
Planning checks template and tokenizer (`tasks.chat.check`, for Harmony `tasks.harmony.training`), and reads a sample of the
text of each dataset for the exactness gate.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import orjson
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.chat.check import text_encoder
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.programs import ProgramError
from tokenmill.tasks.chat.sequences import SplitTurns
from tokenmill.tasks.chat.shapes import given_of, shape_name
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.shards.kind import Kind, Planned, Release, Stage
from tokenmill.tasks.shards.manifest import derived_entries
from tokenmill.tasks.shards.plan import WHOLE, Finished, Plan, PlannedShard
from tokenmill.tasks.shards.planning import held_out, places, plan_shards, require_no
from tokenmill.tasks.shards.publication import blend_weights, mix_header, mix_of
from tokenmill.tasks.shards.receipt import Receipt, recipe_of
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Record, Slice
from tokenmill.tasks.sources.formats import read_records
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.sources.row_filter import row_filter
from tokenmill.tasks.tokenize.gate import Gate, Verdict, gate_notes
from tokenmill.tasks.tokenize.load import commit_notes, commit_of, find_vocabulary, pinned, planned_vocabulary
from tokenmill.tasks.tokenize.settings import SpecialTokens, TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .formats import (
    CheckedFormat,
    Format,
    Rows,
    Template,
    checked_format,
    find_template,
    format_of,
    with_template,
    without_programs,
)
from .packs import FORMAT_VERSION as PACKS_VERSION
from .packs import PACKS, SHARDS, build_packs, inspect_sft_shard, plan_packs, require_fitting
from .publication import PackedLayout
from .settings import PackRecipe, SftRecipe, SftSettings, policy_of
from .shard import SequenceShard

FORMAT_VERSION = 12
"""Increase it when the same recipe and source give different bytes."""


@dataclass(frozen=True)
class SftFound:
    """The vocabulary, the checked template, the gate's verdict on each dataset (by `split/name`), and how to pack."""

    vocabulary: Vocabulary
    checked: CheckedFormat
    verdicts: Mapping[str, Verdict]
    packing: PackRecipe

    @property
    def template(self) -> Template:
        return self.checked.format.template


SftPlan = Planned[SftSettings, SftFound]


def _texts(rows: Rows[Any], part: Slice) -> Iterator[str]:
    """The texts of the conversations in a slice."""
    for batch in read_records(part, [*rows.fields]):
        for record in batch.records:
            found = rows.read(record)
            if not isinstance(found, Rejected):
                yield from rows.texts(found)


def worker_arguments(planned: SftPlan) -> dict[str, Any]:
    """Return the arguments that workers get besides the shard."""
    settings = planned.settings
    return {
        "tokenizer": pinned(settings.tokenizer, planned.found.vocabulary.commit).model_dump(),
        "template": planned.found.template.source,
        "on_bad_row": settings.on_bad_row,
    }


def build_sft_shard(
    shard: PlannedShard, store: Store, tokenizer: Mapping[str, Any], template: str, on_bad_row: OnBadRow
) -> Receipt:
    """Build one planned shard in this process; `template` is the source of the template.

    Raises RunError if the tokenizer or template found here differs from the plan's.
    """
    recipe = SftRecipe(**shard.identity["recipe"])
    vocabulary = planned_vocabulary(TokenizerSource.model_validate(tokenizer), recipe.tokenizer)
    variables = orjson.dumps(recipe.template_variables, option=orjson.OPT_SORT_KEYS)
    chat = _format(
        template, variables, vocabulary, policy_of(recipe), recipe.split_turns, recipe.special_tokens_in_text
    )
    # A worker may have a different version of the package, whose built-in templates differ.
    if chat.template.digest != recipe.template:
        raise RunError(f"chat_template: {chat.template.digest} on this worker but {recipe.template} in the plan")
    encoder = text_encoder(vocabulary, chat.controls, recipe.backend, recipe.special_tokens_in_text)
    rows = chat.rows(recipe.messages_field, recipe.tools_field, given_of(recipe.fields))
    # Programs compare their results with rendered ones, again and again, and a difference makes all of theirs doubtful.
    try:
        return SequenceShard(shard, recipe, rows, encoder, store).build(on_bad_row)
    except ProgramError as error:
        logging.getLogger(__name__).warning("%s; the whole shard is rendered instead, which is slower", error)
        return SequenceShard(shard, recipe, without_programs(rows), encoder, store).build(on_bad_row)


@lru_cache(maxsize=8)
def _format(
    source: str, variables: bytes, vocabulary: Vocabulary, policy: LossPolicy, split_turns: SplitTurns,
    special: SpecialTokens,
) -> Format:  # fmt: skip
    """Cached, because probing a template takes about 30 ms."""
    return format_of(source, orjson.loads(variables), vocabulary, policy, split_turns, special)


def pack_counts(manifest: Manifest) -> dict[str, Any]:
    """Return the packs of each split, published and prepared (which `sampling` may repeat or omit), and the excluded packs."""
    prepared: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    packed = derived_entries(manifest)
    for entry in packed:
        for name in entry["documents"]:
            # What isn't held out, of a blend that lists no splits, is training data.
            split = name if name != WHOLE else entry["split"] if entry["split"] in SPLITS else "train"
            prepared.setdefault(split, Counter()).update(entry["facts"][name])
    for entry in [*manifest["shards"], *packed]:
        counts.update({name: entry["facts"].get(name, 0) for name in EXCLUDED})
    counts["truncated"] = manifest["totals"]["truncated"]
    published = manifest.get("sampling", {}).get("published", prepared)
    sampled = manifest["settings"]["sampling"] != "none"
    return {
        "packs": {split: {name: published[split][name] for name in COUNTED} for split in SPLITS if split in published},
        "packs_before_sampling": {split: prepared[split]["packs"] for split in SPLITS if split in prepared and sampled},
        "left_out": {name: counts[name] for name in EXCLUDED if counts[name]},
    }


def packing_lines(manifest: Manifest) -> list[str]:
    """Return lines about packs and trained tokens of each split, and about parts that are excluded from training."""
    found, size = pack_counts(manifest), manifest["settings"]["pack_size"]
    lines: list[str] = []
    for split, facts in found["packs"].items():
        full = (facts["tokens"] + facts["padding"]) / (facts["packs"] * size)
        lines.append(
            f"{split}: {counted(facts['packs'], 'pack')} of {counted(facts['sequences'], 'sequence')}, {full:.2%} full, "
            f"{facts['loss_tokens'] / facts['tokens']:.1%} of the tokens trained on"
        )
    before = found["packs_before_sampling"]
    said = ", ".join(
        f"{split} {before[split]:,} and {found['packs'].get(split, {'packs': 0})['packs']:,}" for split in before
    )
    lines += [f"packs prepared, and published by sampling={manifest['settings']['sampling']}: {said}"] if said else []
    for name, count in found["left_out"].items():
        noun, fate = EXCLUDED[name]
        lines.append(f"{counted(count, noun)} {fate}")
    return lines


COUNTED = ("packs", "sequences", "tokens", "padding", "loss_tokens")
"""The counts of packs."""

EXCLUDED = {
    "truncated": ("conversation", "with a sequence that is cut to the size of a pack"),
    "oversize_sequences": ("sequence", "longer than a pack, excluded"),
    "nothing_trained_in_pack_sequences": ("sequence", "with only masked tokens before the cut, excluded"),
    "straddled_tokens": ("token", "across a boundary of the loss, not trained on"),
    "flagged_messages": ("message", "excluded from training by the data, in whole or in part"),
}
"""The facts of shards about masked tokens: the counted noun, and the rest of the line."""


def plan_packing(planned: SftPlan, finished: Sequence[Finished]) -> Plan:
    """Plan packs. Raises RunError as `require_fitting` does."""
    store, recipe = planned.plan.store, planned.found.packing
    require_fitting(finished, store, recipe)
    return plan_packs(finished, store, recipe, rebuild=planned.settings.force)


class FineTuning(Kind[SftSettings, SftFound]):
    """Conversations as packs."""

    name = "sft"
    settings = SftSettings
    libraries = ("tokenmill", "gigatoken", "fastokens", "tokenizers", "tiktoken", "jinja2", "pyarrow", "numpy")
    stages = (
        Stage("tokenize-conversations", build_sft_shard, arguments=worker_arguments),
        Stage("pack-sequences", build_packs, plan_packing, in_threads=True),
    )
    formats = {SHARDS: range(6, FORMAT_VERSION + 1), PACKS: range(1, PACKS_VERSION + 1)}
    tokens = "packs"
    next_steps = (
        "tokenmill view {0} --random\n"
        "tokenmill train {0} --output-dir model launcher=megatron-bridge sequence_length={manifest[settings][pack_size]}"
    )

    def plan(self, blend: Blend, settings: SftSettings, output_dir: str | None) -> SftPlan:
        output_dir, store = places(blend, settings, output_dir, "sft")
        vocabulary = find_vocabulary(settings.tokenizer)
        settings = with_template(settings, vocabulary)
        if settings.pad_seq_to_mult > 1 and vocabulary.eos is None:
            raise InputError(
                f"pad_seq_to_mult={settings.pad_seq_to_mult}: sequences are padded with EOS, and {settings.tokenizer.model!r} "
                "does not name its EOS token; set eos_token in a tokenizer_config.json next to it"
            )
        checked = checked_format(settings, vocabulary, settings.policy, store.place)
        chats: dict[bytes, Format] = {}
        verdicts: dict[str, Verdict] = {}

        def chat_of(source: DataSource) -> Format:
            # Datasets with their own variables have their own checked format, one for equal variables.
            if not source.template_variables:
                return checked.format
            variables = {**settings.template_variables, **source.template_variables}
            key = orjson.dumps(variables, option=orjson.OPT_SORT_KEYS)
            if key not in chats:
                own = settings.model_copy(update={"template_variables": variables})
                chats[key] = checked_format(own, vocabulary, settings.policy, store.place).format
            return chats[key]

        def rows_of(source: DataSource) -> Rows[Any]:
            return chat_of(source).rows(source.messages_field, source.tools_field, given_of(source.named_fields))

        def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[SftRecipe]:
            require_no(source, ["converter", "transforms", "fim"], "SFT")
            rows, literal = rows_of(source), settings.special_tokens_in_text != "allow"
            chat = chat_of(source)
            controls = frozenset(chat.controls.ids)
            which = orjson.dumps([rows.fields, sorted(controls)]).decode()
            # The template's control tokens are special also where the tokenizer lists them as ordinary ones.
            guarded = vocabulary.guarding(controls)
            verdict = Gate(guarded, slices, partial(_texts, rows), which, store.place, literal).verdict()
            verdicts[f"{split}/{source.name}"] = verdict
            recipe = recipe_of(
                SftRecipe,
                settings,
                messages_field=source.messages_field,
                tools_field=source.tools_field,
                fields=source.named_fields,
                filters=row_filter(source).wanted,
                tokenizer=vocabulary.fingerprint,
                vocabulary_size=vocabulary.size,
                backend=verdict.backend,
                template=chat.template.digest,
                template_variables=chat.template.variables,
                **held_out(settings, split),
            )
            return [recipe] * len(slices)

        plan = plan_shards(
            blend, settings, store, FORMAT_VERSION, lambda source: [*rows_of(source).fields], require_any, recipes, form="conversations"
        )  # fmt: skip
        pad_id = None if settings.pad_seq_to_mult == 1 else vocabulary.eos  # without padding it changes no byte
        packing = recipe_of(PackRecipe, settings, oversize=settings.on_oversize, pad_id=pad_id)
        notes = commit_notes(settings.tokenizer, vocabulary) | gate_notes(verdicts)
        return Planned(blend, settings, output_dir, plan, SftFound(vocabulary, checked, verdicts, packing), notes)

    def check(self, blend: Blend, settings: SftSettings, output_dir: str) -> None:
        if blend.phases:
            raise InputError("phases: trainers read a folder with packs in any order; prepare a blend for each phase")
        if blend.budgeted and settings.sampling == "none":
            raise InputError(
                "sampling=none publishes all packs once; set sampling=down or sampling=up to follow the budget"
            )
        find_template(settings, find_vocabulary(settings.tokenizer))

    def shape(self, source: DataSource, record: Record) -> str | None:
        return shape_name(record, source.messages_field, given_of(source.named_fields))

    def outlook(self, planned: SftPlan) -> list[str]:
        plan, size = planned.plan, planned.settings.pack_size
        # Groups are made of finished shards, whose tokens are known only then.
        if plan.pending:
            return [f"then all sequences are packed, {size:,} tokens to a pack"]
        packs = plan_packs(plan.finished, plan.store, planned.found.packing)
        count = f"{len(packs.pending)} of {len(packs.keys)} groups of sequences to pack"
        return [f"{count}, {size:,} tokens to a pack, {packs.pending_bytes / 1e9:,.2f} GB"]

    def release(self, planned: SftPlan, finished: Sequence[Finished]) -> Release:
        found, settings = planned.found, planned.settings
        packs = planned.last
        mix = mix_of(planned.blend, finished)
        layout = PackedLayout(
            packs,
            blend_weights(planned.blend, mix),
            settings.sampling,
            settings.seed,
            settings.pack_size,
            settings.pad_seq_to_mult,
            planned.blend.total,
        )
        header = {
            **mix_header(mix),
            "tokenizer": {
                "fingerprint": found.vocabulary.fingerprint,
                **commit_of(found.vocabulary),
                "vocabulary_size": found.vocabulary.size,
                "gate": {name: asdict(verdict) for name, verdict in found.verdicts.items()},
            },
            "template": {
                "digest": found.template.digest,
                "controls": dict(found.checked.format.controls.ids),
                "refused": found.checked.refused,
                "warnings": found.checked.warnings,
            },
        }
        return Release(layout, header, last=packs)

    def inspect(self, store: Store, receipt: Receipt) -> list[str]:
        return inspect_sft_shard(store, receipt)

    def summary(self, manifest: Manifest) -> Sequence[str]:
        return packing_lines(manifest)

    def record(self, manifest: Manifest) -> Mapping[str, Any]:
        return pack_counts(manifest)


SFT = FineTuning()
