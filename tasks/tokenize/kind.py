"""Pretraining: documents become token ids in Megatron `.bin/.idx` pairs.

    tokenize shards ─► join prefixes ─► publish

    OUT/train|valid|test/data_00000_1a2b3c4d.bin/.idx   names for the prefixes' files (hard links on a local disk)
    OUT/phases/                                         blends of phases, for a budget (see `phases`)

Megatron caches its sample index by path, so a name includes digits of its prefix's key. On an object store nothing is renamed or
copied: blend.json points into the store. Planning reads a sample of each dataset for the exactness gate.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import orjson
from tokenmill.tasks.blend.mix import Mix
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.runtime import cores
from tokenmill.tasks.shards.kind import LITTLE_BYTES, Kind, Needs, Planned, Release, Stage
from tokenmill.tasks.shards.manifest import FULL_VALIDATION, SEQUENCES, join_published
from tokenmill.tasks.shards.plan import Finished, Plan, PlannedShard
from tokenmill.tasks.shards.planning import held_out, places, plan_shards, require_no
from tokenmill.tasks.shards.publication import (
    Listed,
    Named,
    Published,
    Weights,
    blend_json,
    blend_weights,
    described,
    mix_header,
    mix_of,
    parts_with_tokens,
)
from tokenmill.tasks.shards.publish import place_files, publish_bytes
from tokenmill.tasks.shards.receipt import PartCount, Receipt, recipe_of
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import PREFIX, Store, read_bytes
from tokenmill.tasks.sources.files import Record, Slice
from tokenmill.tasks.sources.parquet import require_text
from tokenmill.tasks.storage import is_local, join

from .binidx import BinIdxError, read_index, token_dtype
from .encoders import NoEncoder
from .exact import encoder_of
from .fim import FimEncoder, FimRecipe, fim_lines, fim_recipe
from .gate import RACE_FROM, Gate, Verdict, fastest_engine, gate_notes, texts_of
from .load import commit_notes, commit_of, load_vocabulary, pinned, planned_vocabulary
from .phases import Pair, cut_phases, publish_phases
from .prefixes import FORMAT_VERSION as PREFIX_VERSION
from .prefixes import build_prefix, inspect_prefix, plan_prefixes
from .settings import Engine, PretrainRecipe, PretrainSettings, TokenizerSettings
from .shard import tokenize_shard
from .vocabulary import Vocabulary

FORMAT_VERSION = 2
"""Increase it when the same recipe and source give different bytes."""


@dataclass(frozen=True)
class PretrainFound:
    """The vocabulary, and the gate and its verdict on each dataset (by `split/name`)."""

    vocabulary: Vocabulary
    gates: Mapping[str, Gate]
    verdicts: Mapping[str, Verdict]


PretrainPlan = Planned[PretrainSettings, PretrainFound]


def worker_arguments(planned: PretrainPlan) -> dict[str, Any]:
    """Return the arguments that workers get besides the shard."""
    settings, found = planned.settings, planned.found
    left: Counter[str] = Counter()
    for shard in planned.plan.pending:
        left[f"{shard.split}/{shard.dataset}"] += shard.part.size
    # A race takes seconds, so it pays for datasets with much left to encode only.
    engines = {name: fastest_engine(found.gates[name], size) for name, size in left.items() if size >= RACE_FROM}
    tokenizer = pinned(settings.tokenizer, found.vocabulary.commit).model_dump()
    return {"tokenizer": tokenizer, "engines": engines, "on_bad_row": settings.on_bad_row}


def build_pretrain_shard(
    shard: PlannedShard,
    store: Store,
    tokenizer: Mapping[str, Any],
    engines: Mapping[str, Engine | None],
    on_bad_row: OnBadRow,
) -> Receipt:
    """Build one planned shard in this process; `engines` has the fastest engine of large datasets (by `split/name`).

    Raises RunError as `planned_vocabulary` does.
    """
    recipe = PretrainRecipe(**shard.identity["recipe"])
    # Every engine that passes the gate gives the same ids, so the fastest may differ from the recipe's.
    backend = engines.get(f"{shard.split}/{shard.dataset}") or recipe.backend
    vocabulary = planned_vocabulary(TokenizerSettings.model_validate(tokenizer), recipe.tokenizer)
    literal = recipe.special_tokens_in_text != "allow"
    fim = FimRecipe(**recipe.fim) if recipe.fim else None
    strings = fim.strings(vocabulary) if fim else frozenset[str]()
    guarded = vocabulary.guarding(strings) if strings else vocabulary
    encoder = encoder_of(guarded, backend, literal=literal)
    # As text, control strings in a document can't be mistaken for those around its pieces.
    rearranging = fim and FimEncoder(encoder, fim, () if literal else strings, recipe.max_text_tokens)
    return tokenize_shard(shard, recipe, encoder, guarded.special_tokens, store, on_bad_row, rearranging)


PAIR = re.compile(r"data_\d{5,}_[0-9a-f]{8}\.\w+")
PAIR_NAME = "data_{:05d}_{}"


@dataclass(frozen=True)
class PairLayout:
    """The prefixes, numbered in plan order. Datasets of weight 0 are published too, but omitted from blend.json.

    OUT/blend.full-validation.json    blend.json for --full-validation --multiple-validation-sets
    OUT/blend.sequences.json          sequences and documents of every prefix, as --per-dataset-sequences-path wants them

    `mix` is the solved budget of a number of tokens, whose phases are published too; None without such a number.
    """

    prefixes: Sequence[Finished]
    weights: Weights
    mix: Mix | None = None

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        """Return the pairs in the folders of the splits, and the files next to the blend."""
        return {"": re.compile(f"{re.escape(FULL_VALIDATION)}|{re.escape(SEQUENCES)}"), **dict.fromkeys(SPLITS, PAIR)}

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        """Link every prefix on a local disk; on an object store, use its path in the store."""
        listed: list[Listed] = []
        training: list[Pair] = []
        documents: dict[str, int] = {}
        named, stored = Named(output_dir, is_local(output_dir) and is_local(store.place)), Store(store.place, PREFIX)
        for item, part, split in parts_with_tokens(self.prefixes):
            prefix = named.add(item, split, stored.path(item.key, part), split, PAIR_NAME, (".bin", ".idx"))
            documents[prefix] = item.receipt.parts[part].documents
            listed.append(Listed(split, item.dataset, prefix, item.receipt.parts[part].tokens))
            training += [Pair.of(item, part, prefix)] if self.mix and split == "train" else []
        place_files(named.pairs)
        blend = blend_json(listed, self.weights)
        header, files = {}, []
        if self.mix is not None:
            header, files = publish_phases(output_dir, cut_phases(training, self.mix), self.mix, blend)
            ranges = [pair for phase in header["phases"] for pair in phase["pairs"]]
            documents |= {join_published(output_dir, each["path"]): each["documents"] for each in ranges}
        whole = orjson.loads(blend)
        contents = {
            # Megatron-LM would take the iterator of a test split for a list of them, and fail after the last step.
            FULL_VALIDATION: {**whole, "valid": whole["valid"] and whole["valid"][1::2], "test": None},
            # Every document is one sequence, and an index has one more boundary than documents.
            SEQUENCES: {prefix: [count, count + 1] for prefix, count in documents.items()},
        }
        for name, content in contents.items():
            text = orjson.dumps(content, option=orjson.OPT_INDENT_2)
            publish_bytes(join(output_dir, name), text)
            files = [*files, described(name, text)]
        return Published({}, blend, files, header, self.prefixes, named.names)


def plan_join(planned: PretrainPlan, finished: Sequence[Finished]) -> Plan:
    """Return the prefixes of tokenized shards."""
    dtype = token_dtype(planned.found.vocabulary.size)
    return plan_prefixes(finished, planned.plan.store, planned.settings.prefix_size, dtype)


def read_pretrain_shard(
    shard: PlannedShard,
    store: Store,
    tokenizer: Mapping[str, Any],
    engines: Mapping[str, Engine | None],  # noqa: ARG001 - none is loaded
    on_bad_row: OnBadRow,
) -> Receipt:
    """Read the rows of a planned shard as `build_pretrain_shard` does, but encode nothing."""
    recipe = PretrainRecipe(**shard.identity["recipe"])
    vocabulary = planned_vocabulary(TokenizerSettings.model_validate(tokenizer), recipe.tokenizer)
    return tokenize_shard(shard, recipe, NoEncoder(), vocabulary.special_tokens, store, on_bad_row)


class Pretraining(Kind[PretrainSettings, PretrainFound]):
    """Text as token ids."""

    name = "pretrain"
    settings = PretrainSettings
    libraries = ("tokenmill", "gigatoken", "fastokens", "tokenizers", "tiktoken", "pyarrow", "numpy")
    stages = (
        Stage(
            "tokenize-shards",
            build_pretrain_shard,
            arguments=worker_arguments,
            in_threads=True,
            read=read_pretrain_shard,
        ),
        Stage("join-prefixes", build_prefix, plan_join, in_threads=True, repairs=True),
    )
    formats = {"pretrain": range(2, FORMAT_VERSION + 1), PREFIX: range(1, PREFIX_VERSION + 1)}
    tokens = "documents"
    next_steps = "tokenmill train {0} --output-dir model launcher=megatron-lm"

    def plan(self, blend: Blend, settings: PretrainSettings, output_dir: str | None) -> PretrainPlan:
        output_dir, store = places(blend, settings, output_dir, "pretrain")
        vocabulary = load_vocabulary(settings.tokenizer)
        gates: dict[str, Gate] = {}
        verdicts: dict[str, Verdict] = {}

        def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[PretrainRecipe]:
            require_no(source, ["converter", "transforms", "template_variables"], "pretraining")
            literal = settings.special_tokens_in_text != "allow"
            texts, name = partial(texts_of, source.text_field), f"{split}/{source.name}"
            # The setting is for training data, so that losses on held-out data can be compared.
            fim = fim_recipe(source.fim or (None if split in ("valid", "test") else settings.fim), vocabulary)
            strings = fim.strings(vocabulary) if fim else frozenset[str]()
            which = orjson.dumps([source.text_field, *sorted(strings)]).decode() if strings else source.text_field
            guarded = vocabulary.guarding(strings) if strings else vocabulary
            gates[name] = Gate(guarded, slices, texts, which, store.place, literal)
            verdicts[name] = gates[name].verdict()
            recipe = recipe_of(
                PretrainRecipe,
                settings,
                text_field=source.text_field,
                tokenizer=vocabulary.fingerprint,
                vocabulary_size=vocabulary.size,
                backend=verdicts[name].backend,
                bos=vocabulary.bos if settings.tokenizer.add_bos else None,
                eos=vocabulary.eos if settings.tokenizer.add_eos else None,
                fim=asdict(fim) if fim else None,
                **held_out(settings, split),
            )
            return [recipe] * len(slices)

        plan = plan_shards(
            blend, settings, store, FORMAT_VERSION, lambda source: [source.text_field], require_text, recipes, form="documents"
        )  # fmt: skip
        notes = commit_notes(settings.tokenizer, vocabulary) | gate_notes(verdicts)
        return Planned(blend, settings, output_dir, plan, PretrainFound(vocabulary, gates, verdicts), notes)

    def check(self, blend: Blend, settings: PretrainSettings, output_dir: str) -> None:
        load_vocabulary(settings.tokenizer)

    def needs(self, planned: PretrainPlan) -> Needs:
        # Engines work outside Python, so threads of this process scale; the reference doesn't, and is slow enough for workers to pay.
        workers = planned.settings.workers
        slow = any(verdict.backend == "reference" for verdict in planned.found.verdicts.values())
        return Needs(workers or cores() if slow and planned.plan.pending_bytes > LITTLE_BYTES else workers)

    def shape(self, source: DataSource, record: Record) -> str | None:
        return f"documents in {source.text_field!r}"

    def release(self, planned: PretrainPlan, finished: Sequence[Finished]) -> Release:
        found = planned.found
        tokenizer = {
            "fingerprint": found.vocabulary.fingerprint,
            **commit_of(found.vocabulary),
            "vocabulary_size": found.vocabulary.size,
            "dtype": token_dtype(found.vocabulary.size).name,
            "gate": {name: asdict(verdict) for name, verdict in found.verdicts.items()},
        }
        prefixes = planned.last
        blend = planned.blend
        mix = mix_of(blend, prefixes)
        layout = PairLayout(prefixes, blend_weights(blend, mix), mix if blend.total else None)
        return Release(layout, {**mix_header(mix), "tokenizer": tokenizer})

    def inspect(self, store: Store, receipt: Receipt) -> list[str]:
        if receipt.identity["kind"] == PREFIX:
            return inspect_prefix(store, receipt)
        problems: list[str] = []
        for part, recorded in receipt.parts.items():
            place = store.path(receipt.key, f"{part}.idx")
            size = next((output.size for output in receipt.outputs if output.path == f"{part}.bin"), None)
            data = read_bytes(place)
            if data is None or size is None:
                problems.append(f"{place}: the pair is incomplete")
                continue
            try:
                index = read_index(data, size)
            except BinIdxError as error:
                problems.append(f"{place}: {error}")
                continue
            if (found := PartCount(index.documents, index.tokens)) != recorded:
                problems.append(f"{place}: holds {found}, but its receipt records {recorded}")
        return problems

    def summary(self, manifest: Manifest) -> Sequence[str]:
        return list(fim_lines(manifest))


PRETRAIN = Pretraining()
