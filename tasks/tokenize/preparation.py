"""Pretraining: documents become token ids in Megatron `.bin/.idx` pairs.

    OUT/train|valid|test/data_00000_1a2b3c4d.bin/.idx   names for the shards' files (hard links on a local disk)

Megatron caches its sample index by path, so a name includes digits of its shard's key. On an object store nothing is renamed or
copied: blend.json points into the store. Planning reads a sample of each data set for the exactness gate.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.shards.manifest import Finished
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.planning import holdout_of, places, plan_shards, require_no
from tokenmill.tasks.shards.preparation import Planned, Preparation, Release, Step
from tokenmill.tasks.shards.publication import (
    Listed,
    Published,
    Weights,
    blend_json,
    blend_weights,
    parts_with_tokens,
)
from tokenmill.tasks.shards.publish import place_files
from tokenmill.tasks.shards.receipt import PartCount, Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store, read_bytes, size_of
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.parquet import require_text
from tokenmill.tasks.storage import is_local, join

from .binidx import BinIdxError, read_index, token_dtype
from .document_map import FILE, read_map
from .exact import exact_encoder
from .gate import Verdict, gate_notes, judge, texts_of
from .load import load_vocabulary, planned_vocabulary
from .settings import PretrainRecipe, PretrainSettings, TokenizerSettings
from .shard import tokenize_shard
from .vocabulary import Vocabulary

FORMAT_VERSION = 2
"""Increase it when the same recipe and source give different bytes."""


@dataclass(frozen=True)
class PretrainFound:
    """The vocabulary, and the gate's verdict on each data set (by `split/name`)."""

    vocabulary: Vocabulary
    verdicts: Mapping[str, Verdict]


PretrainPlan = Planned[PretrainSettings, PretrainFound]


def plan_pretrain(blend: Blend, settings: PretrainSettings, output_dir: str | None) -> PretrainPlan:
    """Plan `blend` for `output_dir`; without one, nothing counts as built and hashes are cached per user.

    Raises InputError for anything that must be fixed first.
    """
    output_dir, store = places(blend, settings, output_dir, "pretrain")
    vocabulary = load_vocabulary(settings.tokenizer)
    verdicts: dict[str, Verdict] = {}

    def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[PretrainRecipe]:
        require_no(source, ["used_in", "filters", "converter", "transforms"], "pretraining")
        literal = settings.special_tokens_in_text != "allow"
        texts, field_name = partial(texts_of, source.text_field), source.text_field
        verdict = judge(vocabulary, slices, texts, field_name, store.place, literal=literal)
        verdicts[f"{split}/{source.name}"] = verdict
        return [_recipe(source, split, settings, vocabulary, verdict)] * len(slices)

    plan = plan_shards(
        blend, settings, store, FORMAT_VERSION, lambda source: [source.text_field], require_text, recipes
    )
    return Planned(blend, settings, output_dir, plan, PretrainFound(vocabulary, verdicts), gate_notes(verdicts))


def _recipe(
    source: DataSource, split: str, settings: PretrainSettings, vocabulary: Vocabulary, verdict: Verdict
) -> PretrainRecipe:
    holdout = holdout_of(settings, split)
    return PretrainRecipe(
        text_field=source.text_field,
        tokenizer=vocabulary.fingerprint,
        vocabulary_size=vocabulary.size,
        backend=verdict.backend,
        bos=vocabulary.bos if settings.tokenizer.add_bos else None,
        eos=vocabulary.eos if settings.tokenizer.add_eos else None,
        special_tokens_in_text=settings.special_tokens_in_text,
        min_doc_chars=settings.min_doc_chars,
        max_doc_tokens=settings.max_doc_tokens,
        holdout_valid=holdout.valid if holdout else 0.0,
        holdout_test=holdout.test if holdout else 0.0,
        holdout_seed=holdout.seed if holdout else None,
    )


def worker_arguments(planned: PretrainPlan) -> dict[str, Any]:
    """The arguments that workers get besides the shard."""
    return {"tokenizer": planned.settings.tokenizer.model_dump(), "on_bad_row": planned.settings.on_bad_row}


def build_pretrain_shard(
    shard: PlannedShard, store: Store, tokenizer: Mapping[str, Any], on_bad_row: OnBadRow
) -> Receipt:
    """Build one planned shard in this process. Raises RunError as `planned_vocabulary` does."""
    recipe = PretrainRecipe(**shard.identity["recipe"])
    vocabulary = planned_vocabulary(TokenizerSettings.model_validate(tokenizer), recipe.tokenizer)
    literal = recipe.special_tokens_in_text != "allow"
    fast = recipe.backend == "gigatoken"
    encoder = exact_encoder(vocabulary, literal=literal) if fast else vocabulary.reference(literal)
    return tokenize_shard(shard, recipe, encoder, vocabulary.special_tokens, store, on_bad_row)


