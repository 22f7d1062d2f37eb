"""Planning a pretraining preparation: blend and settings in, every shard with its identity out. No Prefect, no Dask.

Reading happens here only as far as identity needs it: directory listings, footers of Parquet files, one pass of
hashing over local files that are not remembered, and the exactness gate's sample of each data set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.blend.models import SPLITS, Blend, DataSource
from tasks.errors import InputError
from tasks.shards.identity import shard_identity
from tasks.shards.plan import Plan, PlannedShard
from tasks.shards.publish import publish_bytes
from tasks.shards.store import Store, read_bytes
from tasks.sources.content import ContentIndex
from tasks.sources.cut import cut, leading_rows, leading_share
from tasks.sources.discovery import discover
from tasks.sources.files import Slice
from tasks.storage import absolute, join, user_cache
from tasks.tokenize.gate import Verdict, judge
from tasks.tokenize.load import load_vocabulary
from tasks.tokenize.settings import SHARES, TINY_ROWS, PretrainRecipe, PretrainSettings
from tasks.tokenize.vocabulary import Vocabulary

KIND = "pretrain"
FORMAT_VERSION = 1
"""Raised whenever the same recipe and source would give other bytes than before."""

FLAT = "datasets"
"""The split that a planned shard of a flat blend carries: its documents are held out one by one."""


@dataclass(frozen=True)
class PretrainPlan:
    """The plan, the settings it was made with, and what the gate said of each data set (by `split/name`)."""

    blend: Blend
    settings: PretrainSettings
    output_dir: str
    plan: Plan
    verdicts: Mapping[str, Verdict]
    vocabulary: Vocabulary = field(repr=False)


def plan_pretrain(blend: Blend, settings: PretrainSettings, output_dir: str | None) -> PretrainPlan:
    """Plan `blend` for `output_dir`; without one, nothing counts as built and hashes are remembered per user.

    Raises InputError for anything that a person must mend first.
    """
    output_dir = absolute(output_dir) if output_dir else user_cache("plan")
    place = absolute(settings.store) if settings.store else join(output_dir, "shards")
    vocabulary = load_vocabulary(settings.tokenizer)
    index_place = join(place, "index.json")
    index = ContentIndex.load(read_bytes(index_place) or b"{}")
    shards: list[PlannedShard] = []
    verdicts: dict[str, Verdict] = {}
    for split, sources in blend.parts().items():
        for source in sources:
            slices = index.identify(_slices(source, settings), source.text_field, settings.source_identity)
            if not slices:
                raise InputError(f"data set {source.name!r}: {source.path} holds no rows; mend the path or remove it")
            literal = settings.special_tokens_in_text != "allow"
            verdict = judge(vocabulary, slices, source.text_field, place, literal=literal)
            verdicts[f"{split}/{source.name}"] = verdict
            recipe = _recipe(source, split, settings, vocabulary, verdict)
            shards += [
                PlannedShard(source.name, split, part, shard_identity(KIND, FORMAT_VERSION, recipe, part))
                for part in slices
            ]
    if index.changed:
        publish_bytes(index_place, index.dump())
    plan = Plan.of(Store(place, KIND), shards, rebuild=settings.force)
    return PretrainPlan(blend, settings, output_dir, plan, verdicts, vocabulary)


def _slices(source: DataSource, settings: PretrainSettings) -> list[Slice]:
    """The slices of a data set, in order, down to the leading part that a scale or a sample asks for."""
    slices = [part for file in discover(source) for part in cut(file, settings.shard_size, source.text_field)]
    if SHARES[settings.scale] < 1:
        slices = leading_share(slices, SHARES[settings.scale])
    limits = [rows for rows in (settings.sample, TINY_ROWS if settings.scale == "tiny" else None) if rows is not None]
    return leading_rows(slices, min(limits)) if limits else slices


def _recipe(
    source: DataSource, split: str, settings: PretrainSettings, vocabulary: Vocabulary, verdict: Verdict
) -> PretrainRecipe:
    holdout = settings.holdout
    holds_out = split not in SPLITS and bool(holdout.valid or holdout.test)
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
        holdout_valid=holdout.valid if holds_out else 0.0,
        holdout_test=holdout.test if holds_out else 0.0,
        holdout_seed=holdout.seed if holds_out else None,
    )