PAIR = re.compile(r"data_\d{5,}_[0-9a-f]{8}\.\w+")


@dataclass(frozen=True)
class PairLayout:
    """bin/idx pairs, numbered in plan order. Data sets of weight 0 are published too, but omitted from blend.json."""

    weights: Weights

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        """The pairs in the folders of the splits."""
        return dict.fromkeys(SPLITS, PAIR)

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        """Link every pair on a local disk; on an object store, use its path in the store."""
        linked = is_local(output_dir) and is_local(store.place)
        names: dict[str, dict[str, list[str]]] = {}
        listed: list[Listed] = []
        numbers: Counter[str] = Counter()
        pairs: list[tuple[str, str]] = []
        for item, part, split in parts_with_tokens(finished):
            prefix = store.path(item.key, part)
            if linked:
                prefix = join(output_dir, split, f"data_{numbers[split]:05d}_{item.key[:8]}")
                pairs += _named_files(store, item, part, prefix)
            numbers[split] += 1
            names.setdefault(item.shard.place, {})[split] = [prefix]
            listed.append(Listed(split, item.dataset, prefix, item.receipt.parts[part].tokens))
        place_files(pairs)
        return Published(names, blend_json(listed, self.weights))


def _named_files(store: Store, item: Finished, part: str, prefix: str) -> Iterator[tuple[str, str]]:
    """The files of a part in the store, each with its published name."""
    for output in item.receipt.outputs:
        stem, _, ending = output.path.rpartition(".")
        if stem == part:
            yield store.path(item.key, output.path), f"{prefix}.{ending}"


def release_pretrain(planned: PretrainPlan, finished: Sequence[Finished]) -> Release:  # noqa: ARG001 - as for any kind
    """The pairs, and the manifest's entries for the tokenizer."""
    found = planned.found
    tokenizer = {
        "fingerprint": found.vocabulary.fingerprint,
        "vocabulary_size": found.vocabulary.size,
        "dtype": token_dtype(found.vocabulary.size).name,
        "gate": {name: asdict(verdict) for name, verdict in found.verdicts.items()},
    }
    return Release(PairLayout(blend_weights(planned.blend)), {"tokenizer": tokenizer})


def inspect_pretrain_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of the `.bin/.idx` pairs and the document map of a shard: format, bounds, and counts against the receipt."""
    pairs = [problem for part, count in receipt.parts.items() for problem in _pair(store, receipt.key, part, count)]
    return [*pairs, *_map_problems(store, receipt)]


def _pair(store: Store, key: str, part: str, recorded: PartCount) -> list[str]:
    place = store.path(key, f"{part}.idx")
    data, size = read_bytes(place), size_of(store.path(key, f"{part}.bin"))
    if data is None or size is None:
        return [f"{place}: the pair is incomplete"]
    try:
        index = read_index(data, size)
    except BinIdxError as error:
        return [f"{place}: {error}"]
    found = PartCount(index.documents, index.tokens)
    return [] if found == recorded else [f"{place}: holds {found}, but its receipt says {recorded}"]


def _map_problems(store: Store, receipt: Receipt) -> list[str]:
    rows = read_map(store, receipt)
    return [
        f"{store.path(receipt.key, FILE)}: has {rows.documents(part):,} documents of {part}, but its receipt says "
        f"{count.documents:,}"
        for part, count in receipt.parts.items()
        if rows and rows.documents(part) != count.documents
    ]


def require_tokenizer(_blend: Blend, settings: PretrainSettings, _output_dir: str) -> None:
    """Raises InputError for a tokenizer that is missing or cannot encode documents."""
    load_vocabulary(settings.tokenizer)


PRETRAIN = Preparation(
    name="pretrain",
    settings=PretrainSettings,
    libraries=("tokenmill", "gigatoken", "tokenizers", "tiktoken", "pyarrow", "numpy"),
    plan=plan_pretrain,
    check=require_tokenizer,
    step=Step("tokenize-shards", build_pretrain_shard),
    arguments=worker_arguments,
    release=release_pretrain,
    inspect=inspect_pretrain_shard,
    tokens="documents",
    next_steps="train: point Megatron's per-split blend at {0}/blend.json",
)
